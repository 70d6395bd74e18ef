"""Measures all devices of one or more machines at the same time and finds slow, faulty and missing ones."""
