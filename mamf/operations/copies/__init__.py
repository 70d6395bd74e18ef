"""Copies from one memory to another: host and device, device and device."""
