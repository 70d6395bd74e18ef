"""The operations: a package or a pair of modules for each, with its shapes, work, kernels and columns."""
