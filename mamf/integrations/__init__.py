"""What needs torch or a training library: each is imported here alone, when it is asked for."""
