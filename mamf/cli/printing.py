"""Prints reports in the format that a command line asks for."""

from __future__ import annotations

import argparse
import sys
from typing import TextIO

from mamf.cli.options import terminal_width
from mamf.cli.terminal import say_lines
from mamf.report.document import Document
from mamf.report.formats import FOR_PEOPLE, FORMATS


def print_document(options: argparse.Namespace, document: Document) -> None:
    say_lines(FORMATS[options.format](document, terminal_width(options)))


def is_for_people(options: argparse.Namespace) -> bool:
    """Whether people read the report, or else another program."""
    return options.format in FOR_PEOPLE


def note_stream(options: argparse.Namespace) -> TextIO:
    """Where lines beside a report go: not into what another program reads."""
    return sys.stdout if is_for_people(options) else sys.stderr
