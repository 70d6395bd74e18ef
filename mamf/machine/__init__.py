"""Describes the machine for logs without private texts, and runs the checks of ``mamf doctor``."""
