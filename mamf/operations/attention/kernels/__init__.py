"""Attention kernels: one file per library."""
