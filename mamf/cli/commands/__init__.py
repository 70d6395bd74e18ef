"""What each command does, a file per command. Only the file of the command that runs is imported."""
