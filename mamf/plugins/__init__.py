"""Somebody else's code, found by entry point and held to its contract."""
