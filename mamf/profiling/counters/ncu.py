"""Read the hardware counters of a kernel with NVIDIA's profiler ncu, and find what bounds the kernel's speed.

mamf runs ``mamf run`` under ncu and reads the CSV that ncu prints. A launch may run several device kernels, so mamf
adds up their counters. The CSV has one line per metric, between ncu's own messages (``==PROF==``) and the output of
``mamf run``. Its numbers have thousands separators, and a metric that the device lacks is ``n/a``.
"""

from __future__ import annotations

import contextlib
import csv
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mamf.errors import RunLogError, UnavailableError
from mamf.logs.records import get_utc_time
from mamf.logs.run_log import MALFORMED_LOG_ERRORS, RunLog, describe_record_error
from mamf.measurement import Measurement
from mamf.operations.unknown import get_operation

# Names that ncu gives its metrics. The name of each constant says what the metric measures.
ELAPSED_CYCLES = "gpc__cycles_elapsed.max"
DURATION_NANOSECONDS = "gpu__time_duration.sum"
TENSOR_PIPE_PERCENT = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
COMPUTE_UNITS_PERCENT = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
MEMORY_PIPES_PERCENT = "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"
L2_PERCENT = "lts__throughput.avg.pct_of_peak_sustained_elapsed"
DRAM_PERCENT = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
DRAM_BYTES_READ, DRAM_BYTES_WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
L2_HIT_PERCENT, L1_HIT_PERCENT = "lts__t_sector_hit_rate.pct", "l1tex__t_sector_hit_rate.pct"
REGISTERS_PER_THREAD, SHARED_BYTES_PER_BLOCK = "launch__registers_per_thread", "launch__shared_mem_per_block"
BLOCK_COUNT, THREADS_PER_BLOCK = "launch__grid_size", "launch__block_size"
WAVES_PER_COMPUTE_UNIT = "launch__waves_per_multiprocessor"
ACTIVE_WARPS_PERCENT, POSSIBLE_WARPS_PERCENT = (
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "sm__maximum_warps_per_active_cycle_pct",
)
INSTRUCTION_COUNT = "smsp__inst_executed.sum"
#: For each resource that a block needs, such as registers: the metric that says how many blocks of a kernel would fit
#: on a compute unit if no other resource limited them. The resource with the smallest number limits the occupancy.
OCCUPANCY_LIMIT_METRICS = {
    "registers": "launch__occupancy_limit_registers",
    "shared memory": "launch__occupancy_limit_shared_mem",
    "warps": "launch__occupancy_limit_warps",
    "blocks": "launch__occupancy_limit_blocks",
}
#: The metrics that can be summed over the device kernels of a launch. All others are percentages or sizes.
SUMMED_METRICS = (ELAPSED_CYCLES, DURATION_NANOSECONDS, DRAM_BYTES_READ, DRAM_BYTES_WRITTEN, INSTRUCTION_COUNT)
NCU_METRICS = (
    *SUMMED_METRICS,
    *(TENSOR_PIPE_PERCENT, COMPUTE_UNITS_PERCENT, MEMORY_PIPES_PERCENT, L2_PERCENT, DRAM_PERCENT),
    *(
        L2_HIT_PERCENT,
        L1_HIT_PERCENT,
        REGISTERS_PER_THREAD,
        SHARED_BYTES_PER_BLOCK,
        BLOCK_COUNT,
        THREADS_PER_BLOCK,
        WAVES_PER_COMPUTE_UNIT,
        ACTIVE_WARPS_PERCENT,
        POSSIBLE_WARPS_PERCENT,
    ),
    *OCCUPANCY_LIMIT_METRICS.values(),
)
#: The kernel's name, the problem and the shape, which together identify the counters in a log.
CountersKey = tuple[str, Any, Any]


@dataclass(frozen=True)
class DeviceKernelCounters:
    """The hardware counters of one kernel that the device ran, or their sums over several kernels.

    - ``grid``, ``block``: the sizes of grid and block as ncu prints them, such as ``(2, 66, 1)``.
    - ``metrics``: value of each metric in ncu's base units, by ncu's name of the metric; None if the device lacks it.
    """

    name: str
    grid: str
    block: str
    metrics: Mapping[str, float | None]

    @property
    def cycles(self) -> float | None:
        return self.metrics.get(ELAPSED_CYCLES)

    @property
    def seconds(self) -> float | None:
        nanoseconds = self.metrics.get(DURATION_NANOSECONDS)
        return None if nanoseconds is None else nanoseconds * 1e-9

    @property
    def dram_bytes(self) -> float | None:
        """Bytes that the kernel read from and wrote to device memory; None if one of the two is unknown."""
        return _sum_if_all_known([self.metrics.get(DRAM_BYTES_READ), self.metrics.get(DRAM_BYTES_WRITTEN)])

    @property
    def occupancy_limiters(self) -> tuple[str, ...]:
        """The resources, such as registers, that limit how many blocks of the kernel fit on a compute unit."""
        known_values = {
            name: blocks
            for name, metric in OCCUPANCY_LIMIT_METRICS.items()
            if (blocks := self.metrics.get(metric)) is not None
        }
        return tuple(name for name, blocks in known_values.items() if blocks == min(known_values.values()))


