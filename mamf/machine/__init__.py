"""Describe the machine for run logs without private data such as user names, and run the checks of ``mamf doctor``."""
