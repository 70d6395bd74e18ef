"""The search for ceilings (highest rates of a device): which shape to measure next, and how its rate is confirmed."""
