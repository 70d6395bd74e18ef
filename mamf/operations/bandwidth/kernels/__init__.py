"""Kernels that move arrays through memory."""
