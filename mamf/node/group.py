"""The group of ranks, by torch.distributed: where they meet, how they agree, and what they tell one another."""

from __future__ import annotations

import torch
import torch.distributed


def agreed(own: float) -> float:
    """What rank 0 decided, in every rank: a decision to stop, to go on, or how many launches to queue."""
    decision = torch.tensor([own], dtype=torch.float64)
    torch.distributed.broadcast(decision, 0)
    return decision.item()
