"""Turn measurements into documents and charts, and documents into text that the command line prints."""
