"""The kernels that ship with mamf, one file a library. Found by entry point (group ``mamf.kernels``), never imported
by name.
"""
