"""The search for ceilings: which shape to measure next, and how the best one is confirmed."""
