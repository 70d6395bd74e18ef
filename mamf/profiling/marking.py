"""Marks the end of a training step in scripts without an optimizer."""

from __future__ import annotations

from collections.abc import Callable

_listeners: list[Callable[[], object]] = []


def step() -> None:
    """Says that a step of this script has ended. Without ``mamf profile`` it does nothing.

    >>> from mamf import profiling
    >>> profiling.step()
    """
    for listener in _listeners:
        listener()


def listen(listener: Callable[[], object]) -> None:
    _listeners.append(listener)


def unlisten(listener: Callable[[], object]) -> None:
    _listeners.remove(listener)
