"""Third-party kernels and a device that end the process, for tests that run mamf in processes of their own."""

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import ClassVar

from mamf.testing import SimulatedBackend, SimulatedMatmul


class Crashing(SimulatedMatmul):
    """Does at some sizes of M what ``ENDS`` says; all launches are noted in the file ``launches``."""

    name = "crashing.mm"
    ENDS: ClassVar[dict] = {
        512: lambda: os.kill(os.getpid(), signal.SIGSEGV),
        768: os.abort,
        1280: lambda: ctypes.string_at(0),
        1344: lambda: os.kill(os.getpid(), signal.SIGKILL),
        1536: lambda: (Path("log.jsonl").unlink(), os.kill(os.getpid(), signal.SIGSEGV)),
        1792: lambda: (Path("mine").write_text("mine"), Path("mine").replace("log.jsonl")),
    }

    def make_launch_function(self, device, problem, shape):
        run, end = super().make_launch_function(device, problem, shape), self.ENDS.get(shape.m)

        def launch(key):
            with Path("launches").open("a") as file:
                file.write(f"{shape.m}\n")
            if end:
                end()
            run(key)

        return launch


class CrashingOnce(SimulatedMatmul):
    """At its first launch after a log of bfloat16 exists."""

    name = "crashing-once.mm"

    def make_launch_function(self, device, problem, shape):
        run, mark = super().make_launch_function(device, problem, shape), Path("crashed")

        def launch(key):
            if Path("log-bfloat16.jsonl").exists() and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGSEGV)
            run(key)

        return launch


def wait_for_signal():
    """signal.pause would wait forever for a signal that arrives just before it."""
    while True:
        time.sleep(0.01)


def be_aborted_by_signal():
    try:
        os.kill(os.getppid(), signal.SIGINT)
        wait_for_signal()
    except KeyboardInterrupt:
        os.abort()


class Waiting(Crashing):
    """Waits at one size for a signal, once."""

    ENDS: ClassVar[dict] = {512: lambda: Path("waits").exists() or (Path("waits").touch(), wait_for_signal())}


class AbortedBySignal(Crashing):
    """Crashes as a library may that a signal interrupts."""

    ENDS: ClassVar[dict] = {512: be_aborted_by_signal}


class Lost(SimulatedBackend):
    """Is lost with the first launch of some matmuls, for as long as the process lives."""

    is_lost = False

    def multiply_or_lose(self, m):
        self.is_lost = self.is_lost or m == 512
        self.synchronize()

    def synchronize(self):
        if self.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        super().synchronize()


class Losing(SimulatedMatmul):
    name = "losing.mm"

    def make_launch_function(self, device, problem, shape):
        run = super().make_launch_function(device, problem, shape)
        return lambda key: (device.multiply_or_lose(shape.m), run(key))


class FaultyLibrary(SimulatedMatmul):
    """Crashes when it is asked what it supports."""

    def explain_unsupported_problem(self, backend, problem):
        os.kill(os.getpid(), signal.SIGSEGV)


class Leaving(Crashing):
    """Ends its process at some sizes with an exit code, printing before that in every way there is."""

    @staticmethod
    def leave(code):
        print("printed", flush=True)
        os.write(1, b"written\n")
        ctypes.CDLL(None).puts(b"put")
        ctypes.CDLL(None).fflush(None)
        os._exit(code)

    ENDS: ClassVar[dict] = {512: lambda: Leaving.leave(0), 768: lambda: Leaving.leave(7), 1280: lambda: os._exit(255)}


class LeavingLibrary(SimulatedMatmul):
    """Whose library ends the process when it is asked for."""

    def __init__(self):
        os._exit(0)
