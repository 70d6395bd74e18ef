"""``mamf.Meter``: how close the steps of a training loop come to what the device can do.

A step's time is read from marks in the device's queue, a step later, when the next one is queued already: the loop
never waits for the meter. If a vendor has no reliable events, the host's clock is read, without synchronizing.
"""

from __future__ import annotations

import functools
import math
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

from mamf.backend import Backend
from mamf.contribution.known_ceilings import datasheet_peak, measured_peak, opened
from mamf.dtypes import canonical_name
from mamf.errors import MamfError, MamfWarning, UsageError
from mamf.integrations.model_flops import model_flops
from mamf.limits import shorten, whole_number
from mamf.measurement import TERA
from mamf.rate import Rate

#: FLOP of one dtype, or of several by name.
Flops = float | Mapping[str, float]
#: FLOP/s, or a rate.
AnyCeiling = float | Rate
_NAN = math.nan
#: Slower than any device by far, and faster: a ceiling in another unit.
_MIN_CEILING, _MAX_CEILING = 1e9, 1e18
_LEAST = {"sequence_length": 1, "world_size": 1, "model_parallel": 1, "accumulation": 1, "warmup_steps": 0}


def check_options(options: Mapping[str, Any]) -> None:
    """Raises UsageError for a value that no meter can have. None stands for an option that is not given.

    A callback calls this before a device is opened, to report a mistake where it is made.
    """
    given = {name: value for name, value in options.items() if value is not None}
    flops = given.get("flops_per_step", 1)
    by_dtype = flops if isinstance(flops, Mapping) else {given.get("dtype", "bfloat16"): flops}
    if by_dtype is flops and "ceiling" in given:
        raise UsageError("ceiling: it is of one dtype; leave it out where flops_per_step is by dtype")
    for dtype, each in by_dtype.items():
        canonical_name(dtype)
        _require_amount("flops_per_step", each)
    _require_amount("tokens_per_step", given.get("tokens_per_step", 1))
    for name in _LEAST.keys() & given.keys():
        whole_number(name, given[name], _LEAST[name])
    if given.get("world_size", 1) % given.get("model_parallel", 1):
        raise UsageError(f"model_parallel {given['model_parallel']}: it must divide world_size")
    ceiling_flops(given.get("ceiling", TERA))


def ceiling_flops(ceiling: Any) -> float:
    """FLOP/s of a number or a Rate. Raises UsageError for anything else, for another unit, and for a
    ceiling whose interval is unknown.
    """
    if isinstance(ceiling, Rate):
        if ceiling.unit != "TFLOPS":
            raise UsageError(f"ceiling: it is in {ceiling.unit}; give the ceiling of a matmul")
        if ceiling.interval is not None and not ceiling.interval.is_known:
            raise UsageError("ceiling: it is too noisy to take a share of it; find it again with 'mamf find'")
        return ceiling.flops
    _require_amount("ceiling", ceiling)
    if not _MIN_CEILING <= ceiling <= _MAX_CEILING:
        raise UsageError(f"ceiling {shorten(ceiling)}: it must be in FLOP/s; 700 TFLOPS are 700e12")
    return float(ceiling)


def _require_amount(name: str, value: Any) -> None:
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 < float(value) < math.inf:
        raise UsageError(f"{name} {shorten(value)}: it must be a number above 0")


@dataclass(frozen=True)
class StepFigures:
    """A training step, or the mean of several.

    ``seconds``: from the end of the step before to its own; ``seconds_between``: of these, how long the device waited
    for data and host before ``Meter.begin``, NaN if that is not called. ``tokens_per_second`` and
    ``samples_per_second`` are of all ranks, ``tflops`` (1e12 FLOP/s) of this device; so are the shares of its
    datasheet's dense peak and of its ceiling. What is unknown is NaN.
    """

    step: int
    seconds: float
    seconds_between: float
    tokens_per_second: float
    tflops: float
    mfu_percent: float
    mamfu_percent: float
    samples_per_second: float = _NAN


class _Step(NamedTuple):
    """A step whose marks are not read yet. ``work``: returns tokens, samples, FLOP, and the seconds that these would
    take at the datasheet's peak and at the ceiling.
    """

    number: int
    marks: tuple[Any, Any, Any]
    work: Callable[[], tuple[float, ...]]


