"""``mamf completion SHELL``: what a shell runs to complete command lines of mamf."""

from __future__ import annotations

import argparse

from argcomplete.shell_integration import shellcode

from mamf.cli.terminal import say_lines


def run(options: argparse.Namespace) -> int:
    say_lines(shellcode(["mamf"], shell=options.shell) + "\n")
    return 0
