"""The backends of mamf, with one file per vendor. pip installs this folder as the package ``mamf_backends``."""
