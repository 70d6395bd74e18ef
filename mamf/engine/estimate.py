"""Estimate how long a run will take, from the rate of a few launches of a small matmul. mamf uses this rate only to
plan runs; it never reports it.
"""

from __future__ import annotations

import statistics as stdlib_statistics
import warnings
from collections.abc import Sequence

from mamf.backend import Backend
from mamf.engine.measure import classify_error
from mamf.engine.regimes import get_regime_class
from mamf.engine.regimes.base import CheckedKernel, launch_between_marks
from mamf.errors import (
    DeviceError,
    MamfError,
    MamfWarning,
    PluginError,
    UnsupportedError,
    describe_error,
    get_catchable_plugin_errors,
)
from mamf.kernel import PreparedKernel
from mamf.measurement import make_dtype_label
from mamf.operations.matmul.operation import choose_search_kernels
from mamf.operations.matmul.shapes import MatmulKernel, MatmulProblem, MatmulShape
from mamf.peaks import find_contributed_rates
from mamf.plans import BURST, GuardOptions, Plan, RowKey

#: The sizes (M = N = K) of the smallest and the largest matmul that ``measure_matmul_flops`` launches, and of the
#: smallest matmul that it launches on a CPU. The size on a CPU is small because a CPU emulates some dtypes: a matmul
#: that takes 1 ms on an accelerator may take a minute on a CPU.
MIN_PROBE_SIZE, _MAX_PROBE_SIZE, _MIN_PROBE_SIZE_ON_CPU = 1024, 8192, 128
_MIN_PROBE_LAUNCH_SECONDS = 0.001
# If a matmul below MIN_PROBE_SIZE takes this many seconds, do not launch a larger one, which would take far longer.
_MAX_SMALL_MATMUL_SECONDS = 0.05
_PROBE_LAUNCH_COUNT = 3
# Seconds that mamf usually needs to prepare and verify a kernel on one shape on an accelerator.
_USUAL_PREPARATION_SECONDS = 0.01


def measure_matmul_flops(
    kernel: MatmulKernel, problem: MatmulProblem, backend: Backend, max_size: int = _MAX_PROBE_SIZE
) -> float:
    """Measure the FLOP/s that a kernel reaches in a cubic matmul. M = N = K starts at 1024 (128 on a CPU) and doubles
    until a launch takes 1 ms (50 ms if M is below 1024), memory runs out, or M reaches ``max_size``.

    Raises UnsupportedError if the kernel does not support the problem, DeviceError if the first launch fails, and
    PluginError if the backend's timer reports no time.
    """
    pool = backend.make_operand_pool(problem.data, problem.seed)
    size, flops = MIN_PROBE_SIZE if backend.info.is_accelerator else _MIN_PROBE_SIZE_ON_CPU, 0.0
    try:
        with kernel.apply_settings(backend, problem):
            while True:
                shape = MatmulShape(size, size, size)
                seconds = _time_prepared_launch(kernel.prepare(backend, problem, shape, pool), backend)
                if not seconds > 0:
                    raise PluginError(
                        f"backend {backend.name} is broken: compute_seconds_between returned {seconds:g} s for a "
                        "matmul, but must return more than 0 s"
                    )
                flops = shape.flop / seconds
                min_seconds = _MIN_PROBE_LAUNCH_SECONDS if size >= MIN_PROBE_SIZE else _MAX_SMALL_MATMUL_SECONDS
                if seconds >= min_seconds or size >= max_size:
                    return flops
                size *= 2
    except PluginError:
        raise
    except get_catchable_plugin_errors() as error:
        status, reason = classify_error(error, kernel, backend)
        if flops and status != "failed":
            return flops
        if status == "unsupported":
            raise UnsupportedError(
                f"kernel {kernel.name} does not support {problem.dtype} on {backend.name}: {reason}"
            ) from error
        raise DeviceError(
            f"the first matmul failed ({size}x{size}x{size}, kernel {kernel.name}, backend {backend.name}): "
            f"{describe_error(error)}"
        ) from error
    finally:
        pool.release_buffers()


