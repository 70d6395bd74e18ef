"""Define the operation ``attention``, softmax(Q K^T / sqrt(d)) V, forward and backward, and its kernels."""
