"""The commands, one file each. Only the file of the command that runs is imported."""
