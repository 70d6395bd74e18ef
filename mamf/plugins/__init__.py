"""Find plugins (backends, operations, kernels) by entry point, load them and enforce their contracts."""
