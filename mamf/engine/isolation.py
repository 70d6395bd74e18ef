"""Has the results of a kernel checked by a process that never imports it.

A kernel can replace functions of torch and of mamf in the process that measures it: its own check, or the clock. So
those that were loaded by path, and with ``--isolate`` all, multiply operands that a fresh process draws. That process
checks the results with the verification of a registered kernel, on the CPU, and times launches by its own clock.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import weakref
from dataclasses import dataclass, field, replace

from mamf.backend import Backend
from mamf.errors import describe_error, plugin_errors
from mamf.kernel import AnyKernel
from mamf.measurement import Measurement
from mamf.operations.unknown import operation_called
from mamf.plugins.discovery import is_loaded_by_path


@dataclass
class Isolation:
    """Checks on one device. ``everything``: of all kernels; None: of those loaded by path; False: of none."""

    everything: bool | None = None
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _answers: dict[object, dict[str, str]] = field(default_factory=dict, init=False)

    def confirm(self, row: Measurement, kernel: AnyKernel, backend: Backend) -> Measurement:
        """The row, refused if a fresh process finds its kernel wrong or slower at its shape, each checked once."""
        wanted = is_loaded_by_path(kernel) if self.everything is None else self.everything
        if not (row.ok and wanted and backend.has_tensors):
            return row
        key = (row.kernel, row.problem, row.shape)
        if key not in self._answers:
            self._answers[key] = self._ask(row, kernel, backend)
        answer = self._answers[key]
        if answer.get("wrong"):
            return replace(row, status="wrong_result", reason=f"in a fresh process: {answer['wrong']}", summary=None)
        if answer.get("unknown"):
            return replace(row, remarks=(*row.remarks, f"not checked by a fresh process: {answer['unknown']}"))
        return row

    def _ask(self, row: Measurement, kernel: AnyKernel, backend: Backend) -> dict[str, str]:
        of, tensors = operation_called(row.operation), importlib.import_module("mamf.operations.isolated")
        if not of.gives_tensors:
            return {"unknown": f"results of {of.name} stay on the device"}
        pool = backend.operand_pool(row.problem.data, row.problem.seed)
        process, is_whole = self._process or _start(), False
        assert process.stdin and process.stdout
        try:
            channel = tensors.Channel(process.stdout, process.stdin)
            problem, shape = of.problem_record(row.problem), of.shape_record(row.shape)
            channel.send(operation=of.name, problem=problem, shape=shape, seconds=row.seconds)
            with kernel.settings(backend, row.problem):
                answer = dict(tensors.serve(channel, kernel, backend, row.problem, row.shape, pool))
            is_whole = True
            return answer
        except plugin_errors() as error:
            is_here = isinstance(error, (tensors.ChannelError, OSError)) or backend.is_out_of_memory(error)
            return {"unknown" if is_here else "wrong": describe_error(error)}
        finally:
            pool.release()
            if not is_whole:  # a message may have been cut, by Ctrl-C too
                process.kill()
            self._process = process if is_whole else None


def _start() -> subprocess.Popen[bytes]:
    """Start a process that checks. It ends with its input, not with Ctrl-C."""
    command = [sys.executable, "-c", "from mamf.operations.isolated import check; check()"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


_OF_DEVICES: weakref.WeakKeyDictionary[Backend, Isolation] = weakref.WeakKeyDictionary()


def isolation_of(backend: Backend) -> Isolation:
    """That of an opened device."""
    return _OF_DEVICES.setdefault(backend, Isolation())
