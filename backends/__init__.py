"""Define mamf's backends, one file per vendor. This folder is installed as the package ``mamf_backends``."""
