"""Read and report the hardware counters of single kernels: what ran, for how many cycles, and what bounds it."""
