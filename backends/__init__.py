"""One file a vendor: this listing is the support matrix. Installed as ``mamf_backends`` and found by entry point
only.
"""
