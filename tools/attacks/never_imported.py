"""Named by crafted logs: that a log can have this imported is a fault, whatever it would do."""
