"""Describes the software for a log, checks the machine without changing it, and pauses garbage collection."""

from __future__ import annotations

import functools
import gc
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mamf.backend import Advice, Backend

# Environment variables that torch reads for every device. Each backend adds the variables of its vendor.
_ENVIRONMENT_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY", "TORCH_BLAS_PREFER_CUBLASLT")


def describe_environment(backend_variables: Iterable[str] = ()) -> dict[str, Any]:
    """Describe the software and operating system of this process as JSON values.

    ``backend_variables``: names of further environment variables to record.
    """
    names = [*_ENVIRONMENT_VARIABLES, *backend_variables]
    return {
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {
            name: installed for name in ("torch", "numpy", "triton") if (installed := get_version_in_use(name))
        },
        "variables": {name: os.environ[name] for name in sorted(set(names)) if name in os.environ},
    }


@functools.cache
def get_version_in_use(name: str) -> str | None:
    """Return the version of a package in this process. Cached, because an upgrade does not affect a running process."""
    return get_package_version(name)


def get_package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def get_tool_version() -> dict[str, str | None]:
    """Return mamf's version, and its commit if it runs from a git checkout (``+`` marks uncommitted changes)."""
    return {"name": "mamf", "version": get_version_in_use("mamf"), "commit": _read_commit()}


@functools.cache  # a later commit does not affect this process
def _read_commit() -> str | None:
    checkout = Path(__file__).resolve().parent.parent
    if not (checkout / ".git").exists():
        return None

    def run_git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()

    try:
        dirty = run_git("status", "--porcelain", "--untracked-files=no", "--", "mamf", "backends")
        return run_git("rev-parse", "--short=12", "HEAD") + ("+" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return None


def quote_command_line() -> str:
    """Return the command line, quoted for a shell, without the path of the program."""
    return shlex.join(["mamf", *sys.argv[1:]])


_BUSY_HOST_PERCENT = 50.0
_VERDICT_LABELS = {"ok": "ok  ", "warning": "WARN", "unknown": "?   "}


def diagnose(backend: Backend) -> list[Advice]:
    """Run the backend's checks, and for an accelerator also check whether the host is busy."""
    findings = backend.advice()
    if backend.is_accelerator:
        findings.append(_check_host_load())
    return findings


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
    line = f"{_VERDICT_LABELS[finding.verdict]} {finding.check}: {finding.finding}"
    if finding.cost and finding.verdict == "warning":
        line += f"; {finding.cost}"
    return f"{line}; to fix: {finding.command}" if finding.command and finding.verdict == "warning" else line


@contextmanager
def disable_garbage_collection() -> Iterator[None]:
    """Disable garbage collection within a ``with`` block.

    In a measurement a pause of the host could let the device run out of queued work. While hundreds of thousands of
    rows are read, collection takes a sixth of the time and frees nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
