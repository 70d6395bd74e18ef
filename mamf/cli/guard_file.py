"""The TOML file of a guard: kernels, shapes and their baseline. Errors are one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mamf.cli.options.values import duration, share
from mamf.errors import UsageError
from mamf.limits import require_known, require_some, whole_number
from mamf.logs.guarding import DEFAULT_ROUNDS, DEFAULT_TOLERANCE
from mamf.logs.validator import ANY_NAME, PLAIN, require
from mamf.plans import KERNEL_REGIMES, MOST_ROUNDS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SCHEMA = {
    "operation": str,
    "kernels": [str],
    "shapes": [str],
    "baseline": str,
    "regimes?": [str],
    "tolerance?": PLAIN,
    "rounds?": int,
    "precision?": PLAIN,
    "time_limit?": PLAIN,
    "flush?": bool,
    "problem?": {ANY_NAME: PLAIN},
}


class GuardFile(NamedTuple):
    """``options``: those of ``mamf sweep --operation`` that measure the same rows."""

    baseline: Path
    tolerance: float
    rounds: int
    options: Mapping[str, Any]


def read_guard_file(path: Path) -> GuardFile:
    """Raises UsageError with the file and the error. ``baseline`` is relative to the file."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
        require_known(*(("key", name, [key.removesuffix("?") for key in _SCHEMA]) for name in given))
        require(given, _SCHEMA)
        require_some("shapes", given["shapes"], str)
        require_known(*(("regime", name, KERNEL_REGIMES) for name in given.get("regimes", ())))
        tolerance = share(str(given.get("tolerance", DEFAULT_TOLERANCE)))
        rounds = whole_number("rounds", given.get("rounds", DEFAULT_ROUNDS), 3, MOST_ROUNDS)
        options = _sweep_options(given)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (UsageError, ValueError, argparse.ArgumentTypeError) as error:
        raise UsageError(f"{path}: {error}") from None
    return GuardFile(path.parent / given["baseline"], tolerance, rounds, options)


def _sweep_options(given: Mapping[str, Any]) -> dict[str, Any]:
    fields = {
        name: [str(value) for value in (values if isinstance(values, list) else [values])]
        for name, values in given.get("problem", {}).items()
    }
    return {
        "operation": given["operation"],
        "kernel": given["kernels"],
        "shapes": given["shapes"],
        "dtype": fields.pop("dtype", None),
        "set": [f"{name}={','.join(values)}" for name, values in fields.items()] or None,
        "regime": given.get("regimes", KERNEL_REGIMES[:1]),
        "precision": share(str(given["precision"])) if "precision" in given else None,
        "time_limit": duration(str(given["time_limit"])) if "time_limit" in given else None,
        "no_flush": None if given.get("flush", True) else True,
    }
