"""Describes machine and software for a log, and removes personal data.

Run logs are published: they must not contain host names, user names or absolute paths, not even in a note, a command
or an error message. ``scrub`` runs over every string of a log.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# The beginning of a path outside the working directory.
_ROOT = r"(?:file://[\w.-]*|~(?:[A-Za-z_][\w.-]*)?|(?:\.[/\\])?\.\.|[A-Za-z]:)?(?:/|\\+)"
# A part of a path, which may contain escaped blanks.
_PART = r"(?:\\ |[^\s/\\'\"`<>|:;,()\[\]{}])+"
# A word of a name with blanks: not an option, the end of a file name or a word of the surrounding sentence.
_WORD = r"(?:\\ |\.(?!\w)|[^\s/\\.'\"`<>|:;,()\[\]{}])+"
_NO_NAME = r"(?![-~]|\.\.?[/\\]|(?:and|or|but|to|in|is|was|has|of|for|from|with|on|at|as|by|not)\b)"
_PATH = re.compile(rf"(?<![\w/\\.~>-]){_ROOT}(?:(?:{_WORD} {_NO_NAME}){{0,3}}{_PART}[/\\]+)*{_PART}", re.I)
_QUOTED_PATH = re.compile(rf"(?P<quote>['\"])(?P<option>[^'\"/\\=\s]*=)?{_ROOT}[^'\"]*[^'\"/\\](?P=quote)", re.I)
# The address of a device on the bus, or of a host with a port.
_ADDRESS = re.compile(r"\b[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b|\b\d{1,3}(?:\.\d{1,3}){3}\]?:\d+\b", re.I)
_SEPARATOR = re.compile(r"/|\\+(?! )")
_USER_FOLDERS = ("home", "users")
_SHORTEST_NAME = 2
# Accounts and hosts that identify no one, and two-letter words that appear in any text: English, units, layouts.
_ANONYMOUS = frozenset({"root", "user", "localhost", "admin", "ubuntu", "runner"})
_COMMON_WORDS = frozenset(
    {
        *("am", "an", "as", "at", "be", "by", "do", "go", "he", "if", "in", "is", "it", "me", "my", "no", "of", "ok"),
        *("on", "or", "so", "to", "up", "us", "we", "gb", "hz", "kb", "mb", "ms", "ns", "tb", "mm", "nn", "nt", "tn"),
        "tt",
    }
)
# Variables that torch reads on every device; each backend adds its vendor's.
_ENVIRONMENT_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY", "TORCH_BLAS_PREFER_CUBLASLT")


def scrub(text: str) -> str:
    """``text`` without personal data: paths outside the working directory are cut to their last part; the names of this
    host and user, and addresses of devices and hosts, are replaced.
    """
    if "/" in text or "\\" in text:  # every path has one
        text = _PATH.sub(lambda path: _cut(path[0]), _QUOTED_PATH.sub(_quoted_last_part, text))
    if ":" in text:  # every address has one
        text = _ADDRESS.sub("<address>", text)
    for pattern, substitute in _find_private_names():
        text = pattern.sub(substitute, text)
    return text


def _quoted_last_part(found: re.Match[str]) -> str:
    quote, option = found["quote"], found["option"] or ""
    return f"{quote}{option}{_cut(found[0].strip(quote).removeprefix(option))}{quote}"


def _cut(path: str) -> str:
    """``<path>/c`` for ``/a/b/c``. A home folder carries its user's name, so that is replaced too."""
    *folders, last = _SEPARATOR.split(path)
    is_of_user = bool(folders) and folders[-1].lower() in _USER_FOLDERS
    return f"<path>/{'<user>' if is_of_user else last}"


def scrub_record(value: Any) -> Any:
    """A JSON value with all strings scrubbed, including keys."""
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, dict):
        return {scrub(str(key)): scrub_record(item) for key, item in value.items()}
    return [scrub_record(item) for item in value] if isinstance(value, (list, tuple)) else value


@functools.cache
def _find_private_names() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Patterns for the names of this host and user, each with its replacement."""
    host = socket.gethostname()
    names = {host: "<host>", host.split(".")[0]: "<host>"}
    with contextlib.suppress(KeyError, OSError):  # the user id has no account, as in some containers
        names[getpass.getuser()] = "<user>"
    return tuple(
        (re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.I), substitute)
        for name, substitute in names.items()
        if len(name) >= _SHORTEST_NAME and not name.isdigit() and name.lower() not in _ANONYMOUS | _COMMON_WORDS
    )


def describe_environment(backend_variables: Iterable[str] = ()) -> dict[str, Any]:
    """The software and operating system of this process, as JSON values."""
    names = [*_ENVIRONMENT_VARIABLES, *backend_variables]
    return {
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: found for name in ("torch", "numpy", "triton") if (found := version_in_use(name))},
        "variables": {name: os.environ[name] for name in sorted(set(names)) if name in os.environ},
    }


@functools.cache
def version_in_use(name: str) -> str | None:
    """The version of a package in this process. Cached: an upgrade during the run does not affect the process."""
    return package_version(name)


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def tool_version() -> dict[str, str | None]:
    """mamf's version, and its commit if it runs from a git checkout (``+`` marks uncommitted changes)."""
    return {"name": "mamf", "version": version_in_use("mamf"), "commit": _commit()}


@functools.cache  # a later commit does not affect this process
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
    """The command line, quoted for a shell, without the path of the program."""
    return shlex.join(["mamf", *sys.argv[1:]])