@dataclass(frozen=True)
class LaunchCounters:
    """The hardware counters of several equal launches of a kernel.

    - ``device_kernels``: the device kernels that a launch runs. Each metric is the median over the profiled launches.
    - ``cycles_by_launch``: for each profiled launch, the sum of the elapsed cycles of its device kernels.
    - ``missing_reason``: why there are no counters; empty if there are counters.
    """

    kernel: str
    problem: Any
    shape: Any
    device_kernels: tuple[DeviceKernelCounters, ...] = ()
    cycles_by_launch: tuple[float, ...] = ()
    missing_reason: str = ""

    @property
    def has_counters(self) -> bool:
        return bool(self.device_kernels)

    @property
    def median_cycles(self) -> float | None:
        return statistics.median(self.cycles_by_launch) if self.cycles_by_launch else None

    @property
    def summed_counters(self) -> DeviceKernelCounters:
        """The sums of the metrics over all device kernels of a launch, without metrics that cannot be added, such as
        percentages. If a launch runs a single device kernel, the result has all metrics of this kernel.
        """
        if len(self.device_kernels) == 1:
            return self.device_kernels[0]
        sums = {
            name: _sum_if_all_known([kernel.metrics.get(name) for kernel in self.device_kernels])
            for name in SUMMED_METRICS
        }
        return DeviceKernelCounters(f"{len(self.device_kernels)} kernels", "", "", sums)


def _sum_if_all_known(values: Sequence[float | None]) -> float | None:
    known_values = [value for value in values if value is not None]
    return sum(known_values) if len(known_values) == len(values) else None


def make_launch_counters(
    kernel: str, problem: Any, shape: Any, kernels: Sequence[DeviceKernelCounters], launch_count: int
) -> LaunchCounters:
    """Make the counters of a kernel from the device kernels that several equal launches ran.

    ``kernels``: all device kernels, in the order in which they ran. If the launches did not run the same device
    kernels, the result has a ``missing_reason`` and no counters.
    """
    kernels_per_launch, remainder = divmod(len(kernels), launch_count)
    kernels_by_launch = [
        kernels[start : start + kernels_per_launch]
        for start in range(0, len(kernels) - remainder, kernels_per_launch or 1)
    ]
    if remainder or len({tuple(kernel.name for kernel in launch) for launch in kernels_by_launch}) != 1:
        return LaunchCounters(
            kernel,
            problem,
            shape,
            missing_reason=f"the {launch_count} launches did not all run the same kernels ({len(kernels)} in total)",
        )
    cycles = [_sum_if_all_known([each.cycles for each in launch]) for launch in kernels_by_launch]
    known_values = tuple(filter(None, cycles))
    medians = tuple(map(_compute_median_counters, zip(*kernels_by_launch, strict=True)))
    return LaunchCounters(kernel, problem, shape, medians, known_values if len(known_values) == launch_count else ())


def _compute_median_counters(same_kernels: Sequence[DeviceKernelCounters]) -> DeviceKernelCounters:
    medians: dict[str, float | None] = {}
    for name in same_kernels[0].metrics:
        known_values = [value for each in same_kernels if (value := each.metrics.get(name)) is not None]
        medians[name] = statistics.median(known_values) if known_values else None
    return replace(same_kernels[0], metrics=medians)


def make_counters_key(row: LaunchCounters | Measurement) -> CountersKey:
    return row.kernel, row.problem, row.shape


def encode_counters(counters: LaunchCounters) -> dict[str, Any]:
    operation = get_operation(counters.problem.operation)
    return {
        "operation": operation.name,
        "shape": operation.make_shape_record(counters.shape),
        "problem": operation.make_problem_record(counters.problem),
        "kernel": counters.kernel,
        "kernels": [asdict(each) for each in counters.device_kernels],
        "cycles": list(counters.cycles_by_launch),
        "reason": counters.missing_reason,
        "time": get_utc_time(),
    }


