"""Ceilings and roofs: the highest confirmed rates of a device, and the shares of them that other rows reach."""
