"""The memory of a training step: parameters, gradients, optimizer state, and the rest.

The peak is that of the profiled steps. The three parts are counted right after an optimizer step, when all exist.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mamf.errors import first_line
from mamf.profiling.profile import MemoryRow

PARAMETERS, GRADIENTS, STATE, REST = "parameters", "gradients", "optimizer state", "the rest"
_MOST_ENTRIES = 1_000_000


class MemoryWatch:
    """``snapshot``: the file for the history of allocations, for https://pytorch.org/memory_viz. ``remark``: why the
    file is missing, a line. Errors here never end the script.
    """

    def __init__(self, snapshot: Path) -> None:
        self.remark = ""
        self.rows: tuple[MemoryRow, ...] = ()
        self._snapshot = snapshot
        self._held: dict[int, Counter[tuple[str, str]]] = {}
        self._is_running = False

    def start(self) -> None:
        import torch

        self._is_running = True
        if not torch.cuda.is_available():
            self.remark = "there is no memory snapshot: torch keeps the history of allocations on CUDA devices alone"
            return
        try:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ENTRIES)
        except RuntimeError as error:
            self.remark = f"there is no memory snapshot: {first_line(error)}"

    def stepped(self, optimizer: Any) -> None:
        if self._is_running:
            self._held[id(optimizer)] = held_by(optimizer)

    def finish(self) -> None:
        """Has no effect after the first call."""
        if not self._is_running:
            return
        self._is_running = False
        self.rows = tuple(_rows(sum(self._held.values(), Counter())))
        if not self.remark:
            self._keep_snapshot()

    def _keep_snapshot(self) -> None:
        import torch

        try:
            torch.cuda.memory._dump_snapshot(str(self._snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)
        except (OSError, RuntimeError) as error:
            self.remark = f"there is no memory snapshot: {first_line(error)}"


def held_by(optimizer: Any) -> Counter[tuple[str, str]]:
    """Bytes by device and kind, each tensor once; only the local part of a sharded tensor."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    states = [value for state in optimizer.state.values() for value in state.values() if hasattr(value, "element_size")]
    by_kind = {
        PARAMETERS: parameters,
        GRADIENTS: [each.grad for each in parameters if each.grad is not None],
        STATE: states,
    }
    found: Counter[tuple[str, str]] = Counter()
    for kind, tensors in by_kind.items():
        for each in {id(each): each for each in tensors}.values():
            tensor = each.to_local() if hasattr(each, "to_local") else each
            found[str(tensor.device), kind] += tensor.numel() * tensor.element_size()
    return found


def _rows(held: Counter[tuple[str, str]]) -> Iterable[MemoryRow]:
    """The parts of the peak on the device that reports one; without such a device those on the CPU."""
    import torch

    peak = int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0
    device = f"cuda:{torch.cuda.current_device()}" if peak else "cpu"
    known = {kind: held[device, kind] for kind in (PARAMETERS, GRADIENTS, STATE)}
    yield from (MemoryRow(name, nbytes) for name, nbytes in known.items())
    yield MemoryRow(REST, max(0, peak - sum(known.values())) if peak else None)
