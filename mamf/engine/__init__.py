"""The measuring engine: it prepares, verifies and times kernels, and decides what a run measures next."""
