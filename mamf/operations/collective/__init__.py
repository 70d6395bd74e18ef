"""Collectives: the bandwidth of data exchange between ranks, by the conventions of nccl-tests."""
