"""Attention over a KV cache, as inference runs it: decode, speculative decoding and chunked prefill."""
