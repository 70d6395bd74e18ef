"""Attack mamf with seeded random inputs: damaged logs, odd command lines, killed runs and inputs of unlimited size."""
