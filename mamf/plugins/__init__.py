"""Plugins: found by entry point, with one guard that enforces their contracts."""
