"""A training step of a language model: forward, forward and backward, or with the optimizer."""
