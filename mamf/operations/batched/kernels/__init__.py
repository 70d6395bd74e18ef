"""Kernels for batched products."""
