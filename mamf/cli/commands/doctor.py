"""Implement the command ``mamf doctor``: check the machine and a device for settings that would slow its
kernels or distort measurements.
"""

from __future__ import annotations

import argparse

from mamf.cli.terminal import add_device_options, print_line, warn

EXAMPLES = """examples:
  mamf doctor                  check the first accelerator and the machine; mamf changes nothing
  mamf doctor --device 3       check another device
  mamf doctor --backend cpu    check the CPU
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_device_options(parser)


def run_with_options(options: argparse.Namespace) -> int:
    from mamf.engine.traits import replace_assumed_traits
    from mamf.machine.environment import format_check_result, run_machine_checks, select_warnings
    from mamf.plugins.discovery import open_backend

    backend = open_backend(options.backend or "auto", options.device or 0)
    print_line(f"{backend.info.name} ({backend.name}:{backend.index}), timed by {backend.timer}")
    if options.backend is None and not backend.is_accelerator:
        print_line("no accelerator is available: 'mamf backends' says why")
    findings = [*run_machine_checks(backend), *replace_assumed_traits(backend, warn)]
    for finding in findings:
        print_line(format_check_result(finding))
    count = len(select_warnings(findings))
    print_line("there is nothing to fix" if not count else f"findings to fix: {count}; mamf itself changes no setting")
    return 0
