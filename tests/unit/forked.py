"""Ranks as processes of their own that import nothing anew: copies of the one that runs the tests."""

import json
import os
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

#: No test waits longer for what hangs.
LONGEST_SECONDS = 60


def forked(of_rank, environments):
    """What ``of_rank(rank)`` returns in each process, as JSON has it; None of one that ended without."""
    sys.stdout.flush()
    running = [_start(of_rank, rank, each) for rank, each in enumerate(environments)]
    found = []
    for process, pipe in running:
        with os.fdopen(pipe) as answer:
            text = answer.read()
        os.waitpid(process, 0)
        found.append(json.loads(text) if text else None)
    return found


def _start(of_rank, rank, environment):
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return process, reading
    try:
        import faulthandler

        faulthandler.dump_traceback_later(LONGEST_SECONDS, exit=True)
        os.close(reading)
        os.environ.update(environment)
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            answer = of_rank(rank)
        os.write(writing, json.dumps(answer).encode())
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(0)
