"""What a shell asks while a command line is typed: the words that may follow, with kernels, backends and dtypes."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import entry_points

import argcomplete

from mamf.dtypes import DTYPES

#: The values of options whose names are open to plugins.
_VALUES: dict[str, Callable[[], Iterable[str]]] = {
    "--kernel": lambda: _names("kernels"),
    "--backend": lambda: _names("backends"),
    "--dtype": lambda: DTYPES,
}


def complete(parser_of: Callable[[Sequence[str]], argparse.ArgumentParser]) -> None:
    """Print what may follow the words that the shell passes, and end the process."""
    parser = parser_of(os.environ.get("COMP_LINE", "").split()[1:])
    subparsers = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    commands = itertools.chain.from_iterable(each.choices.values() for each in subparsers)
    for action in itertools.chain.from_iterable(command._actions for command in commands):
        for option in _VALUES.keys() & action.option_strings:
            values = sorted(_VALUES[option]())
            action.completer = lambda values=values, **_: values  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser, always_complete_options="long")


def _names(of: str) -> list[str]:
    """Return the names that are registered in the groups of mamf that end so."""
    points = entry_points()
    groups = (group for group in points.groups if group.startswith("mamf.") and group.endswith(of))
    return sorted({point.name for group in groups for point in points.select(group=group)})
