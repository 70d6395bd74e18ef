"""What a log says of a machine: its software, its findings, its theoretical peaks."""
