"""Represent charts of measurements as data, and draw them with matplotlib."""
