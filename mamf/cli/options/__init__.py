"""The options of each command, a file per command, which imports only what the options need."""
