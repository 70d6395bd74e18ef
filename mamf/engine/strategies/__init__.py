"""The strategies of runs: each decides which kernel and shape a run measures next."""
