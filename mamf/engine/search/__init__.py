"""Ceilings are sought: which shape comes next, and which rounds confirm it."""
