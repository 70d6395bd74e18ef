"""Attention over a cache of keys and values, as inference runs it: decode, speculative and chunked prefill."""
