"""Third-party code: found by entry point, with one guard that enforces its contract."""
