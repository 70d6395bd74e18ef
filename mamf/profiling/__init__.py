"""Where a script's step goes: its kernels and operations by class, as shares of the step. See docs/profiling.md."""

from __future__ import annotations

from mamf.profiling.marking import step

__all__ = ["step"]
