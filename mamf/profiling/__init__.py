"""Profiles a script: its kernels and operations by class, as shares of a training step. See docs/profiling.md."""

from __future__ import annotations

from mamf.profiling.marking import step

__all__ = ["step"]
