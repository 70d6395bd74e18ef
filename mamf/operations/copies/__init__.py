"""Copies between memories: host and device, device and device."""
