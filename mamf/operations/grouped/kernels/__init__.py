"""Kernels of grouped products."""
