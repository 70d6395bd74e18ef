"""Make pages of every kind from logs, and open them in Chromium: for tests/browser and tools/screenshots.py."""
