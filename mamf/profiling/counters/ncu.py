"""NVIDIA's ncu: its command line, and a reader of its CSV. Pure.

Its CSV stands among its own messages (``==PROF==``) and what the profiled program prints. It is long (one
line per metric) for ``--metrics``, and wide (a line per kernel, units in the second) as page ``raw``, which
``--set`` needs. Figures have thousands separators even in base units; a metric that the device lacks is ``n/a``.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence

from mamf.backend import Unavailable
from mamf.profiling.counters.counts import DeviceKernel

#: By default ncu locks the clock: nothing here changes the machine, and counts are of the clock that kernels run at.
_ALWAYS = ("--clock-control", "none", "--profile-from-start", "off")
_PRINTED = ("--csv", "--print-units", "base")
_RAW = ("--page", "raw")
_NO_PERMISSION = "ERR_NVGPUCTRPERM"
_MESSAGE, _ERROR = "==", "==ERROR=="
_NAME, _GRID, _BLOCK = "Kernel Name", "Grid Size", "Block Size"
_METRIC, _VALUE = "Metric Name", "Metric Value"
#: Columns before the metrics of the wide form.
_OF_KERNEL = (
    "ID",
    "Process ID",
    "Process Name",
    "Host Name",
    _NAME,
    "Context",
    "Stream",
    _BLOCK,
    _GRID,
    "Device",
    "CC",
)
#: What to use instead of hardware counters.
WITHOUT_COUNTERS = "rates need none ('mamf sweep', 'mamf attention'), nor does a trace ('mamf profile', nsys)"


def collecting(
    ncu: str, metrics: Sequence[str], sections: str | None, report: str | None, program: Sequence[str]
) -> list[str]:
    """The command that counts a program. ``sections``: of ncu's ``--set``; ``report``: the file for ncu's report."""
    asked = ["--metrics", ",".join(metrics), *(["--set", sections] if sections else [])]
    if report is not None:  # printed by ``reading``: with a report ncu prints nothing
        return [ncu, *_ALWAYS, *asked, "--export", report, *program]
    return [ncu, *_ALWAYS, *_PRINTED, *(_RAW if sections else ()), *asked, *program]


def reading(ncu: str, report: str) -> list[str]:
    """The command that prints a report."""
    return [ncu, "--import", report, *_PRINTED, *_RAW]


def unavailable(output: str) -> Unavailable | None:
    """Why no kernel at all can be counted, as ncu said it, or None."""
    if _NO_PERMISSION not in output:
        return None
    return Unavailable(
        f"the driver lets this user read no counters ({_NO_PERMISSION})",
        "run as root, or have the module loaded with NVreg_RestrictProfilingToAdminUsers=0, in a container with "
        f"--cap-add SYS_ADMIN; {WITHOUT_COUNTERS}",
    )


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
    rows = [row for row in rows if len(row) == len(head)]
    return _of_long(head, rows) if _METRIC in head else _of_wide(head, rows)


def _of_long(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[DeviceKernel]:
    found: dict[str, DeviceKernel] = {}
    metrics: dict[str, dict[str, float | None]] = {}
    for row in rows:
        cell = dict(zip(head, row, strict=True))
        values = metrics.setdefault(cell["ID"], {})
        values[cell[_METRIC]] = number(cell[_VALUE])
        found.setdefault(cell["ID"], DeviceKernel(cell[_NAME], cell[_GRID], cell[_BLOCK], values))
    return list(found.values())


def _of_wide(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[DeviceKernel]:
    found = []
    for row in rows[1:]:  # the first is of units
        cell = dict(zip(head, row, strict=True))
        metrics = {name: number(value) for name, value in cell.items() if name not in _OF_KERNEL}
        found.append(DeviceKernel(cell[_NAME], cell[_GRID], cell[_BLOCK], metrics))
    return found


def number(text: str) -> float | None:
    """A figure with its thousands separators; None for any other text."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None


def missing(kernels: Iterable[DeviceKernel], metrics: Iterable[str]) -> list[str]:
    """Metrics without a figure in any kernel: ncu accepts unknown names."""
    kernels = list(kernels)
    return [name for name in metrics if all(each.metrics.get(name) is None for each in kernels)]
