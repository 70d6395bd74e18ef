"""Kernels of a batch of products."""