def read_logged_counters(log: RunLog) -> dict[CountersKey, LaunchCounters]:
    """Return the latest counters of each kernel, problem and shape in a log.

    Raises RunLogError for an invalid record of counters.
    """
    try:
        return {make_counters_key(counters): counters for counters in map(_decode_counters, log.counter_records)}
    except MALFORMED_LOG_ERRORS as error:
        raise RunLogError(
            f"{log.path} has an invalid record of counters ({describe_record_error(error)}): run 'mamf counters' again"
        ) from None


def _decode_counters(record: Mapping[str, Any]) -> LaunchCounters:
    operation = get_operation(record["operation"], record)
    if any(cycles <= 0 for cycles in record["cycles"]):
        raise ValueError("the cycles of a launch must be above 0")
    return LaunchCounters(
        record["kernel"],
        operation.read_problem_record(record["problem"]),
        operation.read_shape_record(record["shape"]),
        tuple(DeviceKernelCounters(**each) for each in record["kernels"]),
        tuple(map(float, record["cycles"])),
        record["reason"],
    )


# -- what bounds a kernel ----------------------------------------------------------------------------------------------


#: A part of the device, such as the tensor pipe, bounds a kernel if the kernel uses at least this percentage of the
#: part's peak.
MIN_BUSY_PERCENT = 60.0
# The time to start and end a kernel, in seconds. If a kernel runs for less time, its launch bounds its speed.
_MIN_KERNEL_SECONDS = 5e-6
# A wave is the set of blocks that the device can run at once. With fewer waves than this, most of the device is idle.
_MIN_WAVES = 0.5
# If the device kernels of a launch run for less than this share of the launch's time, the gaps between the kernels
# bound the speed. The launch's time is the time from one launch to the next. mamf measures it without ncu.
_MIN_KERNEL_TIME_SHARE = 0.7
# If the longest device kernel takes at least this share of a launch's cycles, its bound is reported as the bound of the
# whole launch, without the kernel's name.
_MIN_DOMINANT_KERNEL_SHARE = 0.98
_MAX_KERNEL_NAME_LENGTH = 48


@dataclass(frozen=True)
class Bound:
    """The bound of a launch: the part of the device, or the overhead, that limits the speed.

    - ``limiter``: a part of the device, such as "tensor pipe", or "launch", "latency" or "unknown".
    - ``evidence``: one line with the figures that show what the limiter is.
    """

    limiter: str
    evidence: str


def find_launch_bound(counters: LaunchCounters, interval_seconds: float | None = None) -> Bound:
    """Return what bounds a launch: the gaps between its device kernels if they are long, otherwise whatever bounds the
    longest device kernel.

    ``interval_seconds``: the seconds from one launch to the next, back to back and without ncu; None if unknown.
    """
    kernel_sum, longest = counters.summed_counters, max(counters.device_kernels, key=lambda each: each.cycles or 0.0)
    if interval_seconds and kernel_sum.seconds and kernel_sum.seconds < _MIN_KERNEL_TIME_SHARE * interval_seconds:
        busy_share, kernel_count = kernel_sum.seconds / interval_seconds, len(counters.device_kernels)
        subject = "its kernel runs" if kernel_count == 1 else f"its {kernel_count} kernels run"
        return Bound(
            "launch",
            f"{subject} for only {100 * busy_share:.0f} % of the {interval_seconds * 1e6:.4g} us between two launches",
        )
    bound = find_kernel_bound(longest)
    share = longest.cycles / kernel_sum.cycles if longest.cycles and kernel_sum.cycles else 1.0
    if share >= _MIN_DOMINANT_KERNEL_SHARE:
        return bound
    return Bound(
        bound.limiter,
        f"{bound.evidence}, in {shorten_kernel_name(longest.name)} ({100 * share:.0f} % of the launch's cycles)",
    )


