"""The operation ``decode``, attention over cached keys and values in inference, and its kernels.

It covers decode, speculative decoding and chunked prefill.
"""
