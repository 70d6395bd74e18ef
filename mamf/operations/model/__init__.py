"""Measure training steps of language models: the forward pass, the forward and backward passes, or the whole step with
the optimizer.
"""
