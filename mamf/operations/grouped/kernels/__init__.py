"""Kernels for grouped products."""
