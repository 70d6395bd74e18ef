"""Profiles a script: how much of a training step each class of kernels and operations takes. See docs/profiling.md."""
