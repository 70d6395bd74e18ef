"""Checks contributed run logs, moves them into results/ and writes the README.md pages there."""
