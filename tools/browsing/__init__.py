"""Pages of every kind made from logs, and a Chromium to open them in: for tests/browser and tools/screenshots.py."""
