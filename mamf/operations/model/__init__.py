"""Measure training steps of language models: the forward pass, forward and backward, or with the optimizer."""
