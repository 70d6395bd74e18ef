"""One step after another: measured, verified, timed."""
