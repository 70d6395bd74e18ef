"""Checks contributed run logs, places them in results/ and writes the tables of results/README.md."""
