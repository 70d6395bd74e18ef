"""Scripts that mamf has profiled; a folder of their own, because a script's folder is where it imports from first."""
