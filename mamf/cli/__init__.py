"""The command line: one file a command. Each parses, calls the core, prints. Nothing here imports torch."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import keyword
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mamf.cli.interruption import EXIT_CODE
from mamf.cli.options import Parser, with_dashes
from mamf.cli.terminal import say, warn
from mamf.errors import MamfError, MamfWarning, UsageError
from mamf.limits import shorten

_DESCRIPTION = "Finds the maximum achievable matmul FLOPS of an accelerator. Every number names its regime."
COMMANDS = {
    "find": "find the ceilings of the device, burst and sustained, of matmul or any --operation, in about a minute",
    "sweep": "measure shapes of matmul, or kernels of any --operation, and find the best",
    "attention": "measure attention kernels as shares of the device's matmul ceiling",
    "bandwidth": "measure how fast memory is copied, read and written",
    "node": "measure all devices of this machine, or of many, at once: is one of them slow, wrong or gone?",
    "run": "launch one kernel once, verified, for a profiler, sanitizer or debugger to look at",
    "counters": "read hardware counters of kernels by ncu: cycles, what bounds them, beside their unprofiled rate",
    "profile": "run a script unchanged and tell where its step goes, by class, as shares of the ceiling",
    "roofline": "measure or take ceilings of computing and bandwidth, and place rows under the roof that they make",
    "explain": "tell where the datasheet's FLOPS went: units, clock, kernel, data, power, step by step",
    "peak": "print how fast the device multiplies, as measured, contributed or promised, and which",
    "model": "measure steps of language models: forward, backward, optimizer, with any attention kernel",
    "autoprofile": "ceilings, kernels and a model's step into one folder, with a SUMMARY.md that says what they mean",
    "show": "print a run log again, in any format",
    "compare": "compare two run logs: what got faster, what slower, what cannot be told",
    "guard": "measure what a file names and fail if it got slower than its baseline: for CI",
    "plot": "draw a run log: TFLOPS and time, with the ceiling",
    "results": "check run logs, submit one to results/, write the table of all",
    "import": "turn logs of mamf-finder, of any version, into run logs (tier legacy)",
    "kernels": "list the kernels: available here, or why not",
    "backends": "list the backends: their devices, or why they have none",
    "doctor": "check the machine: what costs performance, and the command that mends it",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code: 0, 1 (not finished), 2 (bad input), 3 (a regression), 130 (interrupted)."""
    if sys.stderr is None:  # closed: print would turn to stdout
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  (to the end of the process)
    if sys.stdout is None:
        warn("stdout is closed, so nothing could be shown: send it to a file, or to /dev/null")
        return MamfError.exit_code
    with _warnings_told():
        code = _run(sys.argv[1:] if arguments is None else arguments)
    if code == EXIT_CODE and arguments is None:
        # An interrupt that passed through an import leaves Python set to end by the signal instead of this code.
        sys.stdout.flush()
        os._exit(code)
    return code


def _run(typed: Sequence[str]) -> int:
    try:
        code = call(typed)
        sys.stdout.flush()
        return code
    except MamfError as error:
        warn(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_CODE
    except BrokenPipeError:  # the reader of a pipe has seen enough
        _discard_output()
        return 0
    except OSError as error:
        if error.filename is not None:
            warn(f"{shorten(os.fspath(error.filename))}: {error.strerror}")
            return MamfError.exit_code
        _discard_output()
        warn(f"cannot write the output: {error.strerror or error}")
        return 1


def call(typed: Sequence[str]) -> int:
    """Run a command, for another that is made of several; returns its exit code. Raises what it raises."""
    if wrong := next((word for word in typed if "\0" in word), None):
        raise UsageError(f"{shorten(wrong)} holds a null byte, which no name of a file can")
    given = with_dashes(typed)
    options = _parser(given).parse_args(given)
    options.typed, options.given = typed, getattr(options, "parser", Parser()).given(options)
    return int(options.run(options))


def _discard_output() -> None:
    """Python flushes stdout once more at exit, and would complain again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _warnings_told() -> Iterator[None]:
    """What mamf warns of is said in a line, once; what others warn of, as usual."""
    told: set[str] = set()

    def tell(message: Warning | str, category: type[Warning], *place: Any, **keywords: Any) -> None:
        if not issubclass(category, MamfWarning):
            usual(message, category, *place, **keywords)
        elif str(message) not in told:
            told.add(str(message))
            warn(str(message))

    with warnings.catch_warnings():
        usual = warnings.showwarning
        warnings.simplefilter("always", MamfWarning)
        warnings.showwarning = tell
        yield


def _parser(given: Sequence[str]) -> Parser:
    """All commands by name and line, or the one that comes first; only the one asked for is loaded, so that help comes
    at once.
    """
    parser = Parser(prog="mamf", description=_DESCRIPTION)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and stop")
    # Not required by argparse, which would name it missing before an option that is misspelt.
    parser.set_defaults(run=lambda options: parser.error("name a COMMAND; --help lists them"))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    commands.type = str  # what follows a command is its own parser's to judge
    first = given[0] if given else ""
    for name, line in {first: COMMANDS[first]}.items() if first in COMMANDS else COMMANDS.items():
        command = commands.add_parser(name, help=line, description=line)
        if name in given:
            importlib.import_module(f"mamf.cli.{_module_of(name, given)}").configure(command)
    return parser


def _module_of(command: str, given: Sequence[str]) -> str:
    """The file of a command: what the options of sweep and find are is decided by what they are of."""
    if command in ("sweep", "find") and _operation_of(given) not in (None, "matmul"):
        return f"kernels_{command}"
    return f"{command}_" if keyword.iskeyword(command) else command


def _operation_of(given: Sequence[str]) -> str | None:
    """The value of --operation, before there is a parser that knows it."""
    for option, value in zip(given, [*given[1:], ""], strict=True):
        name, equals, joined = option.partition("=")
        if name == "--operation":
            return joined if equals else value
    return None


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *arguments: object) -> None:
        from mamf.machine.environment import package_version

        say(f"mamf {package_version('mamf')}")
        parser.exit()
