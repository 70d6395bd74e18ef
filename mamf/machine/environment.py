"""Describe the software of this process for logs, check the machine, and pause Python's garbage collection."""

from __future__ import annotations

import functools
import gc
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from mamf.backend import Backend, CheckResult

# Names of environment variables that affect torch on every device. Logs record their values. Each backend adds the
# variables of its vendor.
_TORCH_ENVIRONMENT_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY", "TORCH_BLAS_PREFER_CUBLASLT")


def describe_environment(backend_variables: Iterable[str] = ()) -> dict[str, Any]:
    """Describe the Python, operating system, packages and environment variables of this process as JSON values.

    ``backend_variables``: the names of the environment variables to record in addition to those that affect torch.
    """
    return {
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {
            name: installed for name in ("torch", "numpy", "triton") if (installed := get_package_version(name))
        },
        "variables": {
            name: os.environ[name]
            for name in sorted({*_TORCH_ENVIRONMENT_VARIABLES, *backend_variables})
            if name in os.environ
        },
    }


@functools.cache  # Cached, because an upgrade of a package does not change a running process.
def get_package_version(name: str) -> str | None:
    """Return the version of a package, or None if the package is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def describe_mamf_version() -> dict[str, str | None]:
    """Return mamf's name, version and git commit for a log. The commit is None if mamf does not run from a checkout. A
    ``+`` after the commit means that the checkout has uncommitted changes.
    """
    return {"name": "mamf", "version": get_package_version("mamf"), "commit": _read_checkout_commit()}


@functools.cache  # Cached, because a later commit does not change a running process.
def _read_checkout_commit() -> str | None:
    checkout = Path(__file__).resolve().parent.parent
    if not (checkout / ".git").exists():
        return None

    def run_git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(checkout), *arguments], capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()

    try:
        uncommitted_changes = run_git("status", "--porcelain", "--untracked-files=no", "--", "mamf", "backends")
        return run_git("rev-parse", "--short=12", "HEAD") + ("+" if uncommitted_changes else "")
    except (OSError, subprocess.SubprocessError):
        return None


def quote_command_line() -> str:
    """Return the command line of this process, quoted for a shell, with ``mamf`` instead of the path of the program."""
    return shlex.join(["mamf", *sys.argv[1:]])


# mamf warns that the host is busy if other work uses at least this share of its CPU, in percent. If the CPU itself is
# the device, less load already matters.
_MIN_BUSY_HOST_PERCENT, _MIN_BUSY_DEVICE_PERCENT = 50.0, 20.0
# The CPU load is only computed for runs of at least this many seconds, because a shorter mean says little.
_MIN_SECONDS_TO_COMPUTE_LOAD = 5.0
#: The name of the check that warns if a search for ceilings has little time.
SEARCH_TIME_CHECK = "search time"
# The names of all checks that warn that rates may be too low. The others warn of other work on the CPU or the device.
_CPU_LOAD_CHECK = "cpu load"
_LOW_RATE_CHECKS = (_CPU_LOAD_CHECK, "host load", "other processes", SEARCH_TIME_CHECK)
# The label at the start of each line that ``mamf doctor`` prints, by the verdict of the check.
_VERDICT_LABELS = {"ok": "ok  ", "warning": "WARN", "unknown": "?   "}


def run_machine_checks(backend: Backend) -> list[CheckResult]:
    """Run the checks of the backend and return their results. If the device is an accelerator, also check whether the
    CPU of the host is busy.
    """
    return [*backend.check_machine(), *([check_host_load()] if backend.is_accelerator else [])]


def select_warnings(findings: list[CheckResult]) -> list[CheckResult]:
    return [finding for finding in findings if finding.verdict == "warning"]


def is_machine_busy(backend: Backend) -> bool:
    """Return whether other work uses the CPU or the device, so that launches may take longer than usual."""
    return any(finding.check_name in _LOW_RATE_CHECKS for finding in select_warnings(run_machine_checks(backend)))


def check_host_load() -> CheckResult:
    """Check for 0.1 s whether other work keeps the host's CPU busy."""
    import psutil  # imported here, because commands that measure nothing work without psutil

    busy_percent = psutil.cpu_percent(interval=0.1)
    return CheckResult(
        "host load",
        "ok" if busy_percent < _MIN_BUSY_HOST_PERCENT else "warning",
        f"the host's CPU is {busy_percent:.0f} % busy",
        effect="the host may queue launches late, so rates of small shapes are noisy",
        command="top -o %CPU   # shows what runs",
    )


