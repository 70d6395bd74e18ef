"""Runs ``mamf run`` under NVIDIA's ncu, and reads its CSV.

The CSV stands among ncu's own messages (``==PROF==``) and what the profiled program prints, one line per metric.
Figures have thousands separators even in base units; a metric that the device lacks is ``n/a``.
"""

from __future__ import annotations

import contextlib
import csv
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mamf.errors import UnavailableError
from mamf.measurement import Measurement
from mamf.operations.unknown import operation_called
from mamf.profiling.counters.counts import METRICS, Counts, DeviceKernel, counts_of

#: By default ncu locks the clock: nothing here changes the machine, and counts are of the clock that kernels run at.
_ALWAYS = ("--clock-control", "none", "--profile-from-start", "off", "--csv", "--print-units", "base")
_NO_PERMISSION = "ERR_NVGPUCTRPERM"
_MESSAGE, _ERROR = "==", "==ERROR=="
_ALTERNATIVES = "rates need none ('mamf sweep', 'mamf attention'), nor does a trace ('mamf profile', nsys)"
_HOW_TO_PERMIT = (
    f"the driver lets this user read no counters ({_NO_PERMISSION}): run as root, or load its module with "
    f"NVreg_RestrictProfilingToAdminUsers=0, in a container with --cap-add SYS_ADMIN; {_ALTERNATIVES}"
)


class Output(NamedTuple):
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Ncu:
    """``path``: of ncu; ``backend``, ``device``: as requested; ``launches``: counted of each kernel."""

    path: str
    backend: str
    device: int
    launches: int

    def command(self, kernel: str, problem: Any, shape: Any) -> list[str]:
        """The command line for a kernel by the name that it is asked for."""
        device = ["--backend", self.backend, "--device", str(self.device), "--launches", str(self.launches)]
        program = [sys.executable, "-m", "mamf", "run", kernel, *options_of(problem, shape), *device]
        return [self.path, *_ALWAYS, "--metrics", ",".join(METRICS), *program]

    def count(self, kernel: str, row: Measurement) -> Counts:
        """Count the kernel of a row; an error becomes the reason of its counts.

        Raises UnavailableError if no kernel can be counted on this machine.
        """
        output = output_of(self.command(kernel, row.problem, row.shape))
        if _NO_PERMISSION in "".join(output):
            raise UnavailableError(_HOW_TO_PERMIT)
        kernels = kernels_in(output.stdout)
        if not kernels or any(line.startswith(_ERROR) for line in "\n".join(output).splitlines()):
            return Counts(row.kernel, row.problem, row.shape, reason=fault(*output))
        return counts_of(row.kernel, row.problem, row.shape, kernels, self.launches)


def options_of(problem: Any, shape: Any) -> list[str]:
    """The options of ``mamf run`` and ``mamf counters`` for a problem of any operation."""
    of = operation_called(problem.operation)
    fields = {name: value for name, value in of.problem_record(problem).items() if name != "dtype"}
    texts = [f"{name}={'none' if value is None else value}" for name, value in fields.items()]
    return ["--operation", of.name, "--shape", str(shape), "--dtype", problem.dtype, "--set", *texts]


def find_ncu(name: str | None) -> str:
    """The path of ncu. Raises UnavailableError if there is no ncu."""
    path = shutil.which(name or "ncu")
    if path is None:
        what = f"{name} is not an executable program" if name else "ncu, which reads the counters, is not on PATH"
        raise UnavailableError(
            f"{what}: install NVIDIA Nsight Compute (it comes with the CUDA toolkit), or name it by --ncu; "
            f"{_ALTERNATIVES}"
        )
    return path


def fault(output: str, errors: str) -> str:
    """Why there is nothing to read, in a line: the program's own error, else ncu's."""
    own = [line for line in errors.splitlines() if line.strip() and not line.startswith(_MESSAGE)]
    said = [line.removeprefix(_ERROR).strip() for line in f"{output}\n{errors}".splitlines() if line.startswith(_ERROR)]
    return " / ".join([*own[-1:], *said[:1]]) or "ncu counted no kernel and does not say why"


def kernels_in(output: str) -> list[DeviceKernel]:
    """The kernels that ncu counted, in the order they ran; empty if it printed no CSV."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    begun = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    head, *rows = [*csv.reader(lines[begun:])] or [[]]
    found: dict[str, DeviceKernel] = {}
    metrics: dict[str, dict[str, float | None]] = {}
    for cell in (dict(zip(head, row, strict=True)) for row in rows if len(row) == len(head)):
        values = metrics.setdefault(cell["ID"], {})
        values[cell["Metric Name"]] = number(cell["Metric Value"])
        found.setdefault(cell["ID"], DeviceKernel(cell["Kernel Name"], cell["Grid Size"], cell["Block Size"], values))
    return list(found.values())


def number(text: str) -> float | None:
    """A figure with its thousands separators; None for any other text."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None


def output_of(command: Sequence[str]) -> Output:
    """What a program and those that it started print; an interrupt ends them.

    Raises UnavailableError if it cannot be started.
    """
    try:
        # In a new session: Ctrl-C reaches this process only, which ends them all.
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
        )
    except OSError as error:
        raise UnavailableError(f"cannot run {command[0]}: {error.strerror}") from None
    with process:
        try:
            return Output(*process.communicate())
        except BaseException:
            _end(process)
            raise


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the process and what it started."""
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
