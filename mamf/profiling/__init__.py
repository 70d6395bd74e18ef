"""Profiles a script: its kernels and operations by class, as shares of a training step. See docs/profiling.md.

A script without an optimizer marks the end of its steps by ``step``.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["step"]

#: Called at the end of each step of the script.
listeners: list[Callable[[], object]] = []


def step() -> None:
    """Says that a step of this script has ended. Without ``mamf profile`` it does nothing.

    >>> from mamf import profiling
    >>> profiling.step()
    """
    for listener in listeners:
        listener()
