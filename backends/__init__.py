"""The backends, one file per vendor. Installed as the package ``mamf_backends`` and found by entry point only."""