class Meter:
    """Call ``step`` after each optimizer step, and ``begin`` before its first forward pass, once the data are there.

    - ``model``: what ``mamf.model_flops`` takes, with ``sequence_length``; or ``flops_per_step``, also by
      dtype: ``{"float8_e4m3fn": 8e12, "bfloat16": 2e12}``, each of which counts against its own ceiling.
    - ``tokens_per_step``, ``flops_per_step``: of one forward and backward pass on this rank; an optimizer step has
      ``accumulation`` of them.
    - ``dtype``: of the products, unless ``flops_per_step`` is by dtype; by default the device's own.
    - ``ceiling``: FLOP/s, or a Rate of ``mamf.peak`` or ``mamf.find``, unless ``flops_per_step`` is by dtype; by
      default the sustained ceiling that ``mamf.peak`` knows. A datasheet is not a ceiling. Without one the shares are
      NaN, and one warning says so.
    - ``world_size``: of all ranks; ``model_parallel``: how many of them share one batch (tensor parallel): the FLOP of
      ``model`` are divided by it. ``flops_per_step`` is this rank's share.
    - ``backend``: a device as ``mamf.peak`` takes it; by default the one that this process uses.
    - ``causal``: of attention only the half counts that a causal mask leaves, as in ``mamf model``; the convention of
      published MFU is the whole square.
    - ``warmup_steps``: left out.

    Raises UsageError for an option that is not possible, UnsupportedError if the FLOP of ``model`` are unknown. Later
    calls raise nothing. A meter belongs to the thread that calls it first; others may read ``mean``.

    >>> meter = mamf.Meter(tokens_per_step=8192, flops_per_step=6e13, ceiling=700e12, warmup_steps=0)
    >>> meter.begin()
    >>> meter.backend.sleep(0.1)  # forward, backward, optimizer
    >>> meter.step()
    >>> figures = meter.finish()
    >>> f"{figures.tflops:.0f} TFLOPS, MAMFU {figures.mamfu_percent:.1f} %, MFU {figures.mfu_percent:.1f} %"
    '600 TFLOPS, MAMFU 85.7 %, MFU 60.7 %'
    """

    def __init__(
        self,
        *,
        tokens_per_step: float | None = None,
        flops_per_step: Flops | None = None,
        model: Any = None,
        sequence_length: int | None = None,
        dtype: str | None = None,
        ceiling: AnyCeiling | None = None,
        world_size: int = 1,
        model_parallel: int = 1,
        accumulation: int = 1,
        causal: bool = False,
        warmup_steps: int = 3,
        backend: int | str | Backend | None = None,
    ) -> None:
        check_options({name: value for name, value in locals().items() if name not in {"self", "model", "backend"}})
        self.backend = opened(backend)
        self.dtype = self._name(dtype or self.backend.default_dtype)
        self.accumulation, self.warmup_steps = accumulation, warmup_steps
        self._copies, self._share = world_size // model_parallel, 1 / model_parallel
        self._given = None if ceiling is None else ceiling_flops(ceiling)
        self._tokens = tokens_per_step
        self._flops, self._per_token = flops_per_step, 0.0
        if model is not None:
            if flops_per_step is not None or sequence_length is None:
                raise UsageError("a meter takes either model= with sequence_length=, or flops_per_step=")
            self._per_token = model_flops(model).per_token(sequence_length, causal) * self._share
        self._lock = threading.RLock()
        self._speeds: dict[str, tuple[float, float]] = {}
        self._warned: set[str] = set()
        self._loop = 0
        self._number = 0
        self._end: Any = None
        self._begun: Any = None
        self._unread: _Step | None = None
        self._read, self._steps_read = [0.0] * 7, 0
        for name in flops_per_step if isinstance(flops_per_step, Mapping) else (self.dtype,):
            self._speed(self._name(name))

    def __repr__(self) -> str:
        return f"<Meter: {self.dtype}, {self._number} steps>"

    def begin(self) -> None:
        """The data of a step are there: the time since the last step was the host's."""
        with self._lock:
            if self._is_own_loop():
                self._begun = self._mark()

    def step(
        self,
        tokens: float | None = None,
        flops: Flops | Callable[[], Flops] | None = None,
        samples: float | None = None,
    ) -> StepFigures | None:
        """A step ends. Returns the figures of the step before; None while that was of the warm-up.

        ``tokens``, ``flops``, ``samples``: of this whole step on this rank; tokens and FLOP are by default those of the
        arguments of Meter. What is below 0 or no number is not known, and what follows from it is NaN. ``flops`` may be
        a function, which is called when the step is read.
        """
        with self._lock:
            if not self._is_own_loop():
                return None
            end, start = self._mark(), self._begun if self._end is None else self._end
            figures = self.finish()
            self._number += 1
            if start is not None and self._number > self.warmup_steps:
                if tokens is None and self._tokens is not None:
                    tokens = self._tokens * self.accumulation
                work = functools.partial(self._work, tokens, samples, flops, self.accumulation)
                self._unread = _Step(self._number, (start, self._begun, end), work)
            self._end, self._begun = end, None
            return figures

    def finish(self) -> StepFigures | None:
        """The figures of the last step, which this waits for; None if they were already returned."""
        with self._lock:
            step, self._unread = self._unread, None
            if step is None:
                return None
            start, begun, end = step.marks
            if self._has_events:
                self.backend.wait(end)
            between = _NAN if begun is None else self._seconds(start, begun)
            sums = (self._seconds(start, end), between, *step.work())
            self._read = [before + own for before, own in zip(self._read, sums, strict=True)]
            self._steps_read += 1
            return self._figures(step.number, 1, *sums)

    def mean(self) -> StepFigures | None:
        """All steps since ``reset`` together: work over time. ``step`` is their number."""
        with self._lock:
            return self._figures(self._steps_read, self._steps_read, *self._read) if self._steps_read else None

    def reset(self) -> None:
        """Begin a new ``mean``."""
        with self._lock:
            self._read, self._steps_read = [0.0] * 7, 0

    def pause(self) -> None:
        """The time until the next ``begin`` belongs to no step: an evaluation, a checkpoint."""
        with self._lock:
            self.finish()
            self._end = self._begun = None

    def _is_own_loop(self) -> bool:
        """Whether this is the thread that called first: the steps of two loops would have each other's time."""
        self._loop = self._loop or threading.get_ident()
        is_own = self._loop == threading.get_ident()
        if not is_own:
            self._warn("a meter belongs to one loop: steps of another thread are left out; give it a meter of its own")
        return is_own

    def _warn(self, line: str) -> None:
        if line not in self._warned:
            self._warned.add(line)
            with suppress(Warning):  # where warnings are errors
                warnings.warn(line, MamfWarning, stacklevel=4)

    # -- time --------------------------------------------------------------------------------------------------------

    @property
    def _has_events(self) -> bool:
        return self.backend.timer != "host clock"

    def _mark(self) -> Any:
        # A mark of a host-timed backend would synchronize.
        return self.backend.mark() if self._has_events else self.backend.now()

    def _seconds(self, start: Any, end: Any) -> float:
        return self.backend.seconds_between(start, end) if self._has_events else float(end - start)

    # -- work --------------------------------------------------------------------------------------------------------

    def _work(
        self, tokens: float | None, samples: float | None, flops: Flops | Callable[[], Flops] | None, passes: int
    ) -> tuple[float, ...]:
        """The work of a step, as in ``_Step``."""
        if flops is None and self._per_token:
            flops, passes = _known(tokens) * self._per_token, 1
        elif flops is None:
            flops = self._flops
        else:
            flops, passes = flops() if callable(flops) else flops, 1
        by_dtype = flops if isinstance(flops, Mapping) else {self.dtype: flops}
        total = at_peak = at_ceiling = 0.0
        for name, each in by_dtype.items():
            flop, (peak, ceiling) = _known(each) * passes, self._speed(self._name(name))
            total, at_peak, at_ceiling = total + flop, at_peak + flop / peak, at_ceiling + flop / ceiling
        return _known(tokens), _known(samples), total, at_peak, at_ceiling

    def _name(self, dtype: str) -> str:
        return self.backend.resolve_dtype(canonical_name(dtype))

    def _figures(
        self, number: int, steps: int, seconds: float, between: float, tokens: float, samples: float, *flop: float
    ) -> StepFigures:
        if seconds <= 0:
            return StepFigures(number, seconds, between, _NAN, _NAN, _NAN, _NAN)
        return StepFigures(
            step=number,
            seconds=seconds / steps,
            seconds_between=between / steps,
            tokens_per_second=tokens * self._copies / seconds,
            tflops=flop[0] / seconds / TERA,
            mfu_percent=100 * flop[1] / seconds,
            mamfu_percent=100 * flop[2] / seconds,
            samples_per_second=samples * self._copies / seconds,
        )

    # -- what it is held against -------------------------------------------------------------------------------------

    def _speed(self, dtype: str) -> tuple[float, float]:
        """FLOP/s of the datasheet and of the ceiling, NaN if unknown."""
        if dtype not in self._speeds:
            listed, ceiling = datasheet_peak(self.backend.info, dtype), self._given
            if ceiling is None:
                try:
                    ceiling = measured_peak(self.backend, dtype).flops
                except MamfError as error:
                    ceiling = _NAN
                    if not self._warned:
                        self._warn(f"MAMFU is NaN: {error}")
            self._speeds[dtype] = (listed.flops if listed else _NAN, ceiling)
        return self._speeds[dtype]


def _known(count: Any) -> float:
    try:
        number = float(count)
    except (TypeError, ValueError):
        return _NAN
    return number if number >= 0 else _NAN
