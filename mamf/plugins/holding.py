"""Somebody else's code, held to its contract: what it throws or returns amiss is told in a line that names it.

``held`` has the methods of a backend, kernel or operation called through one place; mamf.plugins.contracts says which,
and what they may give. Left alone is what runs between two marks (``mark``, ``submit``, ``flush_cache``, launches):
nothing may stand there but the launch, and its faults become the status of a row (mamf.engine.measure). ``now`` is
looked at and no more (``Clock``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mamf.errors import MamfError, PluginError, UsageError, fault, first_line

Plugin = TypeVar("Plugin")
Errors = tuple[type[Exception], ...]
#: Looks at a value, and raises ValueError saying what it should have been.
Check = Callable[[Any], object]
_HELD = "_held_to_contract"


@dataclass(frozen=True)
class Method:
    """``check``: of what it returns. ``passes``: what it may raise. ``refuses``: what it raises to refuse a request.
    ``part``: the contract of what it returns.
    """

    check: Check
    passes: Errors = ()
    refuses: Errors = ()
    part: Contract | None = None


@dataclass(frozen=True)
class Contract:
    """What is asked of a plugin by name. ``parts``: attributes that have a contract of their own."""

    attributes: Mapping[str, Check] = field(default_factory=dict)
    methods: Mapping[str, Method] = field(default_factory=dict)
    parts: Mapping[str, Contract] = field(default_factory=dict)


class blamed:
    """What is raised within becomes a PluginError naming the plugin; mamf's own errors are meant, and pass.

    A class, because methods are called for each row, and a generator takes longer than most of them.
    """

    def __init__(self, plugin: str, what: str, passes: Errors = (), refuses: Errors = ()) -> None:
        self._plugin, self._what, self._passes, self._refuses = plugin, what, passes, refuses

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, (Exception, SystemExit)) or isinstance(error, (MamfError, *self._passes)):
            return
        if isinstance(error, self._refuses):
            raise UsageError(f"{self._plugin}: {first_line(error)}") from error
        raise PluginError(f"{self._plugin} is broken: {self._what} raised {fault(error)}") from error


def held(plugin: Plugin, contract: Contract, label: str) -> Plugin:
    """The same plugin, its methods watched. Raises PluginError for an attribute that is amiss."""
    if getattr(plugin, _HELD, False):
        return plugin
    for name, check in contract.attributes.items():
        with blamed(label, name):
            value = getattr(plugin, name)
        require(check, value, label, f"{name} is")
        if name in contract.parts:
            held(value, contract.parts[name], f"{label}'s {name}")
    for name, method in contract.methods.items():
        if hasattr(plugin, name):  # of sensors that are Unavailable there is nothing to read
            object.__setattr__(plugin, name, _watched(getattr(plugin, name), method, label, name))
    object.__setattr__(plugin, _HELD, True)
    return plugin


class Clock:
    """A backend's ``now``, held to what loops over time end by: it gives finite numbers and never goes back."""

    def __init__(self, now: Callable[[], float], label: str) -> None:
        self._now, self._label, self._last = now, label, -math.inf

    def __call__(self) -> float:
        """Raises PluginError, or what ``now`` raises."""
        now = self._now()
        if not self._last <= now < math.inf:
            due = "a finite number" if not math.isfinite(now) else f"{self._last} or later, as before"
            raise PluginError(f"{self._label} is broken: now gave {now}, not {due}")
        self._last = now
        return now


def _watched(call: Callable[..., Any], method: Method, label: str, name: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def watched(*arguments: Any, **keywords: Any) -> Any:
        with blamed(label, name, method.passes, method.refuses):
            value = call(*arguments, **keywords)
        require(method.check, value, label, f"{name} gave")
        return value if method.part is None else held(value, method.part, f"{label}'s {name}")

    return watched


def require(check: Check, value: Any, label: str, said: str) -> None:
    """Raises PluginError for a value that does not pass."""
    try:
        check(value)
    except ValueError as expected:
        raise PluginError(f"{label} is broken: {said} {_shown(value)}, not {expected}") from None


def _shown(value: Any) -> str:
    return str(value) if value is None or isinstance(value, (bool, float)) else f"a {type(value).__name__}"
