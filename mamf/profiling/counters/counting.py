"""Counts a kernel with ``mamf run`` under ncu. An error in one kernel becomes the reason of its counts."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mamf.errors import MamfWarning, UnavailableError
from mamf.measurement import Measurement
from mamf.operations.unknown import operation_called
from mamf.profiling.counters import ncu
from mamf.profiling.counters.counts import DEFAULT, Counts, DeviceKernel, launches_of, median_launch
from mamf.profiling.counters.running import output_of


@dataclass(frozen=True)
class Counter:
    """``ncu``: its path; ``backend``, ``device``: as requested; ``launches``: counted of each kernel;
    ``metrics``: in addition to the default metrics; ``sections``: of SECTION_SETS, or None; ``determinism``: whether
    launches are compared.
    """

    ncu: str
    backend: str
    device: int
    launches: int
    metrics: tuple[str, ...] = ()
    sections: str | None = None
    determinism: bool = False

    def command(self, kernel: str, problem: Any, shape: Any, report: str | None = None) -> list[str]:
        """The command line for a kernel by the name that it is asked for."""
        metrics = tuple(dict.fromkeys((*DEFAULT, *self.metrics)))
        program = [sys.executable, "-m", "mamf", "run", kernel, *self._asked_for(problem, shape)]
        return ncu.collecting(self.ncu, metrics, self.sections, report, program)

    def _asked_for(self, problem: Any, shape: Any) -> list[str]:
        """The options of ``mamf run``."""
        what = options_of(problem, shape)
        device = ["--backend", self.backend, "--device", str(self.device)]
        determinism = ["--determinism"] if self.determinism else []
        return [*what, *device, *determinism, "--launches", str(self.launches), "--format", "json"]

    def count(self, kernel: str, row: Measurement, report: str | None = None) -> Counts:
        """What a row's kernel counts. ``report``: the file in which ncu's own report is kept.

        Raises UnavailableError if no kernel can be counted on this machine.
        """
        output = output_of(self.command(kernel, row.problem, row.shape, report))
        reason = ncu.unavailable(output.stdout + output.stderr)
        if reason is not None:
            raise UnavailableError(str(reason))
        said = said_by_run(output.stdout)
        none = Counts(row.kernel, row.problem, row.shape, **said)
        listed = output_of(ncu.reading(self.ncu, report)).stdout if report else output.stdout
        kernels = ncu.kernels_in(listed)
        # Without a record the program did not finish.
        if not kernels or not said:
            return replace(none, reason=ncu.fault(output.stdout, output.stderr))
        for name in ncu.missing(kernels, self.metrics):
            warnings.warn(f"ncu has no figure of {name} on this device", MamfWarning, stacklevel=2)
        try:
            launches = launches_of(kernels, self.launches)
        except ValueError as error:
            return replace(none, reason=str(error))
        return replace(none, kernels=median_launch(launches), cycles=_cycles(launches))


def _cycles(launches: Sequence[Sequence[DeviceKernel]]) -> tuple[float, ...]:
    """Cycles per launch; empty if a kernel has no figure."""
    cycles = [[kernel.cycles or 0.0 for kernel in launch] for launch in launches]
    return tuple(map(sum, cycles)) if all(map(all, cycles)) else ()


def said_by_run(output: str) -> dict[str, Any]:
    """What ``mamf run`` reports in addition to its times; empty if it did not finish."""
    for begin in re.finditer("^{", output, re.MULTILINE):
        try:
            record, _ = json.JSONDecoder().raw_decode(output, begin.start())
            return {name: record[name] for name in ("preparing_seconds", "is_deterministic")}
        except (KeyError, TypeError, ValueError):
            continue
    return {}


def options_of(problem: Any, shape: Any) -> list[str]:
    """The options of ``mamf run`` and ``mamf counters`` for a problem of any operation."""
    of = operation_called(problem.operation)
    fields = {name: value for name, value in of.problem_record(problem).items() if name != "dtype"}
    texts = [f"{name}={'none' if value is None else value}" for name, value in fields.items()]
    return ["--operation", of.name, "--shape", str(shape), "--dtype", problem.dtype, "--set", *texts]
