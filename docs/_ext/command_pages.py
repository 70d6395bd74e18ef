"""Writes a page for each command into docs/commands, from the parser that runs it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from sphinx.application import Sphinx

from mamf import cli

#: Commands whose options depend on the operation, with one that stands for all but matmul.
_OF_OPERATIONS = {"sweep": "bandwidth", "find": "bandwidth"}
_MARKUP = re.compile(r"([\\*`|_<>])")
_INDEX = """Commands
========

``mamf COMMAND --help`` prints these pages in a terminal.

{groups}
A command ends with exit code 0, with 1 if it could not finish, with 2 for wrong input, with 3 if it found a
regression, and with 130 after Ctrl-C. The exit code of :doc:`node` is its verdict.

.. toctree::
   :hidden:

{pages}
"""


def write_pages(app: Sphinx) -> None:
    """Pages that did not change are left alone, so that Sphinx does not build them again."""
    folder = Path(app.srcdir) / "commands"
    folder.mkdir(exist_ok=True)
    pages = {"index.rst": index(), **{f"{name}.rst": page(name) for name in cli.COMMAND_DESCRIPTIONS}}
    for stale in {path.name for path in folder.iterdir()} - pages.keys():
        (folder / stale).unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def index() -> str:
    groups = cli.COMMANDS_BY_HEADING
    lines = []
    for title, names in groups.items():
        lines += [f"**{title}**", ""] if title else []
        lines += [*(f"- :doc:`{name}`: {_escaped(cli.COMMAND_DESCRIPTIONS[name])}" for name in names), ""]
    return _INDEX.format(groups="\n".join(lines), pages="\n".join(f"   {name}" for name in cli.COMMAND_DESCRIPTIONS))


def page(name: str) -> str:
    lines = [*_heading(f"mamf {name}", "="), *_parser(_command(name))]
    if name in _OF_OPERATIONS:
        lines += _heading(f"mamf {name} --operation NAME", "-")
        lines += _parser(_command(name, "--operation", _OF_OPERATIONS[name]), f"mamf {name} operation")
    return "\n".join(lines).rstrip() + "\n"


def _command(name: str, *given: str) -> argparse.ArgumentParser:
    return _subparsers(cli._build_parser([name, *given]))[name]


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of commands or of actions by name; their help becomes their description."""
    for each in parser._actions:
        if isinstance(each, argparse._SubParsersAction):
            for choice in each._choices_actions:
                each.choices[choice.dest].description = choice.help
            return dict(each.choices)
    return {}


def _parser(parser: argparse.ArgumentParser, program: str = "") -> Iterator[str]:
    """What it does, examples, then the options by group, then the actions of the command."""
    yield from (_sentence(parser.description or ""), "")
    if parser.epilog:
        yield from ("::", "", *(f"   {line}" for line in parser.epilog.rstrip().splitlines()), "")
    yield from (f".. program:: {program or parser.prog}", "")
    for group in parser._action_groups:
        options = [each for each in group._group_actions if _is_shown(each)]
        if options:
            yield from (f".. rubric:: {_escaped(group.title or '').removeprefix('positional ').capitalize()}", "")
            yield from (_sentence(group.description), "") if group.description else ()
            yield from (line for each in options for line in _option(parser, each))
    for name, action in _subparsers(parser).items():
        yield from _heading(f"{parser.prog} {name}", "-")
        yield from _parser(action)


def _is_shown(option: argparse.Action) -> bool:
    hidden = (argparse._HelpAction, argparse._SubParsersAction)
    return option.help is not argparse.SUPPRESS and not isinstance(option, hidden)


def _option(parser: argparse.ArgumentParser, option: argparse.Action) -> Iterator[str]:
    formatter = parser._get_formatter()
    yield f".. option:: {formatter._format_action_invocation(option)}"
    yield from ("", f"   {_sentence(formatter._expand_help(option))}", "")


def _heading(title: str, line: str) -> tuple[str, ...]:
    return title, line * len(title), ""


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return _escaped(text[:1].upper() + text[1:]) + ("" if text.endswith((".", "?")) else ".")


def _escaped(text: str) -> str:
    return _MARKUP.sub(r"\\\1", text)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True}
