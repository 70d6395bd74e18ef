"""Measures the traits that the regimes use, on devices whose adapters only assume them.

In about 7 s it measures how much slower launches are after a rest, when the power controller reacts to load, how long
the device must rest afterwards, and the size of the cache (from the bandwidth of copies).
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import NamedTuple

from mamf.backend import MIB, Advice, Backend
from mamf.calibration import ASSUMED, BurstTraits, SustainedTraits
from mamf.errors import UnsupportedError, describe_error, get_plugin_errors
from mamf.machine.environment import disable_garbage_collection
from mamf.operations.bandwidth.operation import BandwidthShape
from mamf.operations.matmul.operation import choose_matmul_kernel, problem_for
from mamf.operations.matmul.shapes import MatmulShape
from mamf.plugins.discovery import choose_kernels, make_operation

Launch = Callable[[], object]
_SIZES = (256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
# The host affects a launch this long only a little; a lead this long puts the host ahead of the device.
_LAUNCH_SECONDS, _LEAD_SECONDS, _LEAD_BYTES = 0.0005, 0.001, 256 * MIB
_RESTS, _ROUNDS, _TRAIN_SECONDS, _MAX_IN_TRAIN = (0.01, 0.1, 0.5), 3, 0.1, 200
_LOAD_SECONDS, _BLOCK_SECONDS, _RECOVERIES = 3.0, 0.005, (0.03, 0.1, 0.3, 1.0)
# Below these ratios of launch times, launches count as awake, as not slowed and as recovered. Launches count as settled
# if their times differ by at most the share _SETTLED.
_AWAKE, _SLOWED, _RECOVERED, _SETTLED = 1.05, 1.03, 1.015, 0.01
# A train takes a quarter of the controller's reaction time. A device has recovered if it keeps its first speed for
# three quarters of it.
_TRAIN_SHARE, _RECOVERY_SHARE, _SHORTEST_TRAIN, _LONGEST_TRAIN = 0.25, 0.75, 0.001, 0.1
# Total sizes of the two arrays of a copy. A cache counts as detected if copies of at least _MIN_IN_CACHE sizes are
# _IN_CACHE times as fast as copies in memory.
_COPIED_MIB = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_COPIES, _MIN_IN_CACHE, _IN_CACHE = 20, 2, 1.3


@dataclass(frozen=True)
class MeasuredTraits:
    """The traits of one device. ``cache_bytes``: None if no cache was detected. ``findings``: the traits in words, for
    people.
    """

    burst: BurstTraits
    sustained: SustainedTraits
    cache_bytes: int | None
    findings: Sequence[Advice]


#: The traits measured in this process, by backend, index and name of the device.
_measured: dict[tuple[str, int, str], MeasuredTraits] = {}


def replace_assumed_traits(backend: Backend, on_start: Callable[[str], object] = lambda text: None) -> Sequence[Advice]:
    """Measure the traits of a device if its adapter only assumes them, once per process. Store the traits in the
    backend and return the findings. If the measurement fails, keep the assumed traits; a remark in each row says so.
    """
    if ASSUMED not in (backend.burst_traits.remark, backend.sustained_traits.remark):
        return ()
    info = backend.info
    key = (backend.name, backend.index, info.name)
    if key not in _measured:
        on_start(
            f"measuring how {info.name} wakes up, slows down and settles, because "
            "its backend has only assumed values (8 s)"
        )
        _measured[key] = _measure_or_assume_traits(backend)
    found = _measured[key]
    backend.burst_traits, backend.sustained_traits = found.burst, found.sustained
    backend.info = replace(info, cache_bytes=info.cache_bytes or found.cache_bytes)
    return found.findings


def _measure_or_assume_traits(backend: Backend) -> MeasuredTraits:
    try:
        return measure_traits(backend)
    except get_plugin_errors() as error:  # whatever a vendor's library raises
        remark = f"lengths of rests and trains are assumed, because measuring them failed: {describe_error(error)}"
    burst, sustained = replace(backend.burst_traits, remark=remark), replace(backend.sustained_traits, remark=remark)
    return MeasuredTraits(burst, sustained, None, (Advice("traits", "unknown", remark),))


def measure_traits(backend: Backend) -> MeasuredTraits:
    """Measure the traits with the device's default matmul and copies. Raises any error of their launches."""
    cache = backend.info.cache_bytes or measure_cache_bytes(backend)
    with _prepare_matmul(backend) as launch, disable_garbage_collection():
        probe = _Probe(backend, launch)
        wake, reaction = probe.measure_wake(), probe.measure_reaction()
        recovery = None if reaction.seconds is None else probe.measure_recovery(reaction.first, reaction.seconds)
    burst = _make_burst_traits(backend.burst_traits, wake, reaction, recovery)
    sustained = _make_sustained_traits(backend.sustained_traits, reaction.settled)
    return MeasuredTraits(burst, sustained, cache, _describe_findings(wake, reaction, recovery, cache))


