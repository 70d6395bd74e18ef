"""Runs the vendor's profiler, which starts ``mamf run`` in a separate process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from mamf.errors import UnavailableError
from mamf.profiling.counters.ncu import WITHOUT_COUNTERS

# How long a profiler may take to end once it is asked to.
_SECONDS_TO_END = 5.0


class Output(NamedTuple):
    stdout: str
    stderr: str


def found_ncu(named: str | None) -> str:
    """The path of ncu. Raises UnavailableError if there is no ncu."""
    path = shutil.which(named or "ncu")
    if path is None:
        what = f"{named} is not an executable program" if named else "ncu, which reads the counters, is not on PATH"
        raise UnavailableError(
            f"{what}: install NVIDIA Nsight Compute (it comes with the CUDA toolkit), or name it by --ncu; "
            f"{WITHOUT_COUNTERS}"
        )
    return path


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
    """The process and its session."""
    for number in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, number)
            else:
                process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_END)
            return
