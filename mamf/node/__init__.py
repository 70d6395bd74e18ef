"""Measures all devices of one or more machines at once, to find slow, faulty and missing ones."""