def _make_burst_traits(assumed: BurstTraits, wake: WakeUp, reaction: Reaction, recovery: float | None) -> BurstTraits:
    traits, remarks = replace(assumed, wake_seconds=wake.seconds), [reaction.remark]
    if wake.seconds > _TRAIN_SECONDS / 2:
        remarks.append(f"launches after a rest take {wake.slowdown:.2g} times as long for {wake.seconds:.2g} s or more")
    if reaction.seconds is not None:
        train = min(max(_TRAIN_SHARE * reaction.seconds, _SHORTEST_TRAIN), _LONGEST_TRAIN)
        traits = replace(traits, train_seconds=train, longest_rest_seconds=recovery or traits.longest_rest_seconds)
        remarks += [] if recovery else [f"a rest of {_RECOVERIES[-1]:g} s did not restore the initial speed"]
    elif wake.seconds or reaction.remark:  # rests do not help here, and cause a wake-up delay
        traits = replace(traits, rest_ratio=0.0, longest_rest_seconds=0.0)
    return replace(traits, remark="; ".join(filter(None, remarks)))


def _make_sustained_traits(assumed: SustainedTraits, settled: float | None) -> SustainedTraits:
    """Return the sustained traits, never shorter than assumed. ``settled``: seconds of load until launch times no
    longer change; None if they never settled.
    """
    if settled is None:
        return replace(assumed, remark=f"this device did not settle within {_LOAD_SECONDS:g} s of load when probed")
    settle, restart = (max(each, settled) for each in (assumed.settle_seconds, assumed.restart_seconds))
    return replace(assumed, settle_seconds=settle, restart_seconds=restart, remark="")


