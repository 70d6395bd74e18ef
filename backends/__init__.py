"""Backends: one file per vendor. Installed as ``mamf_backends`` and found by entry point only."""