def find_kernel_bound(kernel: DeviceKernelCounters) -> Bound:
    """Return what bounds one device kernel: the part of the device that it keeps busiest, too little work to fill the
    device, or latency.
    """
    known_percents = {
        name: percent for name, percent in compute_busy_percent_by_part(kernel).items() if percent is not None
    }
    if not known_percents:
        return Bound("unknown", "the device has no counters of its pipes and memory")
    busiest = max(known_percents, key=lambda name: known_percents[name])
    if known_percents[busiest] >= MIN_BUSY_PERCENT:
        return Bound(busiest, f"{known_percents[busiest]:.3g} % of its peak")
    explanation, metrics = (
        f"no part of the device is near its peak; the busiest is {busiest} at {known_percents[busiest]:.3g} %",
        kernel.metrics,
    )
    waves, blocks, seconds = metrics.get(WAVES_PER_COMPUTE_UNIT), metrics.get(BLOCK_COUNT), kernel.seconds
    if waves is not None and waves < _MIN_WAVES:
        block_note = "" if blocks is None else f", {blocks:.0f} blocks"
        return Bound("launch", f"too little work: {waves:.2g} waves{block_note}; {explanation}")
    if seconds is not None and seconds < _MIN_KERNEL_SECONDS:
        return Bound(
            "launch",
            f"too little work: the kernel takes {seconds * 1e6:.3g} us, about as long as launching it; {explanation}",
        )
    active, possible = metrics.get(ACTIVE_WARPS_PERCENT), metrics.get(POSSIBLE_WARPS_PERCENT)
    if active is not None and possible is not None:
        limiter_note = f", limited by its {' and '.join(kernel.occupancy_limiters)}" if possible < 100 else ""
        explanation += f"; occupancy: {active:.3g} % achieved, {possible:.3g} % possible{limiter_note}"
    return Bound("latency", explanation)


def compute_busy_percent_by_part(kernel: DeviceKernelCounters) -> dict[str, float | None]:
    """Return how busy a kernel keeps each part of the device, in percent of the part's peak; None if unknown.

    A group of parts, such as all pipes, is as busy as its busiest part. If the result also contains this part, the
    group is None, so that reports name the part instead of the group.
    """
    get_percent = kernel.metrics.get
    tensor, units, dram, l2, pipes = (
        get_percent(TENSOR_PIPE_PERCENT),
        get_percent(COMPUTE_UNITS_PERCENT),
        get_percent(DRAM_PERCENT),
        get_percent(L2_PERCENT),
        get_percent(MEMORY_PIPES_PERCENT),
    )
    # All traffic of device memory passes through the L2, so a busy memory keeps the L2 busy. Report only the memory.
    is_memory_busy = dram is not None and dram >= MIN_BUSY_PERCENT
    specific_percents = {each for each in (tensor, dram, l2) if each is not None}
    return {
        "tensor pipe": tensor,
        "other pipes": None if units in specific_percents else units,
        "memory": dram,
        "L2": None if is_memory_busy else l2,
        "L1 and shared memory": None if is_memory_busy or pipes in specific_percents else pipes,
    }


def shorten_kernel_name(name: str) -> str:
    """Return a kernel's name without template arguments, parameters and namespaces, cut off after 48 characters."""
    bare_name = name.replace("(anonymous namespace)::", "").removeprefix("void ").partition("<")[0].partition("(")[0]
    return (bare_name.rpartition("::")[2] or name)[:_MAX_KERNEL_NAME_LENGTH]


_NO_PERMISSION_ERROR = "ERR_NVGPUCTRPERM"
_NCU_MESSAGE_PREFIX, _NCU_ERROR_PREFIX = "==", "==ERROR=="
_ALTERNATIVES_TO_COUNTERS = "rates ('mamf sweep', 'mamf attention') and traces ('mamf profile', nsys) need no counters"


