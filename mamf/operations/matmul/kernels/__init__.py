"""Matmul kernels: one file per library."""
