"""The highest figures of a device, how they are sought, and what share of them something else reaches."""
