"""Model kernels: ways to run a training step, by attention kernel."""
