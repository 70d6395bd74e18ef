"""Ways to run a step, by what computes its attention."""
