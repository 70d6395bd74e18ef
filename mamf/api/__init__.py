"""The Python API: calls that measure, and calls that read logs."""
