"""Measurements as documents, and documents as text. Returns strings; the command line prints them."""
