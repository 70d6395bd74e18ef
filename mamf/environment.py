"""What a result must say about machine and software, and what it must not say about people.

A run log is published: no host name, user name or absolute path may stand in it, also not inside a note, a command or
an error message. ``scrub`` runs over every string that is written.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_ABSOLUTE_PATH = re.compile(r"(?<![\w/.~>-])(?:~|[A-Za-z]:)?[/\\](?:[\w.@+~-]+[/\\])*([\w.@+~-]+)")
_SHORTEST_NAME = 3
# Accounts and hosts that name nobody.
_ANONYMOUS = frozenset({"root", "user", "localhost", "admin", "ubuntu", "runner"})
# Read by torch on every device; each backend adds its vendor's.
_ENVIRONMENT_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY", "TORCH_BLAS_PREFER_CUBLASLT")


def scrub(text: str) -> str:
    """``text`` with absolute paths cut to their last part and this host's and user's names replaced."""
    text = _ABSOLUTE_PATH.sub(r"<path>/\1", text)
    for name, substitute in _private_names().items():
        text = re.sub(rf"\b{re.escape(name)}\b", substitute, text)
    return text


def scrub_record(value: Any) -> Any:
    """A JSON value with every string in it scrubbed, keys too."""
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, dict):
        return {scrub(str(key)): scrub_record(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrub_record(item) for item in value]
    return value


@functools.cache
def _private_names() -> dict[str, str]:
    host = socket.gethostname()
    names = {host: "<host>", host.split(".")[0]: "<host>"}
    with contextlib.suppress(KeyError, OSError):  # no account of that number, as in some containers
        names[getpass.getuser()] = "<user>"
    return {
        name: substitute
        for name, substitute in names.items()
        if len(name) >= _SHORTEST_NAME and name.lower() not in _ANONYMOUS
    }


def describe_environment(backend_variables: Iterable[str] = ()) -> dict[str, Any]:
    """Software and operating system of this process; JSON values."""
    names = [*_ENVIRONMENT_VARIABLES, *backend_variables]
    return {
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: found for name in ("torch", "numpy", "triton") if (found := package_version(name))},
        "variables": {name: os.environ[name] for name in sorted(set(names)) if name in os.environ},
    }


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def tool_version() -> dict[str, str | None]:
    """mamf's own version, and its commit where it runs from a git checkout (``+`` marks uncommitted changes)."""
    return {"name": "mamf", "version": package_version("mamf"), "commit": _commit()}


@functools.cache
def _commit() -> str | None:
    checkout = Path(__file__).resolve().parent.parent
    if not (checkout / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--untracked-files=no", "--", "mamf", "backends")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return None


def command_line() -> str:
    """The command as it was given, without the path of the program."""
    return " ".join(["mamf", *sys.argv[1:]])