class CpuUse(NamedTuple):
    """How many CPU seconds processes have used up to a moment.

    - ``time``: the moment, in seconds of the monotonic clock.
    - ``all_seconds``: the CPU seconds of all processes. ``own_seconds``: those of this process and its children.
    - ``capacity_seconds``: the CPU seconds that all processes together could have used.
    """

    time: float
    all_seconds: float
    own_seconds: float
    capacity_seconds: float

    @classmethod
    def read(cls) -> CpuUse | None:
        """Read how much the CPU has been used so far. Return None if the system does not allow it."""
        import psutil  # imported here, because commands that measure nothing work without psutil

        try:
            of_machine, process = psutil.cpu_times(), psutil.Process()
            own = [process.cpu_times()]
            for child in process.children(recursive=True):
                with suppress(psutil.NoSuchProcess):  # The child may end at any time.
                    own.append(child.cpu_times())
        except (psutil.Error, OSError):
            return None
        capacity = sum(of_machine) - getattr(of_machine, "guest", 0.0) - getattr(of_machine, "guest_nice", 0.0)
        return cls(
            time.monotonic(),
            capacity - of_machine.idle - getattr(of_machine, "iowait", 0.0),
            sum(each.user + each.system + each.children_user + each.children_system for each in own),
            capacity,
        )


def check_load_during_run(backend: Backend, before: CpuUse | None, after: CpuUse | None) -> list[CheckResult]:
    """Return a warning if other processes kept the CPU busy during a run. Return no warning for a run of a few seconds.

    ``before``, ``after``: the use of the CPU when the run began and when it ended; None if unknown.
    """
    if before is None or after is None:
        return []
    capacity = after.capacity_seconds - before.capacity_seconds
    if after.time - before.time < _MIN_SECONDS_TO_COMPUTE_LOAD or capacity <= 0:
        return []
    others_seconds = (after.all_seconds - before.all_seconds) - (after.own_seconds - before.own_seconds)
    busy_percent = 100 * others_seconds / capacity
    if busy_percent < (_MIN_BUSY_HOST_PERCENT if backend.is_accelerator else _MIN_BUSY_DEVICE_PERCENT):
        return []
    return [
        CheckResult(
            "host load" if backend.is_accelerator else _CPU_LOAD_CHECK,
            "warning",
            f"other processes used {busy_percent:.0f} % of the CPU during the run",
            "rates are lower and less repeatable than on a quiet machine",
            "top -o %CPU   # shows what runs",
        )
    ]


def format_check_result(result: CheckResult) -> str:
    """Format the result of a check as one line: verdict, name and finding. For a warning, add how the problem affects
    measured rates, and the command that corrects it.
    """
    is_warning = result.verdict == "warning"
    parts = [
        f"{_VERDICT_LABELS[result.verdict]} {result.check_name}: {result.finding}",
        result.effect if is_warning else "",
        f"to fix: {result.command}" if is_warning and result.command else "",
    ]
    return "; ".join(filter(None, parts))


def list_logged_warnings(header: Mapping[str, Any], low_rates_only: bool = False) -> list[str]:
    """List the warnings about the machine in the header of a log. Leave out their effects on rates and the commands
    that fix them.

    ``low_rates_only``: list only warnings that rates or ceilings may be too low: other work used the CPU or the device,
    or the search for ceilings was short.
    """
    label = f"{_VERDICT_LABELS['warning']} "
    warnings = [text.partition(";")[0] for text in header.get("findings", ()) if text.startswith(label)]
    return [text for text in warnings if not low_rates_only or text.removeprefix(label).startswith(_LOW_RATE_CHECKS)]


def was_cpu_device_busy(header: Mapping[str, Any]) -> bool:
    """Return whether the device of a run was a CPU that other work used too. Its rates may then be wrong by a factor of
    10, because the scheduler of the operating system interrupts launches.
    """
    label = f"{_VERDICT_LABELS['warning']} {_CPU_LOAD_CHECK}"
    return any(text.startswith(label) for text in list_logged_warnings(header, low_rates_only=True))


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Turn off Python's garbage collection for the duration of a ``with`` block.

    During a measurement, garbage collection could delay the host so long that the device runs out of queued work. When
    mamf reads a log with hundreds of thousands of rows, garbage collection would take a sixth of the time and free
    nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
