"""Strategies choose the next step: shapes of a list, or kernels of any operation."""
