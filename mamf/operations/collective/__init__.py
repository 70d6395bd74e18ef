"""Collectives: how fast ranks exchange data, by nccl-tests' conventions."""
