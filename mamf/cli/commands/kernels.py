"""Implement the command ``mamf kernels``: list the kernels of every operation, and say whether each can run on a device
of this machine and, if not, why.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from mamf.backend import Backend
from mamf.cli.planning import AnyOperation
from mamf.cli.terminal import add_device_options, add_shared_options, print_document
from mamf.errors import MamfError
from mamf.plugins.discovery import (
    OPERATION_GROUP,
    find_entry_points_by_name,
    list_kernel_names,
    make_kernel,
    make_operation,
    open_backend,
)

if TYPE_CHECKING:
    from mamf.report.document import Block

EXAMPLES = """examples:
  mamf kernels                          list all kernels by operation, with the reasons why some are unavailable
  mamf kernels --operation attention    list the kernels of one operation
  mamf kernels --backend cpu            list the kernels for another device
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_shared_options(parser, "--operation", default_text="all operations")
    add_device_options(parser)
    parser.set_defaults(format="table", wide=False)


def run_with_options(options: argparse.Namespace) -> int:
    from mamf.report.document import Document, Lines

    if options.operation:
        make_operation(options.operation)  # Report an unknown operation before mamf opens a device.
    backend = open_backend(options.backend or "auto", options.device or 0)
    # List matmul and attention first, because most users look for kernels of these operations.
    operation_names = (
        [options.operation]
        if options.operation
        else sorted(
            find_entry_points_by_name(OPERATION_GROUP), key=lambda name: (name != "matmul", name != "attention", name)
        )
    )
    blocks = [
        Lines([f"on {backend.info.name} ({backend.name}:{backend.index})"]),
        *(make_kernel_table(name, backend) for name in operation_names),
    ]
    print_document(options, Document("Kernels", blocks))
    return 0


def make_kernel_table(operation_name: str, backend: Backend) -> Block:
    """Return a table that lists the kernels of the operation called ``operation_name`` and says whether each can run on
    the device of ``backend``. If the operation cannot be imported, return a line that says why.
    """
    from mamf.report.document import Lines, make_text_table

    try:
        operation = make_operation(operation_name)
        table_rows = [
            (kernel_name, _describe_availability(operation, kernel_name, backend))
            for kernel_name in list_kernel_names(operation)
        ]
    except MamfError as error:
        return Lines([str(error)], f"{operation_name}:")
    return replace(make_text_table(("kernel", "on this device"), table_rows), title=f"{operation_name}:")


def _describe_availability(operation: AnyOperation, kernel_name: str, backend: Backend) -> str:
    try:
        return str(make_kernel(operation, kernel_name).explain_unavailability(backend) or "available")
    except MamfError as error:
        return str(error)
