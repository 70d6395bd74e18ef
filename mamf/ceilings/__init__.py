"""Compute ceilings (the highest confirmed rates of a device), and the shares of a ceiling that other rows reach."""
