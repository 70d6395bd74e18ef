"""Check run logs that people contribute, decide their place in results/, and make the README.md pages there."""
