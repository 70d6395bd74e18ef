"""Checks of the machine, each with what it costs and the command that mends it. Changes nothing."""

from __future__ import annotations

import psutil

from mamf.backend import Advice, Backend

_BUSY_HOST_PERCENT = 50.0
_MARKS = {"ok": "ok  ", "warning": "WARN", "unknown": "?   "}


def diagnose(backend: Backend) -> list[Advice]:
    """Every check of the backend, and of the host that feeds an accelerator."""
    found = backend.advice()
    if backend.is_accelerator:
        found.append(_host_load())
    return found


def warnings(findings: list[Advice]) -> list[Advice]:
    return [finding for finding in findings if finding.verdict == "warning"]


def _host_load() -> Advice:
    busy = psutil.cpu_percent(interval=0.1)
    if busy < _BUSY_HOST_PERCENT:
        return Advice("host load", "ok", f"the host's CPU is {busy:.0f} % busy")
    cost = "launches may come late, so small shapes scatter"
    return Advice("host load", "warning", f"the host's CPU is {busy:.0f} % busy", cost, "top -o %CPU   # see what runs")


def format_finding(finding: Advice) -> str:
    """One finding in one line: verdict, check, finding; then cost and remedy where something is wrong."""
    line = f"{_MARKS[finding.verdict]} {finding.check}: {finding.finding}"
    if finding.cost and finding.verdict == "warning":
        line += f"; {finding.cost}"
    return f"{line}; to mend: {finding.command}" if finding.command and finding.verdict == "warning" else line
