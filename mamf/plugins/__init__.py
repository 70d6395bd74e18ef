"""Finds plugins (backends, operations, kernels) by entry point, loads them and enforces their contracts."""
