"""Define kernels and a device that crash or end the process, for tests that run mamf in separate processes."""

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import ClassVar

from mamf.testing import SimulatedBackend, SimulatedMatmul


class Crashing(SimulatedMatmul):
    """A kernel that calls the function in ``CALLS_BY_M`` for M before each launch. Most of these functions kill the
    process; some delete or replace the log. Each launch adds a line with M to the file ``launches``.
    """

    name = "crashing.mm"
    CALLS_BY_M: ClassVar[dict] = {
        512: lambda: os.kill(os.getpid(), signal.SIGSEGV),
        768: os.abort,
        1280: lambda: ctypes.string_at(0),
        1344: lambda: os.kill(os.getpid(), signal.SIGKILL),
        1536: lambda: (Path("log.jsonl").unlink(), os.kill(os.getpid(), signal.SIGSEGV)),
        1792: lambda: (Path("mine").write_text("mine"), Path("mine").replace("log.jsonl")),
    }

    def make_launch_function(self, device, problem, shape):
        run, call = super().make_launch_function(device, problem, shape), self.CALLS_BY_M.get(shape.m)

        def launch(key):
            with Path("launches").open("a") as file:
                file.write(f"{shape.m}\n")
            if call:
                call()
            run(key)

        return launch


class CrashingOnce(SimulatedMatmul):
    """A kernel that crashes once: at its first launch after ``log-bfloat16.jsonl`` exists."""

    name = "crashing-once.mm"

    def make_launch_function(self, device, problem, shape):
        run, crash_mark = super().make_launch_function(device, problem, shape), Path("crashed")

        def launch(key):
            if Path("log-bfloat16.jsonl").exists() and not crash_mark.exists():
                crash_mark.touch()
                os.kill(os.getpid(), signal.SIGSEGV)
            run(key)

        return launch


def wait_for_signal():
    """Wait for a signal. signal.pause would wait forever if the signal arrived just before the call."""
    while True:
        time.sleep(0.01)


def abort_on_signal():
    """Send SIGINT to the parent process, and abort when the parent passes the signal on."""
    try:
        os.kill(os.getppid(), signal.SIGINT)
        wait_for_signal()
    except KeyboardInterrupt:
        os.abort()


class Waiting(Crashing):
    """A kernel that waits for a signal at its first launch with M = 512."""

    CALLS_BY_M: ClassVar[dict] = {512: lambda: Path("waits").exists() or (Path("waits").touch(), wait_for_signal())}


class AbortedBySignal(Crashing):
    """A kernel that aborts when a signal interrupts it, as some libraries do."""

    CALLS_BY_M: ClassVar[dict] = {512: abort_on_signal}


class Lost(SimulatedBackend):
    """A device that becomes unusable at the first launch with M = 512, and stays unusable until the process ends."""

    is_lost = False

    def multiply_or_lose(self, m):
        self.is_lost = self.is_lost or m == 512
        self.synchronize()

    def synchronize(self):
        if self.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        super().synchronize()


class Losing(SimulatedMatmul):
    """A kernel for the device ``Lost``."""

    name = "losing.mm"

    def make_launch_function(self, device, problem, shape):
        run = super().make_launch_function(device, problem, shape)
        return lambda key: (device.multiply_or_lose(shape.m), run(key))


class FaultyLibrary(SimulatedMatmul):
    """A kernel that crashes when mamf asks whether it supports a problem."""

    def explain_unsupported_problem(self, backend, problem):
        os.kill(os.getpid(), signal.SIGSEGV)


class Leaving(Crashing):
    """A kernel that ends the process with an exit code at some sizes of M. At two of them, it first prints from Python,
    to a file descriptor, and from C.
    """

    @staticmethod
    def leave(code):
        print("printed", flush=True)
        os.write(1, b"written\n")
        ctypes.CDLL(None).puts(b"put")
        ctypes.CDLL(None).fflush(None)
        os._exit(code)

    CALLS_BY_M: ClassVar[dict] = {
        512: lambda: Leaving.leave(0),
        768: lambda: Leaving.leave(7),
        1280: lambda: os._exit(255),
    }


class LeavingLibrary(SimulatedMatmul):
    """A kernel that ends the process when mamf creates it, as a library may when it is imported."""

    def __init__(self):
        os._exit(0)