@dataclass(frozen=True)
class Ncu:
    """NVIDIA's profiler ncu, and the settings that mamf uses for all kernels of a run.

    - ``path``: the path of the program ncu.
    - ``backend_name``, ``device_index``: the name of the backend and the index of the device to profile.
    - ``launch_count``: the number of launches to profile per kernel.
    """

    path: str
    backend_name: str
    device_index: int
    launch_count: int

    def make_command(self, kernel: str, problem: Any, shape: Any) -> list[str]:
        """Return the command line that makes ncu read a kernel's counters.

        ``kernel``: the kernel's name as the user gave it.
        """
        device_options = ("--backend", self.backend_name, "--device", str(self.device_index))
        run_options = (*make_run_options(problem, shape), *device_options, "--launches", str(self.launch_count))
        # Without --clock-control none, ncu would lock the device's clock. But mamf never changes settings of the
        # machine, and kernels should run at the clock at which they run without ncu.
        return [
            *(self.path, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--print-units", "base"),
            *("--metrics", ",".join(NCU_METRICS)),
            *(sys.executable, "-m", "mamf", "run", kernel, *run_options),
        ]

    def read_kernel_counters(self, kernel: str, row: Measurement) -> LaunchCounters:
        """Run ncu and return the counters of the kernel, problem and shape of a measurement (``row``).

        ``kernel``: the kernel's name as the user gave it. If ncu fails, the result has a ``missing_reason`` and no
        counters. Raises UnavailableError if the driver does not let this user read counters, or ncu cannot be started.
        """
        output, error_output = run_and_capture_output(self.make_command(kernel, row.problem, row.shape))
        if _NO_PERMISSION_ERROR in output + error_output:
            raise UnavailableError(
                f"the driver does not let this user read counters ({_NO_PERMISSION_ERROR}): run as root, load the "
                "driver's module with NVreg_RestrictProfilingToAdminUsers=0, or start the container with "
                "--cap-add SYS_ADMIN; "
                f"{_ALTERNATIVES_TO_COUNTERS}"
            )
        kernels = parse_kernel_counters(output)
        if not kernels or any(line.startswith(_NCU_ERROR_PREFIX) for line in f"{output}\n{error_output}".splitlines()):
            return LaunchCounters(
                row.kernel, row.problem, row.shape, missing_reason=explain_ncu_failure(output, error_output)
            )
        return make_launch_counters(row.kernel, row.problem, row.shape, kernels, self.launch_count)


def make_run_options(problem: Any, shape: Any) -> list[str]:
    """Return the options that select this problem and shape in ``mamf run`` or ``mamf counters``, for any operation."""
    operation = get_operation(problem.operation)
    texts = [
        f"{name}={'none' if value is None else value}"
        for name, value in operation.make_problem_record(problem).items()
        if name != "dtype"
    ]
    return ["--operation", operation.name, "--shape", str(shape), "--dtype", problem.dtype, "--set", *texts]


def find_ncu(name: str | None) -> str:
    """Return the path of the program ncu. ``name``: the user's path or name of it, or None to search for it in PATH.

    Raises UnavailableError if there is no such program.
    """
    path = shutil.which(name or "ncu")
    if path is None:
        problem = f"{name} is not an executable program" if name else "ncu, which reads the counters, is not on PATH"
        raise UnavailableError(
            f"{problem}: install NVIDIA Nsight Compute (part of the CUDA toolkit), or give its path with --ncu; "
            f"{_ALTERNATIVES_TO_COUNTERS}"
        )
    return path


def explain_ncu_failure(output: str, error_output: str) -> str:
    """Return one line that says why ncu read no counters: ncu's first error and the last error of ``mamf run``.

    ``output``, ``error_output``: what ncu and ``mamf run`` wrote to stdout and stderr.
    """
    program_errors = [
        line for line in error_output.splitlines() if line.strip() and not line.startswith(_NCU_MESSAGE_PREFIX)
    ]
    ncu_errors = [
        line.removeprefix(_NCU_ERROR_PREFIX).strip()
        for line in f"{output}\n{error_output}".splitlines()
        if line.startswith(_NCU_ERROR_PREFIX)
    ]
    return " / ".join([*program_errors[-1:], *ncu_errors[:1]]) or "ncu counted no kernel and printed no reason"


def parse_kernel_counters(output: str) -> list[DeviceKernelCounters]:
    """Return the device kernels in the output of ncu, in the order in which they ran; empty if there is no CSV."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    header = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    column_names, *rows = [*csv.reader(lines[header:])] or [[]]
    kernels: dict[str, DeviceKernelCounters] = {}
    metrics: dict[str, dict[str, float | None]] = {}
    for cell in (dict(zip(column_names, row, strict=True)) for row in rows if len(row) == len(column_names)):
        values = metrics.setdefault(cell["ID"], {})
        values[cell["Metric Name"]] = parse_finite_number(cell["Metric Value"])
        kernels.setdefault(
            cell["ID"], DeviceKernelCounters(cell["Kernel Name"], cell["Grid Size"], cell["Block Size"], values)
        )
    return list(kernels.values())


def parse_finite_number(text: str) -> float | None:
    """Return the finite number in a text, which may have thousands separators; None for any other text."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None


def run_and_capture_output(command: Sequence[str]) -> tuple[str, str]:
    """Run a program until it ends, and return what it wrote to stdout and stderr.

    An interrupt kills the program and the processes that it started. Raises UnavailableError if the program cannot
    be started.
    """
    try:
        # Give the program a separate session, so that Ctrl-C reaches only mamf, which then kills the whole session.
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
        )
    except OSError as error:
        raise UnavailableError(f"cannot run {command[0]}: {error.strerror}") from None
    with process:
        try:
            return process.communicate()
        except BaseException:
            with contextlib.suppress(OSError):
                if hasattr(os, "killpg"):
                    os.killpg(process.pid, signal.SIGKILL)
                else:  # Windows has no sessions.
                    process.kill()
            raise
