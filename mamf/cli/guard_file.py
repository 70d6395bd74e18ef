"""The TOML file of a guard: kernels, shapes and their baseline. Errors are one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mamf.cli.options.values import duration, share
from mamf.errors import UsageError
from mamf.limits import require_known, whole_number
from mamf.logs.guarding import DEFAULT_ROUNDS, DEFAULT_TOLERANCE
from mamf.plans import KERNEL_REGIMES, MOST_ROUNDS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Converts a value of TOML; raises UsageError or argparse.ArgumentTypeError for a wrong one.
Reader = Callable[[Any], Any]


@dataclass(frozen=True)
class GuardFile:
    """``problem``: values by field; None elsewhere is the default of ``mamf sweep``."""

    operation: str
    kernels: tuple[str, ...]
    shapes: tuple[str, ...]
    baseline: Path
    problem: Mapping[str, tuple[str, ...]]
    regimes: tuple[str, ...] = KERNEL_REGIMES[:1]
    tolerance: float = DEFAULT_TOLERANCE
    rounds: int = DEFAULT_ROUNDS
    precision: float | None = None
    time_limit: float | None = None
    flush: bool = True

    def as_options(self) -> dict[str, Any]:
        """The equivalent options of ``mamf sweep --operation``."""
        fields = {name: values for name, values in self.problem.items() if name != "dtype"}
        return {
            "operation": self.operation,
            "kernel": list(self.kernels),
            "shapes": list(self.shapes),
            "dtype": list(self.problem.get("dtype", ())) or None,
            "set": [f"{name}={','.join(values)}" for name, values in fields.items()] or None,
            "regime": list(self.regimes),
            "precision": self.precision,
            "time_limit": self.time_limit,
            "no_flush": None if self.flush else True,
        }


def read_guard_file(path: Path) -> GuardFile:
    """Raises UsageError with the file, the key and the error. ``baseline`` is relative to the file."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # no TOML, or no UTF-8
        raise UsageError(f"{path} is not TOML: {error}") from None
    values: dict[str, Any] = {}
    for name, value in given.items():
        try:
            require_known(("key", name, _READERS))
            values[name] = _READERS[name](value)
        except (UsageError, argparse.ArgumentTypeError) as error:
            what = "" if name not in _READERS else f"{name}: "
            raise UsageError(f"{path}: {what}{error}") from None
    if missing := [name for name in _REQUIRED if name not in values]:
        raise UsageError(f"{path}: {' and '.join(missing)} missing: name the kernels to guard, and their baseline")
    return GuardFile(**{"problem": {}, **values, "baseline": path.parent / values["baseline"]})


def _typed(value: Any, kind: Any, what: str) -> Any:
    if not isinstance(value, kind) or not str(value).strip():
        raise UsageError(f"expected {what}, not {value!r}")
    return value


def _listed(value: Any) -> list[Any]:
    """A value, or the values of a list."""
    values = value if isinstance(value, list) else [value]
    if not values:
        raise UsageError("the list is empty: name at least one")
    return values


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(_typed(each, str, "a text") for each in _listed(value))


def _regimes(value: Any) -> tuple[str, ...]:
    for regime in _texts(value):
        require_known(("regime", regime, KERNEL_REGIMES))
    return _texts(value)


def _problem(value: Any) -> dict[str, tuple[str, ...]]:
    """The values of each field as options name them."""
    fields = _typed(value, dict, "a table [problem]").items()
    return {name: tuple(map(_plain, _listed(values))) for name, values in fields}


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(_typed(value, (str, int, float), "texts, numbers, true or false"))


_REQUIRED = ("operation", "kernels", "shapes", "baseline")
_READERS: dict[str, Reader] = {
    "operation": lambda value: _typed(value, str, "a text"),
    "kernels": _texts,
    "shapes": _texts,
    "problem": _problem,
    "regimes": _regimes,
    "tolerance": lambda value: share(str(value)),
    "baseline": lambda value: _typed(value, str, "a text"),
    "rounds": lambda value: whole_number("rounds", value, 3, MOST_ROUNDS),
    "precision": lambda value: share(str(value)),
    "time_limit": lambda value: duration(str(value)),
    "flush": lambda value: _typed(value, bool, "true or false"),
}
