"""What a run leaves behind: written as it goes, read, compared. Nothing here measures."""
