"""Hardware counters of a kernel: runs ``mamf run`` under NVIDIA's ncu, reads its CSV, adds up the device kernels.

The CSV has one line per metric, among ncu's own messages (``==PROF==``) and the output of the program. Numbers have
thousands separators even in base units. A metric that the device does not have is ``n/a``.
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
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from mamf.errors import RunLogError, UnavailableError
from mamf.logs.records import get_utc_time
from mamf.logs.run_log import MALFORMED_ERRORS, RunLog, describe_error
from mamf.measurement import Measurement
from mamf.operations.unknown import get_operation

CYCLES = "gpc__cycles_elapsed.max"
NANOSECONDS = "gpu__time_duration.sum"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
UNITS_BUSY = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
MEMORY_PIPES = "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"
L2 = "lts__throughput.avg.pct_of_peak_sustained_elapsed"
DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
DRAM_READ, DRAM_WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
L2_HIT, L1_HIT = "lts__t_sector_hit_rate.pct", "l1tex__t_sector_hit_rate.pct"
REGISTERS, SHARED_MEMORY = "launch__registers_per_thread", "launch__shared_mem_per_block"
BLOCKS, THREADS_OF_BLOCK = "launch__grid_size", "launch__block_size"
WAVES = "launch__waves_per_multiprocessor"
WARPS, MAX_WARPS = "sm__warps_active.avg.pct_of_peak_sustained_active", "sm__maximum_warps_per_active_cycle_pct"
INSTRUCTIONS = "smsp__inst_executed.sum"
#: How many blocks of a kernel fit on a compute unit, by resource. The smallest number limits the occupancy.
OCCUPANCY_LIMITS = {
    "registers": "launch__occupancy_limit_registers",
    "shared memory": "launch__occupancy_limit_shared_mem",
    "warps": "launch__occupancy_limit_warps",
    "blocks": "launch__occupancy_limit_blocks",
}
#: Metrics that add up over the kernels of a launch.
SUMMED = (CYCLES, NANOSECONDS, DRAM_READ, DRAM_WRITTEN, INSTRUCTIONS)
METRICS = (
    *SUMMED,
    *(TENSOR, UNITS_BUSY, MEMORY_PIPES, L2, DRAM),
    *(L2_HIT, L1_HIT, REGISTERS, SHARED_MEMORY, BLOCKS, THREADS_OF_BLOCK, WAVES, WARPS, MAX_WARPS),
    *OCCUPANCY_LIMITS.values(),
)
#: A kernel on a shape of a problem.
CountedStep = tuple[str, Any, Any]


@dataclass(frozen=True)
class DeviceKernel:
    """The counters of one kernel on the device.

    ``grid``, ``block``: as ncu prints them, such as ``(2, 66, 1)``. ``metrics``: by ncu's names, in ncu's base units;
    None for a metric that the device does not have.
    """

    name: str
    grid: str
    block: str
    metrics: Mapping[str, float | None]

    @property
    def cycles(self) -> float | None:
        return self.metrics.get(CYCLES)

    @property
    def seconds(self) -> float | None:
        nanoseconds = self.metrics.get(NANOSECONDS)
        return None if nanoseconds is None else nanoseconds * 1e-9

    @property
    def dram_bytes(self) -> float | None:
        """The bytes read from and written to device memory."""
        return _sum_or_none([self.metrics.get(DRAM_READ), self.metrics.get(DRAM_WRITTEN)])

    @property
    def dram_rate(self) -> float | None:
        """The traffic of device memory in bytes per second."""
        return self.dram_bytes / self.seconds if self.dram_bytes is not None and self.seconds else None

    @property
    def limiters(self) -> tuple[str, ...]:
        """The resources that limit how many blocks fit on a compute unit."""
        room = {name: self.metrics.get(metric) for name, metric in OCCUPANCY_LIMITS.items()}
        known = {name: blocks for name, blocks in room.items() if blocks is not None}
        return tuple(name for name, blocks in known.items() if blocks == min(known.values()))


@dataclass(frozen=True)
class Counts:
    """The counters of a kernel on one shape.

    ``kernels``: the device kernels of a launch; each metric is the median over launches. ``cycles``: one number per
    launch, the sum over its device kernels. ``reason``: why nothing was counted, if so.
    """

    kernel: str
    problem: Any
    shape: Any
    kernels: tuple[DeviceKernel, ...] = ()
    cycles: tuple[float, ...] = ()
    reason: str = ""

    @property
    def ok(self) -> bool:
        return bool(self.kernels)

    @property
    def median_cycles(self) -> float | None:
        return statistics.median(self.cycles) if self.cycles else None

    @property
    def total(self) -> DeviceKernel:
        """All device kernels of a launch as one. Metrics that cannot be added, such as percentages, are missing."""
        if len(self.kernels) == 1:
            return self.kernels[0]
        summed = {name: _sum_or_none([each.metrics.get(name) for each in self.kernels]) for name in SUMMED}
        return DeviceKernel(f"{len(self.kernels)} kernels", "", "", summed)


def _sum_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def make_counts(kernel: str, problem: Any, shape: Any, kernels: Sequence[DeviceKernel], launches: int) -> Counts:
    """Make the counts of a kernel from the device kernels of several launches, in the order they ran."""
    per_launch, rest = divmod(len(kernels), launches)
    found = [kernels[start : start + per_launch] for start in range(0, len(kernels) - rest, per_launch or 1)]
    if rest or len({tuple(each.name for each in launch) for launch in found}) != 1:
        reason = f"the {launches} launches did not all run the same kernels ({len(kernels)} in total)"
        return Counts(kernel, problem, shape, reason=reason)
    cycles = [_sum_or_none([each.cycles for each in launch]) for launch in found]
    known = tuple(each for each in cycles if each)
    medians = tuple(_make_median_kernel(same) for same in zip(*found, strict=True))
    return Counts(kernel, problem, shape, medians, known if len(known) == launches else ())


def _make_median_kernel(same: Sequence[DeviceKernel]) -> DeviceKernel:
    first = same[0]
    values = {name: [each.metrics.get(name) for each in same] for name in first.metrics}
    known = {name: [value for value in found if value is not None] for name, found in values.items()}
    medians = {name: statistics.median(found) if found else None for name, found in known.items()}
    return DeviceKernel(first.name, first.grid, first.block, medians)


def get_step(row: Counts | Measurement) -> CountedStep:
    return row.kernel, row.problem, row.shape


def record_counts(counts: Counts) -> dict[str, Any]:
    operation = get_operation(counts.problem.operation)
    return {
        "operation": operation.name,
        "shape": operation.shape_record(counts.shape),
        "problem": operation.problem_record(counts.problem),
        "kernel": counts.kernel,
        "kernels": [asdict(each) for each in counts.kernels],
        "cycles": list(counts.cycles),
        "reason": counts.reason,
        "time": get_utc_time(),
    }


def read_counts(log: RunLog) -> dict[CountedStep, Counts]:
    """Return the last counts of each step in a log. Raises RunLogError for an invalid record of counters."""
    try:
        return {get_step(counts): counts for counts in map(_read_counts_record, log.counter_records)}
    except MALFORMED_ERRORS as error:
        raise RunLogError(f"{log.path} has an invalid record of counters: {describe_error(error)}") from None


def _read_counts_record(record: Mapping[str, Any]) -> Counts:
    operation = get_operation(record["operation"], record)
    if any(cycles <= 0 for cycles in record["cycles"]):
        raise ValueError("the cycles of a launch must be above 0")
    return Counts(
        record["kernel"],
        operation.problem_from_record(record["problem"]),
        operation.shape_from_record(record["shape"]),
        tuple(DeviceKernel(**each) for each in record["kernels"]),
        tuple(map(float, record["cycles"])),
        record["reason"],
    )


# -- what bounds a kernel ----------------------------------------------------------------------------------------------


#: A part of the device bounds a kernel if it is busy for at least this percentage of its peak.
BUSY_PERCENT = 60.0
# Starting and ending a kernel takes about this long. A shorter kernel is bound by it.
_SHORT_SECONDS = 5e-6
# With fewer waves of blocks than this, most of the device has nothing to do.
_FEW_WAVES = 0.5
# If kernels run for less than this share of the launch's time in burst, the gaps between them bound the launch.
_MIN_RUNNING_SHARE = 0.7
# If the longest kernel takes at least this share of a launch's cycles, its bound is reported as the launch's bound.
_WHOLE_LAUNCH_SHARE = 0.98
_MAX_NAME_LENGTH = 48

TENSOR_PIPE, OTHER_PIPES, MEMORY, L2_CACHE, ON_CHIP = "tensor pipe", "other pipes", "memory", "L2", "L1 and shared"
LATENCY, LAUNCH, UNKNOWN = "latency", "launch", "unknown"


@dataclass(frozen=True)
class Bound:
    """What bounds a launch. ``by``: one of the names above. ``why``: the figures that show it, in one line."""

    by: str
    why: str


def find_bound(counts: Counts, burst_seconds: float | None = None) -> Bound:
    """Find what bounds a launch: the gaps between its kernels, else the bound of the longest kernel.

    ``burst_seconds``: the time of a launch in burst, without the profiler.
    """
    total, longest = counts.total, max(counts.kernels, key=lambda each: each.cycles or 0.0)
    if burst_seconds and total.seconds and total.seconds < _MIN_RUNNING_SHARE * burst_seconds:
        busy, kernels = total.seconds / burst_seconds, len(counts.kernels)
        what = "its kernel runs" if kernels == 1 else f"its {kernels} kernels run"
        return Bound(LAUNCH, f"{what} for {busy:.0%} of the {burst_seconds * 1e6:.4g} us that a launch takes")
    found = find_kernel_bound(longest)
    share = longest.cycles / total.cycles if longest.cycles and total.cycles else 1.0
    if share >= _WHOLE_LAUNCH_SHARE:
        return found
    return Bound(found.by, f"{found.why}, in {shorten_kernel_name(longest.name)} ({share:.0%} of the launch's cycles)")


def find_kernel_bound(kernel: DeviceKernel) -> Bound:
    """Find what bounds one kernel of the device."""
    known = {name: percent for name, percent in compute_busy_percent(kernel).items() if percent is not None}
    if not known:
        return Bound(UNKNOWN, "the device has no counters of its pipes and memory")
    busiest = max(known, key=lambda name: known[name])
    if known[busiest] >= BUSY_PERCENT:
        return Bound(busiest, f"{known[busiest]:.3g} % of its peak")
    text, metrics = f"no part is busy; the busiest is {busiest} at {known[busiest]:.3g} %", kernel.metrics
    waves, blocks, seconds = metrics.get(WAVES), metrics.get(BLOCKS), kernel.seconds
    if waves is not None and waves < _FEW_WAVES:
        size = "" if blocks is None else f", {blocks:.0f} blocks"
        return Bound(LAUNCH, f"too little work: {waves:.2g} waves{size}; {text}")
    if seconds is not None and seconds < _SHORT_SECONDS:
        return Bound(LAUNCH, f"too little work: it takes {seconds * 1e6:.3g} us, about as long as a launch; {text}")
    active, possible = metrics.get(WARPS), metrics.get(MAX_WARPS)
    if active is not None and possible is not None:
        by = f", limited by its {' and '.join(kernel.limiters)}" if possible < 100 else ""
        text += f"; active warps {active:.3g} %, possible {possible:.3g} %{by}"
    return Bound(LATENCY, text)


def compute_busy_percent(kernel: DeviceKernel) -> dict[str, float | None]:
    """Return how busy each part of the device is, in percent of its peak.

    Work that several counters see is given for the most specific part only.
    """
    get = kernel.metrics.get
    tensor, units, dram, l2, pipes = get(TENSOR), get(UNITS_BUSY), get(DRAM), get(L2), get(MEMORY_PIPES)
    # Traffic that fills the memory also fills the L2.
    is_of_memory = dram is not None and dram >= BUSY_PERCENT
    is_of_others = {each for each in (tensor, dram, l2) if each is not None}
    return {
        TENSOR_PIPE: tensor,
        OTHER_PIPES: None if units in is_of_others else units,
        MEMORY: dram,
        L2_CACHE: None if is_of_memory else l2,
        ON_CHIP: None if is_of_memory or pipes in is_of_others else pipes,
    }


def shorten_kernel_name(name: str) -> str:
    """Shorten a kernel's name, which may have a thousand characters.

    Drops template arguments, parameters and namespaces, and cuts off what is still too long.
    """
    bare = name.replace("(anonymous namespace)::", "").removeprefix("void ").partition("<")[0].partition("(")[0]
    return (bare.rpartition("::")[2] or name)[:_MAX_NAME_LENGTH]


#: Without --clock-control ncu would lock the clock. mamf never changes the machine, and counts kernels at their clock.
_COMMON_OPTIONS = ("--clock-control", "none", "--profile-from-start", "off", "--csv", "--print-units", "base")
_NO_PERMISSION = "ERR_NVGPUCTRPERM"
_MESSAGE, _ERROR = "==", "==ERROR=="
_ALTERNATIVES = "rates ('mamf sweep', 'mamf attention') and traces ('mamf profile', nsys) need no counters"
_HOW_TO_PERMIT = (
    f"the driver does not let this user read counters ({_NO_PERMISSION}): run as root, load its module with "
    f"NVreg_RestrictProfilingToAdminUsers=0, or start the container with --cap-add SYS_ADMIN; {_ALTERNATIVES}"
)


class Output(NamedTuple):
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Ncu:
    """Runs ncu. ``path``: its program. ``backend``, ``device``: as the user gave them. ``launches``: how many to count
    of each kernel.
    """

    path: str
    backend: str
    device: int
    launches: int

    def make_command(self, kernel: str, problem: Any, shape: Any) -> list[str]:
        """Return the command line that counts a kernel. ``kernel``: the name that the user gave."""
        device = ["--backend", self.backend, "--device", str(self.device), "--launches", str(self.launches)]
        program = [sys.executable, "-m", "mamf", "run", kernel, *make_options(problem, shape), *device]
        return [self.path, *_COMMON_OPTIONS, "--metrics", ",".join(METRICS), *program]

    def count(self, kernel: str, row: Measurement) -> Counts:
        """Count the kernel of a row. If that fails, the counts are empty and have a reason.

        Raises UnavailableError if no kernel can be counted on this machine.
        """
        output = run_program(self.make_command(kernel, row.problem, row.shape))
        if _NO_PERMISSION in "".join(output):
            raise UnavailableError(_HOW_TO_PERMIT)
        kernels = read_kernels(output.stdout)
        if not kernels or any(line.startswith(_ERROR) for line in "\n".join(output).splitlines()):
            return Counts(row.kernel, row.problem, row.shape, reason=explain_failure(*output))
        return make_counts(row.kernel, row.problem, row.shape, kernels, self.launches)


def make_options(problem: Any, shape: Any) -> list[str]:
    """Return the options of ``mamf run`` and ``mamf counters`` for a problem and a shape of any operation."""
    operation = get_operation(problem.operation)
    fields = {name: value for name, value in operation.problem_record(problem).items() if name != "dtype"}
    texts = [f"{name}={'none' if value is None else value}" for name, value in fields.items()]
    return ["--operation", operation.name, "--shape", str(shape), "--dtype", problem.dtype, "--set", *texts]


def find_ncu(name: str | None) -> str:
    """Return the path of ncu. Raises UnavailableError if it is not installed."""
    path = shutil.which(name or "ncu")
    if path is None:
        what = f"{name} is not an executable program" if name else "ncu, which reads the counters, is not on PATH"
        raise UnavailableError(
            f"{what}: install NVIDIA Nsight Compute (part of the CUDA toolkit), or give its path with --ncu; "
            f"{_ALTERNATIVES}"
        )
    return path


def explain_failure(output: str, errors: str) -> str:
    """Say in one line why ncu counted nothing: the error of the profiled program, else ncu's own error."""
    program_errors = [line for line in errors.splitlines() if line.strip() and not line.startswith(_MESSAGE)]
    ncu_errors = [
        line.removeprefix(_ERROR).strip() for line in f"{output}\n{errors}".splitlines() if line.startswith(_ERROR)
    ]
    return " / ".join([*program_errors[-1:], *ncu_errors[:1]]) or "ncu counted no kernel and does not say why"


