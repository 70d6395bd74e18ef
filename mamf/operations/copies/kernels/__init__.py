"""Kernels that copy between memories."""