def measure_cache_bytes(backend: Backend) -> int | None:
    """Return the size in bytes of the largest copies that are clearly faster than copies in memory, or None."""
    of = make_operation("bandwidth")
    ((_, kernel), *_others) = choose_kernels(of, backend)
    problem = of.problem_for(backend, {"pattern": "copy"})
    pool, free = backend.operand_pool(problem.data, problem.seed), backend.free_memory()
    probe, rates = _Probe(backend, lambda: None), dict[int, float]()
    # The largest first, so that the pool allocates only once.
    sizes = [round(size * MIB) for size in reversed(_COPIED_MIB) if free is None or 2 * size * MIB <= free]
    try:
        for size in sizes:
            launch = kernel.prepare(backend, problem, BandwidthShape(size // 2), pool).launches[0]
            once = _time_launches(backend, launch, 1)
            probe.queue_lead()  # so that small copies do not wait for the host
            rates[size] = size / _time_launches(backend, launch, 3 if once > _LAUNCH_SECONDS else _COPIES)
    finally:
        pool.release()
        backend.release_memory()
    of_memory = median(rates[size] for size in sizes[:3])
    cached = [size for size in sizes if rates[size] >= _IN_CACHE * of_memory]
    return max(cached) if len(cached) >= _MIN_IN_CACHE else None


def _time_launches(backend: Backend, launch: Launch, count: int) -> float:
    """Return the mean seconds of ``count`` launches, after one warm-up launch."""
    launch()
    backend.submit()
    start = backend.mark()
    for _ in range(count):
        launch()
        backend.submit()
    end = backend.mark()
    backend.synchronize()
    return max(backend.seconds_between(start, end), 1e-9) / count


@contextmanager
def _prepare_matmul(backend: Backend) -> Iterator[Launch]:
    """Prepare the default matmul, and yield its launch. The size is the smallest of _SIZES at which a launch takes at
    least _LAUNCH_SECONDS, or the largest of _SIZES.
    """
    problem = problem_for(backend, None)
    kernel, pool = choose_matmul_kernel(backend, problem), backend.operand_pool(problem.data, problem.seed)
    if reason := kernel.unsupported(backend, problem):
        raise UnsupportedError(reason)
    try:
        with kernel.settings(backend, problem):
            for size in _SIZES:
                launch = kernel.prepare(backend, problem, MatmulShape(size, size, size), pool).launches[0]
                if _time_launches(backend, launch, 3) >= _LAUNCH_SECONDS:
                    break
            yield launch
    finally:
        pool.release()
        backend.release_memory()


class WakeUp(NamedTuple):
    """The wake-up after a rest: the first launch takes ``slowdown`` times as long as usual, and launches are slower for
    ``seconds`` of load (0 if no launch is slower).
    """

    slowdown: float
    seconds: float


class Reaction(NamedTuple):
    """The reaction to load.

    - ``seconds``: seconds of load until launches become slower; None if they never do.
    - ``slower``: how much longer launches take after that, as a share of ``first``.
    - ``settled``: seconds of load until launch times no longer change; None if they still changed at the end.
    - ``first``: seconds of a launch at the start.
    """

    seconds: float | None
    slower: float
    settled: float | None
    first: float

    @property
    def remark(self) -> str:
        is_slow = self.slower < 1 / _AWAKE - 1
        return f"launches became {1 / (1 + self.slower):.2g} times faster within seconds of load" if is_slow else ""


def _find_swing_start(ends: Sequence[float], seconds: Sequence[float], backend: Backend) -> float | None:
    """Return the moment from which the power controller only oscillates: the means over the last two periods agree.
    None if they do not, or if launches are too long to tell.
    """
    swing, last = backend.sustained_traits.swing_seconds, ends[-1]
    before, after = (
        [each for end, each in zip(ends, seconds, strict=True) if since < end <= since + swing]
        for since in (last - 2 * swing, last - swing)
    )
    agree = before and after and abs(fmean(before) / fmean(after) - 1) <= 2 * _SETTLED
    return last - 2 * swing if agree else None


class _Probe:
    def __init__(self, backend: Backend, launch: Launch) -> None:
        self.backend, self.launch = backend, launch
        self.launch_seconds = _time_launches(backend, launch, 10)
        self.flush_seconds = _time_launches(backend, lambda: backend.flush_cache(_LEAD_BYTES), 5)
        self.waking = 0.0

    def queue_lead(self) -> None:
        """Queue flushes, as before a train in burst. They wake the device, and the host gets ahead of it."""
        for _ in range(1 + int(max(_LEAD_SECONDS, self.waking) / self.flush_seconds)):
            self.backend.flush_cache(_LEAD_BYTES)

    def measure_wake(self) -> WakeUp:
        """Return the longest wake-up over all rests. The wake-up after a rest is the shortest of several rounds,
        because of noise.
        """
        found = [min(self._measure_wake_after(rest) for _ in range(_ROUNDS)) for rest in _RESTS]
        self.waking = max(seconds for seconds, _times in found)
        return WakeUp(max(times for _seconds, times in found), self.waking)

    def _measure_wake_after(self, rest: float) -> tuple[float, float]:
        self.backend.synchronize()
        self.backend.sleep(rest)
        windows = self._run_train(_TRAIN_SECONDS)
        steady = median(windows[len(windows) // 2 :])
        slow = next((index for index, window in enumerate(windows) if window <= _AWAKE * steady), len(windows))
        after = windows[slow : slow + 10] or windows
        return _LEAD_SECONDS + sum(windows[:slow]) if slow else 0.0, windows[0] / median(after)

    def _run_train(self, seconds: float) -> list[float]:
        """Return the seconds of each launch of a train, queued behind a lead."""
        backend = self.backend
        self.queue_lead()
        marks = [backend.mark()]
        for _ in range(min(max(4, math.ceil(seconds / self.launch_seconds)), _MAX_IN_TRAIN)):
            self.launch()
            backend.submit()
            marks.append(backend.mark())
        backend.synchronize()
        return [backend.seconds_between(start, end) for start, end in itertools.pairwise(marks)]

    def measure_reaction(self) -> Reaction:
        """Rest the device, load it for seconds, and describe how the time of a launch changes."""
        self.backend.sleep(_RECOVERIES[-1])
        ends, seconds = self._load_device(_LOAD_SECONDS)
        awake = [each for end, each in zip(ends, seconds, strict=True) if end > self.waking]
        first, settled = median(awake[:3]), median(awake[-len(awake) // 3 :])
        bound = first + (settled - first) / 4
        is_slower = [end > self.waking and each > bound for end, each in zip(ends, seconds, strict=True)]
        begins = (end for end, now, then in zip([0.0, *ends], is_slower, is_slower[1:], strict=False) if now and then)
        smooth = (median(seconds[max(0, index - 4) : index + 5]) for index in range(len(seconds)))
        last = max(
            (end for end, each in zip(ends, smooth, strict=True) if abs(each / settled - 1) > _SETTLED), default=0.0
        )
        return Reaction(
            seconds=next(begins, None) if settled > _SLOWED * first else None,
            slower=settled / first - 1,
            settled=last if last < 0.8 * ends[-1] else _find_swing_start(ends, seconds, self.backend),
            first=first,
        )

    def _load_device(self, seconds: float) -> tuple[list[float], list[float]]:
        """Load the device for ``seconds``. Return two lists with one value per block: the seconds from the start of the
        load to the end of the block, and the mean seconds of a launch in it.
        """
        backend, count = self.backend, max(1, round(_BLOCK_SECONDS / self.launch_seconds))
        start = backend.mark()
        queued, ends, each = deque([start]), [0.0], list[float]()
        for _ in range(math.ceil(4 * seconds / _BLOCK_SECONDS)):  # ends even if the clock does not advance
            for _ in range(count):
                self.launch()
                backend.submit()
            queued.append(backend.mark())
            if len(queued) > 2:
                queued.popleft()
                backend.wait(queued[0])
                ends.append(backend.seconds_between(start, queued[0]))
                each.append((ends[-1] - ends[-2]) / count)
            if ends[-1] >= seconds:
                break
        backend.synchronize()
        return ends[1:], each

    def measure_recovery(self, first: float, reaction: float) -> float | None:
        """Return the shortest rest of _RECOVERIES after which a loaded device regains its first speed, and keeps it for
        nearly as long as its controller takes to react; None if even the longest is too short.
        """
        for rest in _RECOVERIES:
            self._load_device(max(0.2, 3 * reaction))
            self.backend.sleep(rest)
            train = self._run_train(_RECOVERY_SHARE * reaction)
            if median(train[len(train) // 2 :]) <= _RECOVERED * first:
                return rest
        return None


def _describe_findings(wake: WakeUp, reaction: Reaction, recovery: float | None, cache: int | None) -> Sequence[Advice]:
    woken = "launches after a rest take as long as before"
    if wake.seconds:
        woken = f"launches after a rest take {wake.slowdown:.2g} times as long for {wake.seconds * 1e3:.3g} ms"
    slowed = reaction.remark or f"{_LOAD_SECONDS:g} s of load does not slow launches"
    if reaction.seconds is not None:
        back = "no rest restores the speed" if recovery is None else f"a rest of {recovery:g} s restores the speed"
        slowed = f"launches take {reaction.slower:.0%} longer after {reaction.seconds * 1e3:.3g} ms of load; {back}"
    size = "the bandwidth of copies shows no cache" if cache is None else f"{cache / MIB:.3g} MiB"
    return (
        Advice("wake-up", "ok", woken),
        Advice("reaction to load", "ok" if reaction.settled is not None else "unknown", slowed),
        Advice("cache", "ok" if cache else "unknown", size),
    )