def choose_working_kernels(
    backend: Backend, problem: MatmulProblem, kernel_names: Sequence[str] | None = None, is_quick: bool = False
) -> list[MatmulKernel]:
    """Return the kernels that a search for ceilings compares, in the order of ``choose_search_kernels``.

    If ``kernel_names`` is None, try the kernels in this order until one works. Leave out the kernels that failed before
    it, and warn about each. If results/ says which kernels are fastest on cards of this model, a quick search also
    leaves out the other kernels that must be compiled.

    If no kernel works and the first kernel does not support the problem, return only the first kernel: measuring it
    adds a row to the log that gives the reason. If the first kernel failed for another reason, raise its error. Also
    raises what ``choose_search_kernels`` raises.
    """
    if kernel_names is not None:
        return choose_search_kernels(backend, problem, kernel_names)
    kernels, faults = choose_search_kernels(backend, problem), list[MamfError]()
    if is_quick:
        # If results/ says which kernels are fastest on cards of this model, keep those kernels, the default kernel and
        # every kernel that needs no compilation. Drop all others.
        known_ceilings = find_contributed_rates(
            backend.info.name, backend.info.compute_units, make_dtype_label(problem)
        )
        winners = {ceiling.kernel.partition("[")[0] for ceiling in known_ceilings if ceiling.regime == BURST}
        if any(each.name in winners for each in kernels):
            kernels = [
                each for each in kernels if each is kernels[0] or each.name in winners or each.has_cheap_variants
            ]
    for number, kernel in enumerate(kernels):
        try:
            measure_matmul_flops(kernel, problem, backend, MIN_PROBE_SIZE)
        except (DeviceError, PluginError, UnsupportedError) as error:
            faults.append(error)
            continue
        for fault in faults:
            warnings.warn(f"{fault}; mamf skips this plugin", MamfWarning, stacklevel=2)
        return kernels[number:]
    if isinstance(faults[0], UnsupportedError):
        return kernels[:1]
    raise faults[0]


def _time_prepared_launch(prepared: PreparedKernel, backend: Backend) -> float:
    CheckedKernel(prepared).warm_up_and_verify(backend)
    seconds = []
    for _ in range(_PROBE_LAUNCH_COUNT):
        marks = launch_between_marks(prepared.launches[0], backend)
        backend.synchronize()
        seconds.append(backend.compute_seconds_between(*marks))
    return stdlib_statistics.median(seconds)


def estimate_run_seconds(plan: Plan, keys: Sequence[RowKey], backend: Backend, flops: float) -> float:
    """Estimate the seconds that a device needs to measure the rows with these keys (regime, problem, shape and kernel)
    if it reaches ``flops`` FLOP/s. The plan's budget may end the run earlier.
    """
    total = 0.0
    for regime in plan.regimes:
        launches = [shape.flop / flops for name, _, shape, _ in keys if name == regime]
        if launches:
            total += len(launches) * _USUAL_PREPARATION_SECONDS + sum(launches)
            total += get_regime_class(regime).estimate_rows_seconds(backend, plan, launches)
    return total


def compute_max_sampling_seconds(plan: Plan, keys: Sequence[RowKey], backend: Backend) -> float:
    """Return the longest time, in seconds, that the timed launches of these rows can take. It includes the repetitions
    of ``mamf guard``, but not the time to prepare and verify the kernels.
    """
    rows = [get_regime_class(regime) for regime, *_ in keys]
    warmup = sum(regime.warmup_seconds for regime in dict.fromkeys(rows))
    visits_per_row = 1 + (plan.options.rounds if isinstance(plan.options, GuardOptions) else 0)
    return warmup + visits_per_row * sum(regime.compute_max_row_seconds(backend, plan) for regime in rows)
