"""All devices of a machine, or of many, measured at once: is one of them slow, wrong or gone?"""
