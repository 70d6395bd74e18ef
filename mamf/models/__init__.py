"""Models against the ceiling: where a ceiling is known from, what a training step makes of it, the FLOP of a model."""
