"""The measuring engine: prepares, verifies and times one step after another."""
