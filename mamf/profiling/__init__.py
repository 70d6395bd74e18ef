"""Profile a training script: what share of a step each class of kernels and operations takes. See docs/profiling.md."""
