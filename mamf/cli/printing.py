"""Prints reports in the format that a command line asks for."""

from __future__ import annotations

import argparse
import sys
from typing import TextIO

from mamf.backend import Backend
from mamf.cli.terminal import say, say_lines, stdout, terminal_columns
from mamf.report.document import Document
from mamf.report.formats import FOR_PEOPLE, FORMATS


def terminal_width(options: argparse.Namespace) -> int | None:
    """The width for tables in characters; None shows all columns: pipes and files take any width."""
    return None if getattr(options, "wide", True) else terminal_columns()


def print_document(options: argparse.Namespace, document: Document) -> None:
    say_lines(FORMATS[options.format](document, terminal_width(options)))


def is_for_people(options: argparse.Namespace) -> bool:
    """Whether people read the report, not a program."""
    return options.format in FOR_PEOPLE


def note_stream(options: argparse.Namespace) -> TextIO:
    """The stream for lines beside a report, which must not mix with what a program reads."""
    return stdout() if is_for_people(options) else sys.stderr


def say_memory(needed: int, of: str, backend: Backend) -> None:
    """Print the memory that a run needs, for a dry run. ``needed``: bytes for ``of``."""
    free = backend.free_memory()
    say(f"memory: {needed / 1e9:.3g} GB for {of}" + (f", {free / 1e9:.1f} GB free" if free else ""))
    if free and needed > free:
        say("        it will be out_of_memory; smaller shapes are measured")
