"""Prints reports in the format that a command line asks for."""

from __future__ import annotations

import argparse

from mamf.cli.options import terminal_width
from mamf.cli.terminal import say_lines
from mamf.report.document import Document
from mamf.report.formats import FORMATS


def print_document(options: argparse.Namespace, document: Document) -> None:
    say_lines(FORMATS[options.format](document, terminal_width(options)))
