"""``mamf backends``: the backends with devices here, and how to enable others."""

from __future__ import annotations

import argparse

from mamf.cli.terminal import say
from mamf.plugins.discovery import backend_statuses


def run(options: argparse.Namespace) -> int:
    statuses = backend_statuses()
    width = max(len(status.name) for status in statuses)
    for status in statuses:
        if status.unavailable is not None:
            say(f"{status.name:{width}} unavailable: {status.unavailable.reason}")
            say(f"{'':{width}} to enable it: {status.unavailable.remedy}")
            continue
        for index, device in enumerate(status.devices):
            say(f"{status.name if index == 0 else '':{width}} device {index}: {device}")
    return 0
