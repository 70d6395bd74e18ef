"""``mamf kernels``: every kernel of every operation, available or with the reason why not."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from mamf.backend import Backend
from mamf.cli.options import add, add_device_options
from mamf.cli.terminal import print_document
from mamf.errors import MamfError

if TYPE_CHECKING:
    from mamf.cli.planning import AnyOperation
    from mamf.report.document import Block

EXAMPLES = """examples:
  mamf kernels                          kernels by operation: available here, or why not
  mamf kernels --operation attention    of one operation
  mamf kernels --backend cpu            on another device
"""
# The best-known operations come first.
_FIRST = ("matmul", "attention")


def configure(parser: argparse.ArgumentParser) -> None:
    add(parser, "--operation", default_text="all operations")
    add_device_options(parser)
    parser.set_defaults(format="table")


def run(options: argparse.Namespace) -> int:
    from mamf.plugins.discovery import OPERATIONS, find_registered, open_backend, operation
    from mamf.report.document import Document, Lines

    if options.operation:
        operation(options.operation)  # reports an unknown one before a device is opened
    backend = open_backend(options.backend or "auto", options.device or 0)
    names = [options.operation] if options.operation else sorted(find_registered(OPERATIONS), key=_place)
    head = Lines([f"on {backend.info.name} ({backend.name}:{backend.index})"])
    print_document(options, Document("Kernels", [head, *(kernels_of(name, backend) for name in names)]))
    return 0


def _place(name: str) -> tuple[int, str]:
    return (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)


def kernels_of(name: str, backend: Backend) -> Block:
    """The kernels of an operation; for an operation that cannot be loaded, the reason."""
    from mamf.plugins.discovery import kernel_names, operation
    from mamf.report.document import Lines, text_table

    try:
        of = operation(name)
        rows = [(each, _availability(of, each, backend)) for each in kernel_names(of)]
    except MamfError as error:
        return Lines([str(error)], f"{name}:")
    return replace(text_table(("kernel", "on this device"), rows), title=f"{name}:")


def _availability(of: AnyOperation, name: str, backend: Backend) -> str:
    from mamf.plugins.discovery import kernel_of

    try:
        return str(kernel_of(of, name).unavailable(backend) or "available")
    except MamfError as error:
        return str(error)
