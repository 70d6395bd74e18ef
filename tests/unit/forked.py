"""Processes that import nothing anew: copies of the one that runs the tests, as ranks or as a command's children."""

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from contextlib import redirect_stderr, redirect_stdout

import numpy.random  # noqa: F401  (a search needs it: once for all of them)

from mamf.cli import main

#: No test waits longer for what hangs.
LONGEST_SECONDS = 100


def forked(of_rank, environments):
    """What ``of_rank(rank)`` returns in each process, as JSON has it; None of one that ended without."""
    running = []
    for rank, environment in enumerate(environments):
        reading, writing = os.pipe()

        def work(rank=rank, writing=writing):
            answer = json.dumps(of_rank(rank)).encode()
            os.write(writing, answer)
            return 0

        process = _fork(work, environment)
        os.close(writing)
        running.append((process, reading))
    found = []
    for process, reading in running:
        with os.fdopen(reading) as answer:
            text = answer.read()
        os.waitpid(process, 0)
        found.append(json.loads(text) if text else None)
    return found


def _fork(work, environment):
    """The process's id."""
    sys.stdout.flush()
    parent, code = os.getpid(), 1
    try:
        if process := os.fork():
            return process
        try:
            signal.alarm(LONGEST_SECONDS)
            os.environ.update(environment)
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):  # noqa: PTH123
                code = int(work())
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)
    finally:
        # An interrupt may come at any moment, and no copy may go on with the tests.
        if os.getpid() != parent:
            os._exit(code)


class Child:
    """A command of mamf as subprocess.Popen would start it."""

    def __init__(self, command, environment):
        assert command[1:3] == ["-m", "mamf"]
        pipes, (listening, self._telling) = (os.pipe(), os.pipe()), os.pipe()

        def work():
            os.setsid()
            os.close(self._telling)
            sys.stdin = open(listening)  # noqa: PTH123, SIM115
            out, err = (open(writing, "w", buffering=1) for _, writing in pipes)  # noqa: PTH123, SIM115
            with redirect_stdout(out), redirect_stderr(err):
                return main(command[3:])

        self.pid = _fork(work, environment)
        for _, writing in pipes:
            os.close(writing)
        os.close(listening)
        self.stdin = os.fdopen(self._telling, "w")
        self.stdout, self.stderr = (os.fdopen(reading) for reading, _ in pipes)
        self._code, self._polling = None, threading.Lock()

    def poll(self):
        with self._polling:
            if self._code is None:
                process, status = os.waitpid(self.pid, os.WNOHANG)
                self._code = os.waitstatus_to_exitcode(status) if process else None
        return self._code

    def wait(self, timeout=LONGEST_SECONDS):
        import time

        for _ in range(int(timeout * 100) + 1):
            if self.poll() is not None:
                return self._code
            time.sleep(0.01)
        raise subprocess.TimeoutExpired("mamf", timeout)

    def kill(self):
        self._signal(signal.SIGKILL)

    def terminate(self):
        self._signal(signal.SIGTERM)

    def _signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)
