"""Profile a training script: report what share of a step each class of kernels takes. See docs/profiling.md."""
