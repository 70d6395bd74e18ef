"""Measure all devices of one or more machines at the same time, and find slow, faulty and missing ones."""
