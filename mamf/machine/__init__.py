"""Describe the machine for run logs, without private texts (user names), and run the checks of ``mamf doctor``."""
