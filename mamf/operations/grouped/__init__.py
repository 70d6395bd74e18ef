"""Grouped products: each group of tokens is multiplied with the weights of its expert."""
