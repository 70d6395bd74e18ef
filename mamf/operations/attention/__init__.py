"""softmax(Q K^T / sqrt(d)) V, forward and backward."""
