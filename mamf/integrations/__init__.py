"""Measure MFU and MAMFU in training loops: the FLOPS of a model as a share of the datasheet peak (MFU) and of the
maximum achievable matmul FLOPS (MAMFU).

These modules import torch or a training library, so import them only when they are used.
"""
