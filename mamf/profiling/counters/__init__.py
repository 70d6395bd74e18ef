"""Hardware counters of single kernels, as the vendor's profiler reads them: what ran, for how many cycles, and what
bounds it.
"""
