"""Checks the machine's settings. Each finding has its cost and the command that fixes it. Changes nothing."""

from __future__ import annotations

from mamf.backend import Advice, Backend

_BUSY_HOST_PERCENT = 50.0
_MARKS = {"ok": "ok  ", "warning": "WARN", "unknown": "?   "}


def diagnose(backend: Backend) -> list[Advice]:
    """Run the backend's checks, and for an accelerator also check whether the host is busy."""
    found = backend.advice()
    if backend.is_accelerator:
        found.append(_check_host_load())
    return found


def select_warnings(findings: list[Advice]) -> list[Advice]:
    return [finding for finding in findings if finding.verdict == "warning"]


def _check_host_load() -> Advice:
    import psutil  # imported here because commands that measure nothing work without it

    busy = psutil.cpu_percent(interval=0.1)
    if busy < _BUSY_HOST_PERCENT:
        return Advice("host load", "ok", f"the host's CPU is {busy:.0f} % busy")
    cost = "launches may be late, so the figures of small shapes are noisy"
    return Advice(
        "host load", "warning", f"the host's CPU is {busy:.0f} % busy", cost, "top -o %CPU   # shows what runs"
    )


def format_finding(finding: Advice) -> str:
    """Format a finding as one line: verdict, check and finding, and for a warning also its cost and fix."""
    line = f"{_MARKS[finding.verdict]} {finding.check}: {finding.finding}"
    if finding.cost and finding.verdict == "warning":
        line += f"; {finding.cost}"
    return f"{line}; to fix: {finding.command}" if finding.command and finding.verdict == "warning" else line
