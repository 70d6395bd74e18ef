"""Measure the traits of a device: how it reacts to load, how it wakes up from a rest, and the size of its cache. The
regimes need these traits to time rests and launches. mamf measures them only if the backend has no measured values for
this device.

In about 7 s, the code measures how much slower launches are right after a rest, how soon the power controller reacts to
load, how long the device must rest after load to regain its speed, and how large the cache is (from the bandwidth of
copies).
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

from mamf.backend import MIB, Backend, CheckResult
from mamf.calibration import ASSUMED_TRAITS_REMARK, BurstTraits, SustainedTraits
from mamf.errors import UnsupportedError, describe_error, get_catchable_plugin_errors
from mamf.machine.environment import pause_garbage_collection
from mamf.operations.bandwidth.operation import BandwidthShape
from mamf.operations.matmul.operation import choose_matmul_kernel, make_problem
from mamf.operations.matmul.shapes import MatmulShape
from mamf.plugins.discovery import choose_kernels, make_operation

Launch = Callable[[], object]
_MATMUL_SIZES = (256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
# Launches should take at least _MIN_LAUNCH_SECONDS, so that the host hardly affects their time. Cache flushes of
# _LEAD_FLUSH_BYTES each, which keep the device busy for _LEAD_SECONDS, let the host queue launches ahead of the device.
_MIN_LAUNCH_SECONDS, _LEAD_SECONDS, _LEAD_FLUSH_BYTES = 0.0005, 0.001, 256 * MIB
_WAKE_UP_REST_SECONDS, _WAKE_UP_ROUND_COUNT, _WAKE_UP_TRAIN_SECONDS, _MAX_TRAIN_LAUNCHES = (0.01, 0.1, 0.5), 3, 0.1, 200
_LOAD_SECONDS, _BLOCK_SECONDS, _RECOVERY_REST_SECONDS = 3.0, 0.005, (0.03, 0.1, 0.3, 1.0)
# _MAX_AWAKE_RATIO: a device is awake if a launch takes at most this many times as long as later launches.
# _MIN_SLOWED_RATIO: load slows a device if launches then take more than this many times as long as at the start of the
# load. _MAX_RECOVERED_RATIO: after a rest, a device has recovered if launches take at most this many times as long as
# at the start of the load. _MAX_SETTLED_DEVIATION: a device has settled if launch times differ from their final value
# by at most this share.
_MAX_AWAKE_RATIO, _MIN_SLOWED_RATIO, _MAX_RECOVERED_RATIO, _MAX_SETTLED_DEVIATION = 1.05, 1.03, 1.015, 0.01
# The reaction time of the power controller is how long a device can be loaded before launches become slower. In the
# burst regime, a train (the launches between two rests) may take a quarter of this time. A device has recovered from
# load if it keeps its initial speed for three quarters of this time.
_TRAIN_SHARE_OF_REACTION, _RECOVERY_SHARE_OF_REACTION, _MIN_TRAIN_SECONDS, _MAX_TRAIN_SECONDS = 0.25, 0.75, 0.001, 0.1
# The total sizes of the two arrays of a copy. The device has a cache if copies of at least _MIN_CACHED_SIZE_COUNT of
# these sizes are _MIN_CACHE_SPEEDUP times as fast as copies of the largest sizes, which do not fit
# in any cache.
_COPIED_TOTAL_MIB = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_COPY_LAUNCH_COUNT, _MIN_CACHED_SIZE_COUNT, _MIN_CACHE_SPEEDUP = 20, 2, 1.3


@dataclass(frozen=True)
class MeasuredTraits:
    """The traits of one device as mamf measured them, for the regimes burst and sustained. ``cache_bytes``: the size of
    the cache; None if copies of all sizes are equally fast. ``findings``: the traits in words, for the terminal.
    """

    burst_traits: BurstTraits
    sustained_traits: SustainedTraits
    cache_bytes: int | None
    findings: Sequence[CheckResult]


#: The traits that this process has measured, by the backend, index and name of the device.
_TRAITS_BY_DEVICE: dict[tuple[str, int, str], MeasuredTraits] = {}


def replace_assumed_traits(
    backend: Backend, on_start: Callable[[str], object] = lambda text: None
) -> Sequence[CheckResult]:
    """Measure the traits of a device once per process, if its backend only assumes them. Store the traits in the
    backend, and return descriptions of them. Return an empty sequence if the backend already knows the traits. If the
    measurement fails, keep the assumed traits, and add a remark to each row.

    ``on_start``: called with a message before the measurement.
    """
    if ASSUMED_TRAITS_REMARK not in (backend.burst_traits.remark, backend.sustained_traits.remark):
        return ()
    info = backend.info
    key = (backend.name, backend.index, info.name)
    if key not in _TRAITS_BY_DEVICE:
        on_start(
            f"measuring for 8 s how the speed of {info.name} changes after a rest and under load, because backend "
            f"{backend.name} does not know it"
        )
        try:
            _TRAITS_BY_DEVICE[key] = measure_traits(backend)
        except get_catchable_plugin_errors() as error:  # Catch any error of a vendor's library.
            remark = (
                f"mamf uses default rest times between launches, because measuring them failed: {describe_error(error)}"
            )
            burst = replace(backend.burst_traits, remark=remark)
            sustained = replace(backend.sustained_traits, remark=remark)
            _TRAITS_BY_DEVICE[key] = MeasuredTraits(burst, sustained, None, (CheckResult("traits", "unknown", remark),))
    measured = _TRAITS_BY_DEVICE[key]
    backend.burst_traits, backend.sustained_traits = measured.burst_traits, measured.sustained_traits
    backend.info = replace(info, cache_bytes=info.cache_bytes or measured.cache_bytes)
    return measured.findings


def measure_traits(backend: Backend) -> MeasuredTraits:
    """Measure the traits of a device by launching its default matmul and copies. Raises any error of these launches."""
    cache = backend.info.cache_bytes or measure_cache_bytes(backend)
    with _prepare_matmul_launch(backend) as launch, pause_garbage_collection():
        probe = _TraitProbe(backend, launch)
        wake_up, reaction = probe.measure_wake_up(), probe.measure_load_reaction()
        recovery_seconds = (
            None
            if reaction.seconds_until_slowdown is None
            else probe.measure_recovery(reaction.first_launch_seconds, reaction.seconds_until_slowdown)
        )
    burst = _adapt_burst_traits(backend.burst_traits, wake_up, reaction, recovery_seconds)
    sustained = backend.sustained_traits
    if reaction.settling_seconds is None:
        remark = f"the speed of this device did not settle within {_LOAD_SECONDS:g} s of continuous load"
        sustained = replace(sustained, remark=remark)
    else:
        settle, restart = (
            max(each, reaction.settling_seconds) for each in (sustained.settle_seconds, sustained.restart_seconds)
        )
        sustained = replace(sustained, settle_seconds=settle, restart_seconds=restart, remark="")
    return MeasuredTraits(burst, sustained, cache, _describe_findings(wake_up, reaction, recovery_seconds, cache))


def _adapt_burst_traits(
    assumed_traits: BurstTraits, wake_up: WakeUp, reaction: LoadReaction, recovery_seconds: float | None
) -> BurstTraits:
    traits, remarks = replace(assumed_traits, wake_seconds=wake_up.wake_seconds), [reaction.speedup_remark]
    if wake_up.wake_seconds > _WAKE_UP_TRAIN_SECONDS / 2:
        remarks.append(
            f"for at least {wake_up.wake_seconds:.2g} s after a rest, launches take {wake_up.slowdown_ratio:.2g} times "
            "as long as later launches"
        )
    if reaction.seconds_until_slowdown is not None:
        train = min(
            max(_TRAIN_SHARE_OF_REACTION * reaction.seconds_until_slowdown, _MIN_TRAIN_SECONDS), _MAX_TRAIN_SECONDS
        )
        traits = replace(
            traits, train_seconds=train, longest_rest_seconds=recovery_seconds or traits.longest_rest_seconds
        )
        remarks += (
            []
            if recovery_seconds
            else [f"a rest of {_RECOVERY_REST_SECONDS[-1]:g} s did not restore the initial speed"]
        )
    elif wake_up.wake_seconds or reaction.speedup_remark:
        # Load does not slow this device, so do not rest: it would only have to wake up after each rest.
        traits = replace(traits, rest_ratio=0.0, longest_rest_seconds=0.0)
    return replace(traits, remark="; ".join(filter(None, remarks)))


def measure_cache_bytes(backend: Backend) -> int | None:
    """Return the size of the device's cache in bytes: the total size of the largest arrays that are copied clearly
    faster than arrays too large for any cache. Return None if too few sizes are copied that fast.
    """
    operation = make_operation("bandwidth")
    ((_, kernel), *_others) = choose_kernels(operation, backend)
    problem = operation.make_problem(backend, {"pattern": "copy"})
    pool, free = backend.make_operand_pool(problem.data, problem.seed), backend.read_free_memory_bytes()
    probe, rates = _TraitProbe(backend, lambda: None), dict[int, float]()
    # Begin with the largest size, so that the pool allocates only once.
    sizes = [round(size * MIB) for size in reversed(_COPIED_TOTAL_MIB) if free is None or 2 * size * MIB <= free]
    try:
        for size in sizes:
            launch = kernel.prepare(backend, problem, BandwidthShape(size // 2), pool).launches[0]
            seconds = _measure_launch_seconds(backend, launch, 1)
            probe.queue_flushes_before_launches()  # Without flushes ahead, small copies would wait for the host.
            rates[size] = size / _measure_launch_seconds(
                backend, launch, 3 if seconds > _MIN_LAUNCH_SECONDS else _COPY_LAUNCH_COUNT
            )
    finally:
        pool.release_buffers()
        backend.release_cached_memory()
    memory_rate = median(rates[size] for size in sizes[:3])
    cached_sizes = [size for size in sizes if rates[size] >= _MIN_CACHE_SPEEDUP * memory_rate]
    return max(cached_sizes) if len(cached_sizes) >= _MIN_CACHED_SIZE_COUNT else None


def _measure_launch_seconds(backend: Backend, launch: Launch, launch_count: int) -> float:
    """Launch once to warm up, then ``launch_count`` times, and return the mean device seconds of the later launches."""
    launch()
    backend.submit()
    start = backend.record_mark()
    for _ in range(launch_count):
        launch()
        backend.submit()
    end = backend.record_mark()
    backend.synchronize()
    return max(backend.compute_seconds_between(start, end), 1e-9) / launch_count


@contextmanager
def _prepare_matmul_launch(backend: Backend) -> Iterator[Launch]:
    """Prepare the device's default matmul, yield its launch, and release its operands at the end. M = N = K is the
    smallest of _MATMUL_SIZES at which a launch takes at least _MIN_LAUNCH_SECONDS, or the largest of _MATMUL_SIZES.
    """
    problem = make_problem(backend, None)
    kernel, pool = choose_matmul_kernel(backend, problem), backend.make_operand_pool(problem.data, problem.seed)
    if reason := kernel.explain_unsupported_problem(backend, problem):
        raise UnsupportedError(reason)
    try:
        with kernel.apply_settings(backend, problem):
            for size in _MATMUL_SIZES:
                launch = kernel.prepare(backend, problem, MatmulShape(size, size, size), pool).launches[0]
                if _measure_launch_seconds(backend, launch, 3) >= _MIN_LAUNCH_SECONDS:
                    break
            yield launch
    finally:
        pool.release_buffers()
        backend.release_cached_memory()


class WakeUp(NamedTuple):
    """The wake-up of a device after a rest. The first launch takes ``slowdown_ratio`` times as long as later ones.
    Launches are slow for the first ``wake_seconds`` of load (0 if no launch is slow).
    """

    slowdown_ratio: float
    wake_seconds: float


class LoadReaction(NamedTuple):
    """The reaction of a device to load that begins after a rest.

    - ``seconds_until_slowdown``: seconds of load until launches become slower; None if they never do.
    - ``slowdown_share``: how much longer launches take under lasting load than at its start, as a share of
      ``first_launch_seconds``.
    - ``settling_seconds``: seconds of load until launch times no longer change; None if they still changed at the end.
    - ``first_launch_seconds``: device seconds of a launch at the start of the load.
    """

    seconds_until_slowdown: float | None
    slowdown_share: float
    settling_seconds: float | None
    first_launch_seconds: float

    @property
    def speedup_remark(self) -> str:
        is_faster = self.slowdown_share < 1 / _MAX_AWAKE_RATIO - 1
        if is_faster:
            return f"launches became {1 / (1 + self.slowdown_share):.2g} times as fast within seconds of load"
        return ""


def _find_oscillation_start(
    block_ends: Sequence[float], launch_seconds: Sequence[float], backend: Backend
) -> float | None:
    """Return when the launch times begin to oscillate around a constant mean, in seconds from the start of the load.

    Compare the mean launch times of the last two oscillation periods. If the means agree, return the start of the
    earlier period. Return None if they do not agree, or if no block ends in one of the two periods.

    ``block_ends``: the seconds from the start of the load to the end of each block. ``launch_seconds``: the mean
    seconds of a launch in each block.
    """
    period, end_time = backend.sustained_traits.swing_seconds, block_ends[-1]
    before, after = (
        [seconds for end, seconds in zip(block_ends, launch_seconds, strict=True) if start < end <= start + period]
        for start in (end_time - 2 * period, end_time - period)
    )
    is_steady = before and after and abs(fmean(before) / fmean(after) - 1) <= 2 * _MAX_SETTLED_DEVIATION
    return end_time - 2 * period if is_steady else None


class _TraitProbe:
    def __init__(self, backend: Backend, launch: Launch) -> None:
        self.backend, self.launch = backend, launch
        self.launch_seconds = _measure_launch_seconds(backend, launch, 10)
        self.flush_seconds = _measure_launch_seconds(backend, lambda: backend.flush_cache(_LEAD_FLUSH_BYTES), 5)
        self.wake_seconds = 0.0

    def queue_flushes_before_launches(self) -> None:
        """Queue cache flushes so that the device wakes up and the host gets ahead of it, as the burst regime does."""
        for _ in range(1 + int(max(_LEAD_SECONDS, self.wake_seconds) / self.flush_seconds)):
            self.backend.flush_cache(_LEAD_FLUSH_BYTES)

    def measure_wake_up(self) -> WakeUp:
        """Return the largest slowdown and the longest wake-up after rests of different lengths. For each length, rest
        several times and use the shortest wake-up, because noise only makes a wake-up longer.
        """
        seconds_and_ratios = [
            min(self._measure_wake_up_after_rest(rest) for _ in range(_WAKE_UP_ROUND_COUNT))
            for rest in _WAKE_UP_REST_SECONDS
        ]
        self.wake_seconds = max(seconds for seconds, _times in seconds_and_ratios)
        return WakeUp(max(times for _seconds, times in seconds_and_ratios), self.wake_seconds)

    def _measure_wake_up_after_rest(self, rest_seconds: float) -> tuple[float, float]:
        self.backend.synchronize()
        self.backend.sleep(rest_seconds)
        launch_seconds = self._run_train(_WAKE_UP_TRAIN_SECONDS)
        steady = median(launch_seconds[len(launch_seconds) // 2 :])
        slow = next(
            (index for index, window in enumerate(launch_seconds) if window <= _MAX_AWAKE_RATIO * steady),
            len(launch_seconds),
        )
        after = launch_seconds[slow : slow + 10] or launch_seconds
        return _LEAD_SECONDS + sum(launch_seconds[:slow]) if slow else 0.0, launch_seconds[0] / median(after)

    def _run_train(self, train_seconds: float) -> list[float]:
        """Queue cache flushes, so that the host gets ahead of the device, then launch for about ``train_seconds``.
        Return the seconds of each launch.
        """
        backend = self.backend
        self.queue_flushes_before_launches()
        marks = [backend.record_mark()]
        for _ in range(min(max(4, math.ceil(train_seconds / self.launch_seconds)), _MAX_TRAIN_LAUNCHES)):
            self.launch()
            backend.submit()
            marks.append(backend.record_mark())
        backend.synchronize()
        return [backend.compute_seconds_between(start, end) for start, end in itertools.pairwise(marks)]

    def measure_load_reaction(self) -> LoadReaction:
        """Rest the device, then load it for _LOAD_SECONDS, and return how the time of a launch changes."""
        self.backend.sleep(_RECOVERY_REST_SECONDS[-1])
        ends, launch_seconds = self._load_and_time_blocks(_LOAD_SECONDS)
        awake = [seconds for end, seconds in zip(ends, launch_seconds, strict=True) if end > self.wake_seconds]
        first_launch_seconds, settled_launch_seconds = median(awake[:3]), median(awake[-len(awake) // 3 :])
        min_slower_seconds = first_launch_seconds + (settled_launch_seconds - first_launch_seconds) / 4
        is_slower = [
            end > self.wake_seconds and seconds > min_slower_seconds
            for end, seconds in zip(ends, launch_seconds, strict=True)
        ]
        slower_starts = (
            start
            for start, is_this_slower, is_next_slower in zip([0.0, *ends], is_slower, is_slower[1:], strict=False)
            if is_this_slower and is_next_slower
        )
        smoothed_seconds = (
            median(launch_seconds[max(0, index - 4) : index + 5]) for index in range(len(launch_seconds))
        )
        last_unsettled_end = max(
            (
                end
                for end, seconds in zip(ends, smoothed_seconds, strict=True)
                if abs(seconds / settled_launch_seconds - 1) > _MAX_SETTLED_DEVIATION
            ),
            default=0.0,
        )
        return LoadReaction(
            seconds_until_slowdown=next(slower_starts, None)
            if settled_launch_seconds > _MIN_SLOWED_RATIO * first_launch_seconds
            else None,
            slowdown_share=settled_launch_seconds / first_launch_seconds - 1,
            settling_seconds=last_unsettled_end
            if last_unsettled_end < 0.8 * ends[-1]
            else _find_oscillation_start(ends, launch_seconds, self.backend),
            first_launch_seconds=first_launch_seconds,
        )

    def _load_and_time_blocks(self, load_seconds: float) -> tuple[list[float], list[float]]:
        """Load the device for ``load_seconds`` with blocks of launches. Return two lists with one value per block: the
        seconds from the start of the load to the end of the block, and the mean seconds of a launch in the block.
        """
        backend, block_size = self.backend, max(1, round(_BLOCK_SECONDS / self.launch_seconds))
        start = backend.record_mark()
        queued, ends, launch_seconds = deque([start]), [0.0], list[float]()
        # Limit the number of blocks, so that the loop ends even if the device's clock does not advance.
        for _ in range(math.ceil(4 * load_seconds / _BLOCK_SECONDS)):
            for _ in range(block_size):
                self.launch()
                backend.submit()
            queued.append(backend.record_mark())
            if len(queued) > 2:
                queued.popleft()
                backend.wait_for_mark(queued[0])
                ends.append(backend.compute_seconds_between(start, queued[0]))
                launch_seconds.append((ends[-1] - ends[-2]) / block_size)
            if ends[-1] >= load_seconds:
                break
        backend.synchronize()
        return ends[1:], launch_seconds

    def measure_recovery(self, first_launch_seconds: float, reaction_seconds: float) -> float | None:
        """Return the shortest of the rests in _RECOVERY_REST_SECONDS after which a loaded device is as fast as before
        the load. Return None if even the longest of these rests is too short.

        After the rest, the device must keep this speed for nearly ``reaction_seconds``, the time after which its power
        controller reacts to load. ``first_launch_seconds``: the seconds of a launch before the device slowed down.
        """
        for rest in _RECOVERY_REST_SECONDS:
            self._load_and_time_blocks(max(0.2, 3 * reaction_seconds))
            self.backend.sleep(rest)
            train = self._run_train(_RECOVERY_SHARE_OF_REACTION * reaction_seconds)
            if median(train[len(train) // 2 :]) <= _MAX_RECOVERED_RATIO * first_launch_seconds:
                return rest
        return None


def _describe_findings(
    wake_up: WakeUp, reaction: LoadReaction, recovery_seconds: float | None, cache_bytes: int | None
) -> Sequence[CheckResult]:
    woken = (
        f"for {wake_up.wake_seconds * 1e3:.3g} ms after a rest, launches take {wake_up.slowdown_ratio:.2g} times as "
        "long as later launches"
        if wake_up.wake_seconds
        else "launches after a rest take as long as launches before it"
    )
    slowed = reaction.speedup_remark or f"launches do not become slower during {_LOAD_SECONDS:g} s of load"
    if reaction.seconds_until_slowdown is not None:
        back = (
            "no rest restores the speed"
            if recovery_seconds is None
            else f"a rest of {recovery_seconds:g} s restores the speed"
        )
        slowed = (
            f"after {reaction.seconds_until_slowdown * 1e3:.3g} ms of load, launches take "
            f"{100 * reaction.slowdown_share:.0f} %"
            f" longer than at the start of the load; {back}"
        )
    size = (
        "mamf could not find the cache size from the bandwidth of copies"
        if cache_bytes is None
        else f"{cache_bytes / MIB:.3g} MiB"
    )
    return (
        CheckResult("wake-up", "ok", woken),
        CheckResult("reaction to load", "ok" if reaction.settling_seconds is not None else "unknown", slowed),
        CheckResult("cache", "ok" if cache_bytes else "unknown", size),
    )
