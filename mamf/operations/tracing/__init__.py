"""What ran on a device: events, their classes and shares, from traces of torch.profiler."""
