"""A batch of products of one shape: C[i] = A[i] @ B[i]."""
