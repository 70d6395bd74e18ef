"""``mamf kernels``: every kernel of every operation, available here or with the reason why not."""

from __future__ import annotations

import argparse

from mamf.backend import Backend
from mamf.cli.options import add_device_options
from mamf.cli.terminal import say
from mamf.errors import MamfError
from mamf.plugins.discovery import OPERATIONS, kernel_names, kernel_of, open_backend, operation, registered

# What mamf is known for stands first.
_FIRST = ("matmul", "attention")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--operation", metavar="NAME", help="the kernels of one operation (default: of all)")
    add_device_options(parser)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    if options.operation:
        operation(options.operation)  # an unknown one is said before a device is opened
    backend = open_backend(options.backend or "auto", options.device or 0)
    say(f"on {backend.info.name} ({backend.name}:{backend.index})")
    for name in [options.operation] if options.operation else sorted(registered(OPERATIONS), key=_place):
        say("")
        say(f"{name}:")
        for line in lines_of(name, backend):
            say(f"  {line}")
    return 0


def _place(name: str) -> tuple[int, str]:
    return (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)


def lines_of(name: str, backend: Backend) -> list[str]:
    """The kernels of an operation, a line each; one that cannot be loaded has its reason in the place of them."""
    try:
        of = operation(name)
        names = kernel_names(of)
    except MamfError as error:
        return [str(error)]
    width = max(map(len, names))
    lines = []
    for each in names:
        try:
            reason = kernel_of(of, each).unavailable(backend)
            told = "available" if reason is None else str(reason)
        except MamfError as error:
            told = str(error)
        lines.append(f"{each.ljust(width)}  {told}")
    return lines
