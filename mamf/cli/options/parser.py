"""A parser that reports an error in one line, with the nearest name that it knows."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from mamf.cli.options.values import filled, path
from mamf.cli.terminal import say

_INVALID_CHOICE = re.compile(r"invalid choice: '?([^' ]+)'? \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, suggests the nearest known option, and exits with ``usage_exit_code``."""

    usage_exit_code = 2

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
        # The types of options that name no type, and of those that name Path.
        self.register("type", None, filled)
        self.register("type", Path, path)
        # A negative value may have a unit, which its option checks: no option begins with a digit.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def parse_args(self, args: Sequence[str] | None = None, namespace: object = None) -> argparse.Namespace:  # type: ignore[override]
        options, unknown = self.parse_known_args(args)
        if unknown:
            parser: Parser = getattr(options, "parser", self)
            parser.error(f"unknown option {unknown[0]!r}{parser.nearest(unknown[0])}")
        return options

    def given(self, options: argparse.Namespace) -> set[str]:
        """The names of options whose values differ from their defaults."""
        return {name for name, value in vars(options).items() if value != self.get_default(name)}

    def nearest(self, option: str) -> str:
        """A suggestion for a misspelled option, or a pointer to --help."""
        name = option.partition("=")[0]
        close = difflib.get_close_matches(name, self._option_string_actions, n=1)
        return f" (did you mean {close[0]}?)" if close else "; --help lists them"

    def error(self, message: str) -> NoReturn:
        say(f"{self.prog}: {message}{suggestion(message)}", sys.stderr)
        sys.exit(self.usage_exit_code)


def suggestion(message: str) -> str:
    """The nearest of the choices that argparse lists in its message, or an empty text."""
    complaint = _INVALID_CHOICE.search(message)
    if complaint is None:
        return ""
    close = difflib.get_close_matches(complaint[1], re.findall(r"[\w.-]+", complaint[2]), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def with_dashes(arguments: Sequence[str]) -> list[str]:
    """``--m_range`` as ``--m-range``, because mamf-finder spells options with underscores. Values stay as they are."""
    return [dashed(argument) if argument.startswith("--") else argument for argument in arguments]


def dashed(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value
