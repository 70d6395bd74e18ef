"""Define the operations that mamf measures: for each, its shapes, exact work, kernels and columns of reports."""
