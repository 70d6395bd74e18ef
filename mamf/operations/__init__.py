"""The operations: one package per operation, with its shapes, work, kernels and columns."""
