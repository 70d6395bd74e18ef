"""Repeats the same launch thousands of times and compares all outputs bitwise. It finds rare silent errors of a device
that sampled verification would miss.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from mamf.backend import Backend, OperandPool, Reading
from mamf.engine.measure import classify_error, conditions, limit_of
from mamf.engine.regimes import Regime, Sustained
from mamf.engine.regimes.checking import Checked, WrongResultError
from mamf.errors import UnsupportedError, plugin_errors
from mamf.kernel import AnyKernel, Prepared
from mamf.measurement import Measurement, Status
from mamf.plausibility import split_impossible, why_implausible
from mamf.statistics import summarize

LAUNCHES = 5000
#: Launches that are queued, with their checksums, before they are waited for.
_QUEUED = 100
_FEWEST = 2


@dataclass
class Repeating:
    """``launches`` of one operand set, after it was verified. The row's samples are of blocks with their checksums:
    they show that the device was loaded, and are no figure of the kernel.
    """

    kernel: AnyKernel
    problem: Any
    shape: Any
    backend: Backend
    launches: int = LAUNCHES
    on_progress: Callable[[int], None] = lambda launched: None
    #: Time after which a slow device repeats no more.
    most_seconds: float = math.inf
    _seconds: list[float] = field(default_factory=list)
    _sums: list[int] = field(default_factory=list)
    _readings: list[Reading] = field(default_factory=list)

    def row(self, pool: OperandPool) -> Measurement:
        """A measurement: ``wrong_result`` where outputs differ, whatever else went wrong as any row's status."""
        backend, kernel = self.backend, self.kernel
        try:
            with kernel.settings(backend, self.problem):
                self._repeat(self._prepared(pool), Sustained(backend))
        except WrongResultError as error:
            return self._result("wrong_result", str(error))
        except plugin_errors() as error:
            return self._result(*classify_error(error, kernel, backend))
        (_, usual), *others = Counter(self._sums).most_common()
        different = sum(count for _, count in others)
        if different:
            reason = f"{different} of {usual + different} equal launches gave different bits than the rest"
            return self._result("wrong_result", reason)
        return self._result("ok")

    def _prepared(self, pool: OperandPool) -> Prepared:
        """Verified. Raises UnsupportedError for what the kernel cannot do."""
        kernel, backend, problem, shape = self.kernel, self.backend, self.problem, self.shape
        if reason := kernel.unsupported(backend, problem) or kernel.unsupported_shape(problem, shape):
            raise UnsupportedError(reason)
        prepared = kernel.prepare(backend, problem, shape, pool)
        Checked(prepared).rehearse(backend)
        return prepared

    def _repeat(self, prepared: Prepared, regime: Regime) -> None:
        backend, checksum = self.backend, prepared.checksum
        if checksum is None:
            raise UnsupportedError(f"kernel {self.kernel.name} has no checksum of its output")
        deadline = backend.now() + self.most_seconds
        while len(self._sums) < self.launches and backend.now() < deadline:
            pending = list[Any]()
            start = backend.mark()
            for _ in range(min(_QUEUED, self.launches - len(self._sums))):
                if len(pending) >= _FEWEST and backend.now() >= deadline:
                    break
                result = prepared.launches[0]()
                backend.submit()
                pending.append(checksum(0, result))
            end = backend.mark()
            self._readings += [reading for reading in (regime.read_sensors(),) if reading is not None]
            backend.synchronize()
            self._seconds.append(round(backend.seconds_between(start, end) / len(pending), 9))
            self._sums += [each() for each in pending]
            self.on_progress(len(self._sums))

    def _result(self, status: Status, reason: str = "") -> Measurement:
        best_by, info = Sustained.best_by, self.backend.info
        limit = limit_of(self.kernel, info, self.problem, self.shape)
        possible, impossible = split_impossible(self._seconds, self.problem.work(self.shape).amount, limit)
        row = Measurement(
            self.shape,
            self.kernel.name,
            self.problem,
            Sustained.name,
            best_by,
            status,
            reason,
            summary=summarize(possible, best_by) if status == "ok" and possible else None,
            samples=tuple(possible),
            implausible_samples=tuple(impossible),
            launches=len(self._sums),
            conditions=conditions(self._readings, None),
            remarks=("a checksum after each launch",),
        )
        if row.ok and (why := why_implausible(row, info, limit)):
            return replace(row, status="implausible", reason=why, summary=None)
        return row
