"""Define the operations that mamf measures: their shapes, exact FLOP and bytes, kernels and report columns."""
