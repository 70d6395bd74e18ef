"""Measure MFU and MAMFU in training loops.

These modules import torch or a training library, so import them only when they are used.
"""
