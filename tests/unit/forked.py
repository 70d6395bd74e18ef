"""Fork the test process to get ranks, mamf commands, and the processes that mamf commands start.

A fork starts faster than a new process, because it imports nothing again.
"""

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

import numpy.random  # noqa: F401  (searches need it: import it here, and not in every forked process)
from tqdm import tqdm

from mamf.cli import main, terminal

#: Time limit for each process that a test starts, so that a process that hangs fails its test.
LONGEST_SECONDS = 100


def forked(run_rank, environments):
    """Call ``run_rank(rank)`` in one process for each of ``environments``. Return the results.

    The results pass through JSON. The result of a process that ended without returning one is None.
    """
    running = []
    for rank, environment in enumerate(environments):
        read_end, write_end = os.pipe()

        def work(rank=rank, write_end=write_end):
            os.write(write_end, json.dumps(run_rank(rank)).encode())
            return 0

        process_id = _fork(work, environment)
        os.close(write_end)
        running.append((process_id, read_end))
    results = []
    for process_id, read_end in running:
        with os.fdopen(read_end) as result_file:
            text = result_file.read()
        os.waitpid(process_id, 0)
        results.append(json.loads(text) if text else None)
    return results


def _fork(work, environment):
    """Run ``work`` in a copy of this process with additional environment variables. Return its process ID."""
    sys.stdout.flush()
    parent_id, code = os.getpid(), 1
    try:
        if process_id := os.fork():
            return process_id
        try:
            signal.alarm(LONGEST_SECONDS)
            # A copy shares tqdm's lock with this process. If a signal ended the copy while it holds the lock, this
            # process would wait for the lock forever. So give each copy a separate lock.
            tqdm.set_lock(threading.RLock())
            os.environ.update(environment)
            with open(os.devnull, "w") as devnull, redirect_stdout(devnull), redirect_stderr(devnull):  # noqa: PTH123
                code = int(work())
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)
    finally:
        # An interrupt may arrive at any point above. Even then, the copy must not return and continue the tests.
        if os.getpid() != parent_id:
            os._exit(code)


class _Process:
    """A copy of this process with methods of subprocess.Popen: poll, wait, kill, terminate and send_signal."""

    def __init__(self):
        self.returncode, self._poll_lock = None, threading.Lock()

    def poll(self):
        with self._poll_lock:
            if self.returncode is None:
                process_id, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if process_id else None
        return self.returncode

    def wait(self, timeout=LONGEST_SECONDS):
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("mamf", timeout)
            time.sleep(0.002)
        return self.returncode

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def send_signal(self, signal_number):
        if self.poll() is None:
            os.kill(self.pid, signal_number)


class Command(_Process):
    """A copy of this process that does the same as ``python -m mamf`` with these arguments, in a separate session.

    As for a real command, a second process watches the run. ``prepare``: a function that the copy calls before the
    command. ``environment``: additional environment variables.
    """

    def __init__(self, arguments, folder=".", prepare=lambda: None, **environment):
        self.args = [sys.executable, "-m", "mamf", *arguments]
        pipes = os.pipe(), os.pipe()
        self.pid = _fork(
            lambda: _run_command(arguments, folder, [write_end for _, write_end in pipes], prepare), environment
        )
        for _, write_end in pipes:
            os.close(write_end)
        self._output_files = [os.fdopen(read_end, errors="replace") for read_end, _ in pipes]
        super().__init__()

    def communicate(self, timeout=LONGEST_SECONDS):
        """Return the output to stdout and stderr. Wait until the command and its child processes have closed both."""
        with ThreadPoolExecutor() as pool:
            printed = tuple(pool.map(_read_and_close, self._output_files))
        self.wait(timeout)
        return printed


def _read_and_close(file):
    with file:
        return file.read()


def _run_command(arguments, folder, output_pipes, prepare):
    os.setsid()
    os.chdir(folder)
    prepare()
    faulthandler.disable()
    # Ctrl-C may arrive twice, the second time while the process ends. Python's default handler would then raise a
    # KeyboardInterrupt, so do not use it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for descriptor, file in enumerate([os.open(os.devnull, os.O_RDONLY), *output_pipes]):
        os.dup2(file, descriptor)
    sys.argv[1:] = arguments
    with open(1, "w", closefd=False) as out, open(2, "w", 1, closefd=False) as err:
        sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), out, err  # noqa: SIM115
        try:
            return main()
        except SystemExit as stop:
            return int(stop.code or 0)


class Child(_Process):
    """A copy of this process that runs a command of mamf, as a substitute for subprocess.Popen.

    ``command``: the interpreter, ``-m``, ``mamf`` and the arguments. ``environment``: additional environment variables.
    """

    def __init__(self, command, environment):
        assert command[1:3] == ["-m", "mamf"]
        pipes, (stdin_read_end, stdin_write_end) = (os.pipe(), os.pipe()), os.pipe()

        def work():
            os.setsid()
            os.close(stdin_write_end)
            terminal._REPORT_STREAMS.clear()  # it contains the stdout of the parent process
            sys.stdin = open(stdin_read_end)  # noqa: PTH123, SIM115
            out, err = (open(write_end, "w", buffering=1) for _, write_end in pipes)  # noqa: PTH123, SIM115
            with redirect_stdout(out), redirect_stderr(err):
                return main(command[3:])

        self.pid = _fork(work, environment)
        for _, write_end in pipes:
            os.close(write_end)
        os.close(stdin_read_end)
        self.stdin = os.fdopen(stdin_write_end, "w")
        self.stdout, self.stderr = (os.fdopen(read_end) for read_end, _ in pipes)
        super().__init__()
