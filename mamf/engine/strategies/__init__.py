"""Strategies: which step of a run is measured next."""
