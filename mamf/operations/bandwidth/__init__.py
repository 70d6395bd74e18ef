"""Memory bandwidth: copy, read, write and triad over arrays."""
