"""Implement the command ``mamf backends``: list every backend (CUDA, ROCm, CPU and so on) with the devices that it
finds on this machine, or with the reason why it is unavailable and how to enable it.
"""

from __future__ import annotations

import argparse

from mamf.cli.terminal import print_line

EXAMPLES = """examples:
  mamf backends     list each backend with its devices, or the reason why it has none
  mamf doctor       list what slows the default device down
  mamf kernels      list the kernels that can be measured on the default device
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Leave ``parser`` unchanged, because ``mamf backends`` has no options."""


def run_with_options(options: argparse.Namespace) -> int:
    from mamf.plugins.discovery import list_backend_statuses

    statuses = list_backend_statuses()
    width = max(len(status.name) for status in statuses)
    for status in statuses:
        if status.unavailability is not None:
            reason, remedy = status.unavailability.reason, status.unavailability.remedy
            print_line(f"{status.name:{width}} unavailable: {reason}", indent=width + 5)
            print_line(f"{'':{width}} to enable it: {remedy}")
            continue
        for index, device in enumerate(status.device_names):
            print_line(f"{status.name if index == 0 else '':{width}} device {index}: {device}")
    return 0
