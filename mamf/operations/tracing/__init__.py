"""Traces of torch.profiler: the events on a device, their classes and their shares of the time."""
