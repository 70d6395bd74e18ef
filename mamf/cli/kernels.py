"""``mamf kernels``: every kernel, matmul and attention, available here or with the reason why not."""

from __future__ import annotations

import argparse

from mamf.cli.options import add_device_options
from mamf.discovery import ATTENTION_KERNELS, KERNELS, attention_kernel, kernel, open_backend, registered
from mamf.errors import MamfError


def configure(parser: argparse.ArgumentParser) -> None:
    add_device_options(parser)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    backend = open_backend(options.backend or "auto", options.device or 0)
    print(f"on {backend.info.name} ({backend.name}:{backend.index})")
    for title, group, load in (("matmul", KERNELS, kernel), ("attention", ATTENTION_KERNELS, attention_kernel)):
        names = sorted(registered(group))
        width = max(map(len, names))
        print(f"\n{title}:")
        for name in names:
            try:
                reason = load(name).unavailable(backend)  # type: ignore[operator]
                line = "available" if reason is None else str(reason)
            except MamfError as error:
                line = str(error)
            print(f"  {name.ljust(width)}  {line}")
    return 0
