"""Run the child processes of a supervisor as function calls in this process, one after another.

Each child opens its own simulated device, so each measures in its own virtual time.
"""

import io
from contextlib import redirect_stderr, redirect_stdout

from mamf.cli import main


class InlineChild:
    """A stand-in for a child process: its constructor runs the mamf command in this process.

    ``killed_devices``: the indices of devices whose command does not run. The exit code is then -9, as if the child had
    been killed.
    """

    killed_devices: tuple = ()

    def __init__(self, command, environment):
        assert command[1:3] == ["-m", "mamf"]
        self.stdin, self.stdout, self.stderr, self.returncode = io.StringIO(), io.StringIO(), io.StringIO(), -9
        killed_logs = {f"device{device}.jsonl" for device in self.killed_devices}
        if not killed_logs & {word.rpartition("/")[2] for word in command}:
            with redirect_stdout(self.stdout), redirect_stderr(self.stderr):
                self.returncode = main(command[3:])
        self.stdout.seek(0)
        self.stderr.seek(0)

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        return self.returncode


def install(patch, killed_devices=()):
    patch.setattr(
        "mamf.node.children.start_child", type("KillableChild", (InlineChild,), {"killed_devices": killed_devices})
    )
    patch.setattr("mamf.cli.devices._end_run_when_parent_ends", lambda: None)