def read_kernels(output: str) -> list[DeviceKernel]:
    """Read the kernels that ncu counted, in the order they ran; empty if it printed no CSV."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    header = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    head, *rows = [*csv.reader(lines[header:])] or [[]]
    kernels: dict[str, DeviceKernel] = {}
    metrics: dict[str, dict[str, float | None]] = {}
    for cell in (dict(zip(head, row, strict=True)) for row in rows if len(row) == len(head)):
        values = metrics.setdefault(cell["ID"], {})
        values[cell["Metric Name"]] = parse_number(cell["Metric Value"])
        kernels.setdefault(cell["ID"], DeviceKernel(cell["Kernel Name"], cell["Grid Size"], cell["Block Size"], values))
    return list(kernels.values())


def parse_number(text: str) -> float | None:
    """Read a number with thousands separators; None for any other text."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None


def run_program(command: Sequence[str]) -> Output:
    """Run a program and return what it printed. An interrupt kills it and the processes that it started.

    Raises UnavailableError if it cannot be started.
    """
    try:
        # ncu gets a new session, so that Ctrl-C reaches only this process. It then kills ncu and its processes.
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
        )
    except OSError as error:
        raise UnavailableError(f"cannot run {command[0]}: {error.strerror}") from None
    with process:
        try:
            return Output(*process.communicate())
        except BaseException:
            _kill_session(process)
            raise


def _kill_session(process: subprocess.Popen[str]) -> None:
    """Kill the process and the processes that it started."""
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
