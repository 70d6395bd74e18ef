"""Measure how close the steps of a training loop come to what the device can do, with ``mamf.Meter``.

The meter never makes the training loop wait. It queues timing events on the device and reads them one step later, when
the next step is already queued. On a backend without reliable events it reads the host's clock instead, without
synchronizing.
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
from mamf.contribution.known_ceilings import find_datasheet_peak, find_measured_peak, open_backend_or_default
from mamf.dtypes import canonicalize_dtype_name
from mamf.errors import MamfError, MamfWarning, UsageError, require_whole_number, shorten_value
from mamf.integrations.model_flops import model_flops
from mamf.measurement import TERA, Rate

#: The FLOP of a step, or of one forward and backward pass: one number if all matmuls have the same dtype, or else a
#: number for each dtype.
FlopOfStep = float | Mapping[str, float]
#: The smallest and the largest accepted ceiling in FLOP/s. Every device has a ceiling between these limits, so a number
#: outside the limits is probably in another unit, such as TFLOPS.
_MIN_CEILING_FLOPS, _MAX_CEILING_FLOPS = 1e9, 1e18
_MIN_VALUE_BY_OPTION = {
    "sequence_length": 1,
    "world_size": 1,
    "model_parallel": 1,
    "accumulation": 1,
    "warmup_steps": 0,
}


def check_meter_options(options: Mapping[str, Any]) -> None:
    """Raise UsageError if an option of Meter has an impossible value. An option that is None counts as not given.

    This function opens no device. A callback calls it in its constructor, so that users see a mistake before training
    starts.
    """
    given_options = {name: value for name, value in options.items() if value is not None}
    flops = given_options.get("flops_per_step", 1)
    flops_by_dtype = flops if isinstance(flops, Mapping) else {given_options.get("dtype", "bfloat16"): flops}
    if flops_by_dtype is flops and "ceiling" in given_options:
        raise UsageError("ceiling= is for one dtype: leave it out if flops_per_step= has a value for each dtype")
    for dtype, flops_of_dtype in flops_by_dtype.items():
        canonicalize_dtype_name(dtype)
        _require_positive_number("flops_per_step", flops_of_dtype)
    _require_positive_number("tokens_per_step", given_options.get("tokens_per_step", 1))
    for name in _MIN_VALUE_BY_OPTION.keys() & given_options.keys():
        require_whole_number(name, given_options[name], _MIN_VALUE_BY_OPTION[name])
    if given_options.get("world_size", 1) % given_options.get("model_parallel", 1):
        raise UsageError(
            f"model_parallel {given_options['model_parallel']} must divide world_size "
            f"{given_options.get('world_size', 1)}: change one of them"
        )
    convert_ceiling_to_flops(given_options.get("ceiling", TERA))


def convert_ceiling_to_flops(ceiling: Any) -> float:
    """Return a ceiling in FLOP/s as a number. ``ceiling``: a number in FLOP/s, or a Rate in TFLOPS.

    Raises UsageError for any other value, for a Rate in another unit, and for a Rate whose interval is unknown because
    the measurement was too noisy.
    """
    if isinstance(ceiling, Rate):
        if ceiling.unit != "TFLOPS":
            raise UsageError(f"ceiling is in {ceiling.unit}, not in TFLOPS: give the ceiling of a matmul")
        if ceiling.interval is not None and not ceiling.interval.is_known:
            raise UsageError("ceiling is too noisy to compute shares of it: measure it again with 'mamf find'")
        return ceiling.flops
    _require_positive_number("ceiling", ceiling)
    if not _MIN_CEILING_FLOPS <= ceiling <= _MAX_CEILING_FLOPS:
        raise UsageError(f"ceiling {shorten_value(ceiling)} must be in FLOP/s: write 700 TFLOPS as 700e12")
    return float(ceiling)


def _require_positive_number(name: str, value: Any) -> None:
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 < float(value) < math.inf:
        raise UsageError(f"{name} {shorten_value(value)} must be a number above 0")


@dataclass(frozen=True)
class StepFigures:
    """The figures of one training step, or their means over several steps. A figure that is unknown is NaN.

    - ``step``: the number of the step, from 1; in a mean, the number of steps.
    - ``seconds``: the time from the end of the previous step to the end of this step.
    - ``seconds_between``: the part of ``seconds`` before ``Meter.begin``, in which the device waited for data and the
      host. NaN if the loop does not call ``begin``.
    - ``tokens_per_second``, ``samples_per_second``: the rates of all ranks together.
    - ``tflops``: the rate of this rank's device, in 1e12 FLOP/s.
    - ``mfu_percent``: ``tflops`` in percent of the dense peak in the device's datasheet.
    - ``mamfu_percent``: ``tflops`` in percent of the device's matmul ceiling.
    """

    step: int
    seconds: float
    seconds_between: float
    tokens_per_second: float
    tflops: float
    mfu_percent: float
    mamfu_percent: float
    samples_per_second: float = math.nan


class _UnreadStep(NamedTuple):
    """A step whose time marks (timing events) the meter has not read yet, because the device may still run the step.

    - ``time_marks``: the marks of the end of the previous step, of the call of ``begin`` (None without a call), and of
      the end of this step.
    - ``compute_work``: a function that returns the step's tokens, samples and FLOP, and the seconds that these FLOP
      would take at the datasheet's peak and at the ceiling.
    """

    step_number: int
    time_marks: tuple[Any, Any, Any]
    compute_work: Callable[[], tuple[float, ...]]


class Meter:
    """A meter of the steps of a training loop: TFLOPS, MFU (share of the datasheet peak), MAMFU (share of the ceiling).

    Call ``begin`` when the data of a step are ready, before its first forward pass, and ``step`` after the optimizer.

    - ``model``, ``sequence_length``: the model, and the length of its sequences. The meter computes the FLOP from them
      with the formula of ``mamf.model_flops``.
    - ``flops_per_step``: instead of ``model``, the FLOP of one forward and backward pass on this rank. Pass a number,
      or a dict from dtype to FLOP: ``{"float8_e4m3fn": 8e12, "bfloat16": 2e12}``. Each dtype is compared with its own
      ceiling.
    - ``tokens_per_step``: tokens of one forward and backward pass on this rank.
    - ``accumulation``: forward and backward passes in an optimizer step (default 1).
    - ``dtype``: dtype of the matmuls; by default the device's default dtype. Not used if ``flops_per_step`` is a
      dict.
    - ``ceiling``: FLOP/s, or the Rate that ``mamf.peak`` or ``mamf.find`` returns. The default is the sustained
      ceiling that ``mamf.peak`` knows. If ``mamf.peak`` knows none, the meter warns once and MAMFU is NaN: the meter
      never uses the datasheet as a ceiling. This option cannot be given if ``flops_per_step`` is a dict.
    - ``world_size``: total number of ranks.
    - ``model_parallel``: number of ranks that process each batch together, for example with tensor parallelism. The
      meter divides the FLOP of ``model`` by this number, but not ``flops_per_step``.
    - ``causal``: count only the half of attention that a causal mask leaves, as ``mamf model`` does. The default is to
      count all pairs of a query and a key, as published MFU does.
    - ``warmup_steps``: number of steps at the start of training that the meter leaves out.
    - ``backend``: a device, in a form that ``mamf.peak`` takes; the default is the device that this process uses.

    Raises UsageError if an option has an invalid value, and UnsupportedError if there is no formula for ``model``. The
    methods of a meter raise nothing. Give each training loop its own meter; other threads may read ``mean``.

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
        flops_per_step: FlopOfStep | None = None,
        model: Any = None,
        sequence_length: int | None = None,
        dtype: str | None = None,
        ceiling: float | Rate | None = None,
        world_size: int = 1,
        model_parallel: int = 1,
        accumulation: int = 1,
        causal: bool = False,
        warmup_steps: int = 3,
        backend: int | str | Backend | None = None,
    ) -> None:
        check_meter_options(
            {name: value for name, value in locals().items() if name not in {"self", "model", "backend"}}
        )
        self.backend = open_backend_or_default(backend)
        self._has_events = self.backend.timer != "host clock"
        # Without timing events, read the host's clock with now(), because record_mark() would wait for the device.
        self._place_mark: Callable[[], Any] = self.backend.record_mark if self._has_events else self.backend.now
        self.dtype = self._resolve_dtype(dtype or self.backend.default_dtype)
        self.accumulation, self.warmup_steps = accumulation, warmup_steps
        self._replica_count = world_size // model_parallel
        self._given_ceiling = None if ceiling is None else convert_ceiling_to_flops(ceiling)
        self._tokens_per_pass = tokens_per_step
        self._flops_per_pass, self._flop_per_token = flops_per_step, 0.0
        if model is not None:
            if flops_per_step is not None or sequence_length is None:
                raise UsageError("give the meter either model= with sequence_length=, or flops_per_step=")
            self._flop_per_token = model_flops(model).compute_flop_per_token(sequence_length, causal) / model_parallel
        self._lock = threading.RLock()
        self._peaks_and_ceilings: dict[str, tuple[float, float]] = {}
        self._step_number = 0
        self._end_mark: Any = None
        self._begin_mark: Any = None
        self._unread_step: _UnreadStep | None = None
        self._total_amounts, self._read_step_count = [0.0] * 7, 0
        for name in flops_per_step if isinstance(flops_per_step, Mapping) else (self.dtype,):
            self._find_peak_and_ceiling(self._resolve_dtype(name))

    def __repr__(self) -> str:
        return f"<Meter: {self.dtype}, {self._step_number} steps>"

    def begin(self) -> None:
        """Record that the data of the next step are ready. ``StepFigures.seconds_between`` is the time from the end of
        the previous step to this call.
        """
        with self._lock:
            self._begin_mark = self._place_mark()

    def step(
        self,
        tokens: float | None = None,
        flops: FlopOfStep | Callable[[], FlopOfStep] | None = None,
        samples: float | None = None,
    ) -> StepFigures | None:
        """End a step. Return the figures of the previous step, or None if the previous step was a warm-up step.

        ``tokens``, ``flops``, ``samples``: numbers for this whole step on this rank. The defaults of tokens and FLOP
        follow from the arguments of Meter. A negative value, or a value that is not a number, counts as unknown, and
        figures that depend on an unknown value are NaN. ``flops`` may be a function, which the meter calls one step
        later, when it reads the step's time.
        """
        with self._lock:
            end, start = self._place_mark(), self._begin_mark if self._end_mark is None else self._end_mark
            figures = self.finish()
            self._step_number += 1
            if start is not None and self._step_number > self.warmup_steps:
                if tokens is None and self._tokens_per_pass is not None:
                    tokens = self._tokens_per_pass * self.accumulation
                self._unread_step = _UnreadStep(
                    self._step_number,
                    (start, self._begin_mark, end),
                    functools.partial(self._compute_work, tokens, samples, flops, self.accumulation),
                )
            self._end_mark, self._begin_mark = end, None
            return figures

    def finish(self) -> StepFigures | None:
        """Wait until the last step has ended on the device and return its figures. Return None if an earlier call has
        returned the figures of the last step.
        """
        with self._lock:
            step, self._unread_step = self._unread_step, None
            if step is None:
                return None
            start, begin_mark, end = step.time_marks
            if self._has_events:
                self.backend.wait_for_mark(end)
            measure_seconds = (
                self.backend.compute_seconds_between if self._has_events else lambda first, last: last - first
            )
            seconds_between = math.nan if begin_mark is None else measure_seconds(start, begin_mark)
            amounts = (measure_seconds(start, end), seconds_between, *step.compute_work())
            self._total_amounts = [total + amount for total, amount in zip(self._total_amounts, amounts, strict=True)]
            self._read_step_count += 1
            return self._make_figures(step.step_number, 1, *amounts)

    def mean(self) -> StepFigures | None:
        """Return the mean of all steps since ``reset``: total work divided by total time. The field ``step`` of the
        result is the number of steps.
        """
        with self._lock:
            return (
                self._make_figures(self._read_step_count, self._read_step_count, *self._total_amounts)
                if self._read_step_count
                else None
            )

    def reset(self) -> None:
        """Forget all steps so far, so that ``mean`` includes only later steps."""
        with self._lock:
            self._total_amounts, self._read_step_count = [0.0] * 7, 0

    def pause(self) -> None:
        """Leave out the time until the next ``begin``, for example the time of an evaluation or a checkpoint."""
        with self._lock:
            self.finish()
            self._end_mark = self._begin_mark = None

    # -- tokens, samples and FLOP of a step --------------------------------------------------------------------------

    def _compute_work(
        self,
        tokens: float | None,
        samples: float | None,
        flops: FlopOfStep | Callable[[], FlopOfStep] | None,
        pass_count: int,
    ) -> tuple[float, ...]:
        """Return the tokens, the samples and the FLOP of a step, and the seconds that these FLOP would take at the
        datasheet's peak and at the ceiling.

        ``flops``: the FLOP of the step; None: compute them from the arguments of Meter.
        ``pass_count``: the number of forward and backward passes of the step.
        """
        if flops is None and self._flop_per_token:
            flops, pass_count = _convert_to_number_or_nan(tokens) * self._flop_per_token, 1
        elif flops is None:
            flops = self._flops_per_pass
        else:
            flops, pass_count = flops() if callable(flops) else flops, 1
        flops_by_dtype = flops if isinstance(flops, Mapping) else {self.dtype: flops}
        total_flop = seconds_at_peak = seconds_at_ceiling = 0.0
        for name, flops_of_dtype in flops_by_dtype.items():
            flop, (peak, ceiling) = (
                _convert_to_number_or_nan(flops_of_dtype) * pass_count,
                self._find_peak_and_ceiling(self._resolve_dtype(name)),
            )
            total_flop, seconds_at_peak, seconds_at_ceiling = (
                total_flop + flop,
                seconds_at_peak + flop / peak,
                seconds_at_ceiling + flop / ceiling,
            )
        return (
            _convert_to_number_or_nan(tokens),
            _convert_to_number_or_nan(samples),
            total_flop,
            seconds_at_peak,
            seconds_at_ceiling,
        )

    def _resolve_dtype(self, dtype: str) -> str:
        return self.backend.resolve_dtype(canonicalize_dtype_name(dtype))

    def _make_figures(
        self,
        step_number: int,
        step_count: int,
        seconds: float,
        seconds_between: float,
        tokens: float,
        samples: float,
        *flop_and_seconds: float,
    ) -> StepFigures:
        divisor = seconds if seconds > 0 else math.nan
        return StepFigures(
            step=step_number,
            seconds=seconds / step_count,
            seconds_between=seconds_between / step_count,
            tokens_per_second=tokens * self._replica_count / divisor,
            tflops=flop_and_seconds[0] / divisor / TERA,
            mfu_percent=100 * flop_and_seconds[1] / divisor,
            mamfu_percent=100 * flop_and_seconds[2] / divisor,
            samples_per_second=samples * self._replica_count / divisor,
        )

    # -- peaks and ceilings ------------------------------------------------------------------------------------------

    def _find_peak_and_ceiling(self, dtype: str) -> tuple[float, float]:
        """Return the datasheet's peak and the ceiling for a dtype, in FLOP/s. An unknown value is NaN."""
        if dtype not in self._peaks_and_ceilings:
            datasheet_peak, ceiling = find_datasheet_peak(self.backend.info, dtype), self._given_ceiling
            if ceiling is None:
                try:
                    ceiling = find_measured_peak(self.backend, dtype).flops
                except MamfError as error:
                    ceiling = math.nan
                    if not any(math.isnan(each) for _, each in self._peaks_and_ceilings.values()):
                        with suppress(Warning):  # Raise nothing, even if the program turns warnings into errors.
                            warnings.warn(f"MAMFU is NaN: {error}", MamfWarning, stacklevel=3)
            self._peaks_and_ceilings[dtype] = (datasheet_peak.flops if datasheet_peak else math.nan, ceiling)
        return self._peaks_and_ceilings[dtype]


def _convert_to_number_or_nan(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return math.nan
    return number if number >= 0 else math.nan
