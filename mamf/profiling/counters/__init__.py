"""Read the hardware counters of kernels, and report how many cycles a kernel takes and what bounds its speed."""
