"""Check a kernel's results and speed from a process that never imports the kernel.

A kernel can cheat: in the process that measures the kernel, it can replace functions of torch and mamf, such as the
clock or the function that verifies results. To detect that, a fresh process generates random operands, lets the
measuring process launch the kernel on them, verifies the results on the CPU, and times the launches with its own clock.
mamf does this for kernels that were loaded by path, and with ``--isolate`` for all kernels.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import weakref
from dataclasses import dataclass, field, replace

from mamf.backend import Backend
from mamf.errors import describe_error, get_catchable_plugin_errors
from mamf.kernel import AnyKernel
from mamf.machine.environment import is_machine_busy
from mamf.measurement import Measurement
from mamf.operations.unknown import get_operation
from mamf.plugins.discovery import is_loaded_by_path


@dataclass
class IsolatedChecker:
    """A checker that lets a fresh process verify the kernels of one device. It starts one process for all checks, and
    keeps the answer to each check.

    ``checks_all_kernels``: True to check every kernel, False to check none, None to check kernels loaded by path.
    """

    checks_all_kernels: bool | None = None
    _checking_process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _answers_by_kernel_and_shape: dict[object, dict[str, str]] = field(default_factory=dict, init=False)

    def confirm_row_in_fresh_process(self, row: Measurement, kernel: AnyKernel, backend: Backend) -> Measurement:
        """Check the row's kernel on the row's shape in a fresh process, and return the row. If the same kernel, problem
        and shape were checked before, use the earlier answer.

        If the kernel gave a wrong result, or was slower than in the row, the returned row has the status
        ``wrong_result``. If the fresh process could not check the kernel, the returned row has a remark.
        """
        must_check = is_loaded_by_path(kernel) if self.checks_all_kernels is None else self.checks_all_kernels
        if not (row.ok and must_check and backend.uses_torch_tensors):
            return row
        key = (row.kernel, row.problem, row.shape)
        if key not in self._answers_by_kernel_and_shape:
            self._answers_by_kernel_and_shape[key] = self._request_check(row, kernel, backend)
        answer = self._answers_by_kernel_and_shape[key]
        if answer.get("wrong"):
            return replace(
                row, status="wrong_result", reason=f"a check in a fresh process failed: {answer['wrong']}", summary=None
            )
        if answer.get("unknown"):
            return replace(
                row, remarks=(*row.remarks, f"a fresh process could not check this kernel: {answer['unknown']}")
            )
        return row

    def _request_check(self, row: Measurement, kernel: AnyKernel, backend: Backend) -> dict[str, str]:
        operation, tensors = get_operation(row.operation), importlib.import_module("mamf.operations.isolated")
        if not operation.returns_tensors:
            return {"unknown": f"launches of {operation.name} return no tensors to check"}
        pool = backend.make_operand_pool(row.problem.data, row.problem.seed)
        process, is_whole = self._checking_process or _start_checking_process(), False
        assert process.stdin and process.stdout
        try:
            channel = tensors.Channel(process.stdout, process.stdin)
            problem, shape = operation.make_problem_record(row.problem), operation.make_shape_record(row.shape)
            channel.send(operation=operation.name, problem=problem, shape=shape, seconds=row.seconds)
            with kernel.apply_settings(backend, row.problem):
                answer = dict(tensors.serve_launches(channel, kernel, backend, row.problem, row.shape, pool))
            is_whole = True
            if "slow" not in answer:
                return answer
            if is_machine_busy(backend):
                return {"unknown": f"{answer['slow']}, because other work uses the machine"}
            return {"wrong": answer["slow"]}
        except get_catchable_plugin_errors() as error:
            is_here = isinstance(error, (tensors.ChannelError, OSError)) or backend.is_out_of_memory(error)
            return {"unknown" if is_here else "wrong": describe_error(error)}
        finally:
            pool.release_buffers()
            # If no complete answer arrived (for example, after Ctrl-C), kill the process. Its pipe may contain part of
            # an answer, which the next check would read.
            if not is_whole:
                process.kill()
            self._checking_process = process if is_whole else None


def _start_checking_process() -> subprocess.Popen[bytes]:
    """Start a process that checks kernels on request. The process ends when its stdin closes. It has its own session,
    so that Ctrl-C does not reach it.
    """
    return subprocess.Popen(
        [sys.executable, "-c", "from mamf.operations.isolated import serve_check_requests; serve_check_requests()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


_CHECKER_BY_BACKEND: weakref.WeakKeyDictionary[Backend, IsolatedChecker] = weakref.WeakKeyDictionary()


def get_isolated_checker(backend: Backend) -> IsolatedChecker:
    """Return the checker of an opened device. Create the checker on first use."""
    return _CHECKER_BY_BACKEND.setdefault(backend, IsolatedChecker())
