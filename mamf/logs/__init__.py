"""Run logs: written during a run, read and compared afterwards. Nothing here measures."""
