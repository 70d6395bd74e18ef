"""Processes that import nothing anew: copies of the one that runs the tests, as ranks, commands or their children."""

import faulthandler
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout

import numpy.random  # noqa: F401  (a search needs it: once for all of them)
from tqdm import tqdm

from mamf.cli import main, terminal

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
            # Processes share tqdm's lock with their copies. A copy that a signal ends while it holds the lock would
            # block this process forever, so give each copy a lock of its own.
            tqdm.set_lock(threading.RLock())
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


class _Process:
    """A copy of this process, waited for and told as subprocess.Popen does."""

    def __init__(self):
        self.returncode, self._polling = None, threading.Lock()

    def poll(self):
        with self._polling:
            if self.returncode is None:
                process, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if process else None
        return self.returncode

    def wait(self, timeout=LONGEST_SECONDS):
        last = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > last:
                raise subprocess.TimeoutExpired("mamf", timeout)
            time.sleep(0.002)
        return self.returncode

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


class Command(_Process):
    """``python -m mamf`` with these arguments, in a session of its own, watched as such a process is."""

    def __init__(self, arguments, folder=".", prepare=lambda: None, **environment):
        self.args = [sys.executable, "-m", "mamf", *arguments]
        pipes = os.pipe(), os.pipe()
        self.pid = _fork(lambda: _command(arguments, folder, [writing for _, writing in pipes], prepare), environment)
        for _, writing in pipes:
            os.close(writing)
        self._printed = [os.fdopen(reading, errors="replace") for reading, _ in pipes]
        super().__init__()

    def communicate(self, timeout=LONGEST_SECONDS):
        """All that was printed, until this process and those that it started have closed what they print to."""
        with ThreadPoolExecutor() as pool:
            printed = tuple(pool.map(_read, self._printed))
        self.wait(timeout)
        return printed


def _read(file):
    with file:
        return file.read()


def _command(arguments, folder, printed, prepare):
    os.setsid()
    os.chdir(folder)
    prepare()
    faulthandler.disable()
    # Of one Ctrl-C that arrives twice the second may come as the process ends, where Python's handler would raise.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number, file in enumerate([os.open(os.devnull, os.O_RDONLY), *printed]):
        os.dup2(file, number)
    sys.argv[1:] = arguments
    with open(1, "w", closefd=False) as out, open(2, "w", 1, closefd=False) as err:
        sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), out, err  # noqa: SIM115
        try:
            return main()
        except SystemExit as stop:
            return int(stop.code or 0)


class Child(_Process):
    """A command of mamf as subprocess.Popen would start it."""

    def __init__(self, command, environment):
        assert command[1:3] == ["-m", "mamf"]
        pipes, (listening, self._telling) = (os.pipe(), os.pipe()), os.pipe()

        def work():
            os.setsid()
            os.close(self._telling)
            terminal._REPORT_STREAMS.clear()  # the stdout of the process that starts it
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
        super().__init__()
