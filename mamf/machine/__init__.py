"""Describe the machine for run logs without private texts such as user names, and run the checks of ``mamf doctor``."""
