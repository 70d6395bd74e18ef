"""Define the operation ``decode``, attention over cached keys and values in inference, and its kernels.

The operation covers decode, speculative decoding and chunked prefill.
"""
