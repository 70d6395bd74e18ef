"""Scripts that mamf has profiled; a separate folder, because Python imports from a script's folder first."""
