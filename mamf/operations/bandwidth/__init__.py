"""Measure memory bandwidth with passes over arrays: copy, read, write and triad."""
