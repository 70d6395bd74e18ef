"""The machine: its software environment and the checks of ``mamf doctor``."""
