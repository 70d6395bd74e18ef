"""Which step comes next: shapes of a list, or kernels of any operation beside the product of their ceiling."""
