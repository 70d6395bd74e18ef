"""The search for ceilings: which shape to measure next, and which rounds confirm the best."""
