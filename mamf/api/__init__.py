"""mamf as calls: what measures, and what reads logs."""
