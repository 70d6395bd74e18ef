"""The measuring engine: prepares, verifies and times kernels."""
