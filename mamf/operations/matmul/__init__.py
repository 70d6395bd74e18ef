"""The operation ``matmul``, C = A @ B, and its kernels."""
