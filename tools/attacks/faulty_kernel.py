"""A kernel that exits, raises, prints or lies, as its environment says: named by path in attacks on plugins."""

from __future__ import annotations

import asyncio
import builtins
import ctypes
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mamf.testing import SimulatedMatmul

#: Holds "place action", such as "launches SystemExit(0)".
VARIABLE = "MAMF_ATTACK"
#: Its fault is in products of this M alone, where a place sees the shape.
FAULTY_M = 512


class Own(BaseException):
    pass


class Mute(Exception):
    def __str__(self) -> str:
        raise SystemExit(0)


class Wrong(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


Colored = type("\x1b[31mColored\n\u202e", (BaseException,), {})
Group = getattr(builtins, "BaseExceptionGroup", Own)

RAISED: dict[str, Callable[[], BaseException]] = {
    "SystemExit(0)": lambda: SystemExit(0),
    "SystemExit()": SystemExit,
    "SystemExit(text)": lambda: SystemExit("done\x1b[2J"),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "StopIteration": StopIteration,
    "CancelledError": asyncio.CancelledError,
    "BaseException": lambda: BaseException("it\x1b]0;title\x07"),
    "group": lambda: Group("two\nlines", [SystemExit(0), GeneratorExit()]) if Group is not Own else Own("two"),
    "own": lambda: Own("\x9b31m" + "x" * 10**6),
    "mute": Mute,
    "wrong": Wrong,
    "colored": lambda: Colored("\r\x00"),
    "RuntimeError": lambda: RuntimeError("\n\n  CUDA error\n" * 1000),
}


def _print() -> None:
    print('{"record": "measurement"}', flush=True)


def _log() -> None:
    logging.basicConfig(stream=sys.stdout, force=True)
    logging.warning("of a library")


def _put() -> None:
    library = ctypes.CDLL(None)
    library.puts(b"from C")
    library.fflush(None)


def _leave(code: int) -> Callable[[], None]:
    return lambda: os._exit(code)


#: What returns, or ends the process.
DONE: dict[str, Callable[[], None]] = {
    "print": _print,
    "write": lambda: os.write(1, b"raw\n") and None,
    "put": _put,
    "log": _log,
    "child": lambda: os.system("echo a child") and None,
    "close": lambda: sys.stdout.close(),
    **{f"_exit({code})": _leave(code) for code in (0, 1, 2, 3, 7, 42, 127, 255)},
}
PLACES = ("import", "__init__", "unavailable", "unsupported", "unsupported_shape", "settings", "prepare", "launches")
PLACES += ("verify", "poison", "changed_operands", "refuses")


def act() -> None:
    """Do what the environment says."""
    action = os.environ[VARIABLE].partition(" ")[2]
    if action in RAISED:
        raise RAISED[action]()
    DONE[action]()


def _is_due(place: str) -> bool:
    return os.environ.get(VARIABLE, "").partition(" ")[0] == place


def _acting(usual: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        act()
        return usual(*arguments)

    return call


class Faulty(SimulatedMatmul):
    name = "faulty.mm"

    def __init__(self) -> None:
        if _is_due("__init__"):
            act()

    def unavailable(self, backend: Any) -> Any:
        if _is_due("unavailable"):
            act()
        return super().unavailable(backend)

    def unsupported(self, backend: Any, problem: Any) -> Any:
        if _is_due("unsupported"):
            act()
        return super().unsupported(backend, problem)

    def unsupported_shape(self, problem: Any, shape: Any) -> Any:
        if _is_due("unsupported_shape") and shape.m == FAULTY_M:
            act()
        return super().unsupported_shape(problem, shape)

    def settings(self, backend: Any, problem: Any) -> Any:
        if _is_due("settings"):
            act()
        return super().settings(backend, problem)

    def refuses(self, error: Exception) -> bool:
        if _is_due("refuses"):
            act()
        return super().refuses(error)

    def prepare(self, backend: Any, problem: Any, shape: Any, *arguments: Any) -> Any:
        ready = super().prepare(backend, problem, shape, *arguments)
        if shape.m != FAULTY_M:
            return ready
        if _is_due("prepare"):
            act()
        if _is_due("refuses"):
            raise RuntimeError("asks whether it was refused")
        if _is_due("launches"):
            return replace(ready, launches=tuple(map(_acting, ready.launches)))
        places = [each for each in ("verify", "poison", "changed_operands") if _is_due(each)]
        return replace(ready, **{each: _acting(getattr(ready, each)) for each in places})


if _is_due("import"):
    act()
