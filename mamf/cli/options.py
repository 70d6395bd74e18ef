"""What the commands' options share: spellings, units and errors of one line."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from mamf.backend import Backend
from mamf.cli.terminal import say
from mamf.errors import UsageError
from mamf.limits import parse_digits, shorten
from mamf.operations.matmul.shapes import MatmulShape

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_INVALID_CHOICE = re.compile(r"invalid choice: '?([^' ]+)'? \(choose from (.*)\)")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh]?)")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, with the nearest known option, and exits with 2, or what a command has for it."""

    usage_exit_code = 2

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
        # What an option takes where it names no type, and where it names Path.
        self.register("type", None, filled)
        self.register("type", Path, path)
        # A value below zero is a value with a unit too, which its option judges: no option begins with a digit.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def parse_args(self, args: Sequence[str] | None = None, namespace: object = None) -> argparse.Namespace:  # type: ignore[override]
        options, unknown = self.parse_known_args(args)
        if unknown:
            parser: Parser = getattr(options, "parser", self)
            parser.error(f"unknown option {unknown[0]!r}{parser.nearest(unknown[0])}")
        return options

    def given(self, options: argparse.Namespace) -> set[str]:
        """The options that are given: whose values are not their defaults."""
        return {name for name, value in vars(options).items() if value != self.get_default(name)}

    def nearest(self, option: str) -> str:
        """A suggestion for a misspelt option, or nothing."""
        name = option.partition("=")[0]
        close = difflib.get_close_matches(name, self._option_string_actions, n=1)
        return f" (did you mean {close[0]}?)" if close else "; --help lists them"

    def error(self, message: str) -> NoReturn:
        say(f"{self.prog}: {message}{suggestion(message)}", sys.stderr)
        sys.exit(self.usage_exit_code)


def suggestion(message: str) -> str:
    """The nearest of the choices that argparse lists in its complaint, or nothing."""
    complaint = _INVALID_CHOICE.search(message)
    if complaint is None:
        return ""
    close = difflib.get_close_matches(complaint[1], re.findall(r"[\w.-]+", complaint[2]), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def with_dashes(arguments: Sequence[str]) -> list[str]:
    """``--m_range`` as ``--m-range``: mamf-finder's spelling of every option. Values stay as they are."""
    return [dashed(argument) if argument.startswith("--") else argument for argument in arguments]


def dashed(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def duration(text: str) -> float:
    """Seconds of ``90``, ``90s``, ``5m`` or ``1.5h``."""
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not a duration; write 90s, 5m or 1.5h")
    return seconds


def share(text: str) -> float:
    """A share of 1: ``0.3%`` or ``0.003``."""
    number = text.strip().removesuffix("%")
    try:
        value = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1; write 0.3% or 0.003")
    return value


def size(text: str) -> int:
    """A dimension or a count: at least 1."""
    if not text.isascii() or not text.isdigit() or _number(text) < 1:
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not a whole number of at least 1")
    return _number(text)


def bound(text: str) -> int:
    """A bound of a range, whose sizes are judged together."""
    if not text.isascii() or not text.removeprefix("-").isdigit():
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not a whole number")
    return -_number(text[1:]) if text.startswith("-") else _number(text)


def _number(digits: str) -> int:
    try:
        return parse_digits(digits)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def filled(text: str) -> str:
    """A name, or a path."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty")
    return text


def path(text: str) -> Path:
    return Path(filled(text))


def shape(text: str) -> MatmulShape:
    try:
        return MatmulShape.parse(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def index(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not a number from 0")
    return _number(text)


def row_count(text: str) -> int | None:
    """How many rows to show: a number, or ``all`` (None)."""
    return None if text == "all" else index(text)


def add_device_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("device")
    group.add_argument(
        "--backend", help="one of 'mamf backends', or package.module:Class (default: auto, the first accelerator)"
    )
    group.add_argument("--device", type=index, metavar="N", help="the Nth device of the backend (default: 0)")


def add_output_options(parser: argparse.ArgumentParser, formats: Sequence[str]) -> None:
    parser.add_argument(
        "--format", choices=formats, default="table", help="what is printed at the end (default: table)"
    )
    parser.add_argument(
        "--top",
        type=row_count,
        default=10,
        metavar="N",
        help="rows in a table, best first: a number or 'all' (default: 10)",
    )
    add_width_option(parser)


def add_width_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wide", action="store_true", help="all columns, however narrow the terminal")


def terminal_width(options: argparse.Namespace) -> int | None:
    """Columns of text that fit, None where all are to be shown: pipes and files take any width."""
    if getattr(options, "wide", True) or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def add_run_options(parser: argparse.ArgumentParser, budget: str) -> None:
    """Options of every measuring command; ``budget`` is what its help says."""
    group = parser.add_argument_group("run")
    group.add_argument("--budget", type=duration, help=budget)
    group.add_argument("--dry-run", action="store_true", help="say what would be measured and how long, and stop")
    group.add_argument("--output", type=Path, metavar="FILE", help="the run log to write (default: a dated name)")
    group.add_argument("--resume", type=Path, metavar="FILE", help="go on with this log, measuring only what it lacks")
    group.add_argument(
        "--notes", type=str, default="", help="free text for the log: cooling, machine, what was special"
    )


def say_memory(needed: int, of: str, backend: Backend) -> None:
    """Of a dry run. ``needed``: bytes."""
    free = backend.free_memory()
    say(f"memory: {needed / 1e9:.3g} GB for {of}" + (f", of {free / 1e9:.1f} GB free" if free else ""))
    if free and needed > free:
        say("        which will be out_of_memory; what is smaller is measured")
