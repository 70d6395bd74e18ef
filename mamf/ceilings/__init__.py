"""Compute ceilings (the highest confirmed rates of a device), and the share of a ceiling that a measurement reaches."""
