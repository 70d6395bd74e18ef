"""Profiles a script: its kernels and operations by class, as shares of a training step. See docs/profiling.md."""
