"""Observe the profiled steps of a training script: peak memory, dtypes, and which module launched a kernel.

Each class here is a watch. A watch observes the steps between the calls of ``start`` and ``finish``; later calls of
``finish`` have no effect. If a watch cannot observe something, its ``remark`` says why in one line. An error of a watch
never ends the script.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from mamf.errors import UnavailableError, describe_error, get_first_message_line
from mamf.profiling.classes import MODULE_PREFIX
from mamf.profiling.profile import PEAK_MEMORY, DtypeRow, MemoryRow, replace_layer_numbers

_PARAMETERS, _GRADIENTS, _OPTIMIZER_STATE = "parameters", "gradients", "optimizer state"
#: Maximum number of events that torch keeps in its history of allocations.
_MAX_HISTORY_ENTRIES = 1_000_000
#: Maximum number of modules in the table of the modules that allocated the peak memory.
_MAX_MODULE_ROWS = 10


class MemoryWatch:
    """A watch that measures peak memory, and how much of it parameters, gradients and optimizer state take.

    Right after an optimizer's step, when all tensors of the optimizer exist, the watch counts their bytes. If a
    ModuleRangeWatch calls ``record_module_span`` for each module, ``rows`` also says which modules allocated most of
    the peak memory.

    ``snapshot_path``: the file to which the watch writes the history of allocations. https://pytorch.org/memory_viz
    displays such files.
    """

    def __init__(self, snapshot_path: Path) -> None:
        self.remark = ""
        self.rows: tuple[MemoryRow, ...] = ()
        self._snapshot_path = snapshot_path
        #: For each forward pass of a module: start and end in ns since the epoch, and the module's name.
        self.module_spans: list[tuple[int, int, str]] = []
        self._bytes_by_optimizer: dict[int, Counter[tuple[str, str]]] = {}
        self._is_running = False

    @contextmanager
    def record_module_span(self, name: str) -> Iterator[None]:
        start = time.time_ns()
        try:
            yield
        finally:
            self.module_spans.append((start, time.time_ns(), name))

    def start(self) -> None:
        self._is_running = True
        if not torch.cuda.is_available():
            self.remark = (
                "there is no memory snapshot, because torch keeps the history of allocations on CUDA devices only"
            )
            return
        with self._record_error_in_remark():
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.memory._record_memory_history(max_entries=_MAX_HISTORY_ENTRIES)

    def record_optimizer_step(self, optimizer: Any, *_: object) -> None:
        if self._is_running:
            self._bytes_by_optimizer[id(optimizer)] = count_optimizer_bytes(optimizer)

    def finish(self) -> None:
        if not self._is_running:
            return
        self._is_running = False
        self.rows = tuple(_make_memory_rows(sum(self._bytes_by_optimizer.values(), Counter())))
        if not self.remark:
            with self._record_error_in_remark():
                torch.cuda.memory._dump_snapshot(str(self._snapshot_path))
                history = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
                torch.cuda.memory._record_memory_history(enabled=None)
                self.rows += tuple(make_memory_rows_by_module(history, self.module_spans))

    @contextmanager
    def _record_error_in_remark(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            self.remark = f"mamf could not take a memory snapshot: {get_first_message_line(error)}"


def count_optimizer_bytes(optimizer: Any) -> Counter[tuple[str, str]]:
    """Return the bytes of an optimizer's parameters, gradients and state, by device and kind.

    Each tensor counts once. Only the part of a sharded tensor that is on this rank counts.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    tensors_by_kind = {
        _PARAMETERS: parameters,
        _GRADIENTS: [each.grad for each in parameters if each.grad is not None],
        _OPTIMIZER_STATE: [
            each for state in optimizer.state.values() for each in state.values() if hasattr(each, "numel")
        ],
    }
    bytes_by_device_and_kind: Counter[tuple[str, str]] = Counter()
    for kind, tensors in tensors_by_kind.items():
        for each in {id(each): each for each in tensors}.values():
            tensor = each.to_local() if hasattr(each, "to_local") else each
            bytes_by_device_and_kind[str(tensor.device), kind] += tensor.numel() * tensor.element_size()
    return bytes_by_device_and_kind


def _make_memory_rows(bytes_by_device_and_kind: Counter[tuple[str, str]]) -> Iterable[MemoryRow]:
    """Yield rows for parameters, gradients, optimizer state, the rest of the peak memory, and the peak.

    The rows are for the current CUDA device. Without a CUDA device, they are for the CPU, and the size of the peak is
    None.
    """
    peak = int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else None
    device = f"cuda:{torch.cuda.current_device()}" if peak else "cpu"
    known_bytes = {kind: bytes_by_device_and_kind[device, kind] for kind in (_PARAMETERS, _GRADIENTS, _OPTIMIZER_STATE)}
    yield from (MemoryRow(name, nbytes) for name, nbytes in known_bytes.items())
    yield MemoryRow("the rest", max(0, peak - sum(known_bytes.values())) if peak else None)
    yield MemoryRow(PEAK_MEMORY, peak or None)


def make_memory_rows_by_module(
    history: Sequence[Mapping[str, Any]], module_spans: Iterable[tuple[int, int, str]]
) -> list[MemoryRow]:
    """Return rows that say how much of the peak memory each module allocated in its forward pass, largest first.

    ``history``: torch's record of allocations on a device, with times in us. ``module_spans``: start and end of each
    forward pass in ns, on the same clock as ``history``, and the module's name.
    """
    allocated_bytes, peak_bytes, peak_end = 0, 0, 0
    for index, entry in enumerate(history):
        allocated_bytes += {"alloc": 1, "free_requested": -1}.get(entry["action"], 0) * entry["size"]
        if allocated_bytes > peak_bytes:
            peak_bytes, peak_end = allocated_bytes, index + 1
    live_allocations: dict[int, Mapping[str, Any]] = {}
    for entry in history[:peak_end]:
        if entry["action"] == "alloc":
            live_allocations[entry["addr"]] = entry
        elif entry["action"] == "free_requested":
            live_allocations.pop(entry["addr"], None)
    bytes_by_module: Counter[str] = Counter()
    open_spans, later_spans = list[tuple[int, int, str]](), deque(sorted(module_spans))
    for entry in sorted(live_allocations.values(), key=itemgetter("time_us")):
        now = entry["time_us"] * 1000
        while later_spans and later_spans[0][0] <= now:
            open_spans.append(later_spans.popleft())
        open_spans = [each for each in open_spans if each[1] >= now]
        bytes_by_module[f"in {replace_layer_numbers(open_spans[-1][2])}" if open_spans else "in no module"] += entry[
            "size"
        ]
    return [MemoryRow(name, size) for name, size in bytes_by_module.most_common(_MAX_MODULE_ROWS)]


class DtypeWatch:
    """A watch that counts the dtypes of parameters, gradients, layer outputs, logits and losses.

    The counts show which tensors autocast computes in a dtype of lower precision.
    """

    def __init__(self) -> None:
        self.remark = ""
        self.rows: tuple[DtypeRow, ...] = ()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._cleanup = ExitStack()
        self._counted_optimizer_ids: set[int] = set()
        self._is_running = False

    def start(self) -> None:
        self._is_running = True
        for each in _list_eager_modules():
            if not any(True for _ in each.children()):
                self._cleanup.callback(
                    each.register_forward_hook(
                        lambda module, _, output: self._count_dtypes_of_tensors(
                            f"outputs of {type(module).__name__}", output
                        )
                    ).remove
                )
        # The first argument of cross_entropy is the logits, and the first argument of backward is the loss.
        for owner, name, row_name in (
            (torch.nn.functional, "cross_entropy", "logits"),
            (torch.autograd, "backward", "loss"),
        ):
            original = getattr(owner, name)
            setattr(owner, name, self._wrap_to_count_first_argument_dtype(original, row_name))
            self._cleanup.callback(setattr, owner, name, original)

    def record_optimizer_step(self, optimizer: Any, *_: object) -> None:
        if self._is_running and id(optimizer) not in self._counted_optimizer_ids:
            self._counted_optimizer_ids.add(id(optimizer))
            for each in (each for group in optimizer.param_groups for each in group["params"]):
                self._count_dtypes_of_tensors(_PARAMETERS, each)
                self._count_dtypes_of_tensors(_GRADIENTS, each.grad)

    def finish(self) -> None:
        self._is_running = False
        self._cleanup.close()
        self.rows = tuple(DtypeRow(*key, count) for key, count in sorted(self._counts.items()))

    def _wrap_to_count_first_argument_dtype(self, original: Callable[..., Any], row_name: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def count_dtype_and_call(first_argument: Any, *other_arguments: Any, **keywords: Any) -> Any:
            self._count_dtypes_of_tensors(row_name, first_argument)
            return original(first_argument, *other_arguments, **keywords)

        return count_dtype_and_call

    def _count_dtypes_of_tensors(self, row_name: str, value: Any) -> None:
        if hasattr(value, "dtype"):
            self._counts[row_name, str(value.dtype).removeprefix("torch.")] += 1
        elif isinstance(value, (tuple, list)):
            for each in value:
                self._count_dtypes_of_tensors(row_name, each)


class ModuleRangeWatch:
    """A watch that opens a range around the forward pass of each module. Profilers show a range as a named interval.

    ``open_backend``: returns the backend, or another object with ``open_profiler_window`` and ``open_profiler_range``.
    Only ``start`` calls this function, because the script may choose its device after ``__init__``.
    """

    def __init__(self, open_backend: Callable[[], Any]) -> None:
        self.remark = ""
        self._open_backend = open_backend
        self._backend: Any = None
        self._cleanup = ExitStack()
        #: The ranges that are open in each thread, with their modules, by thread id. With activation checkpointing, a
        #: module runs its forward pass again in the thread of the backward pass, while ranges may be open in the main
        #: thread.
        self._open_ranges: dict[int, list[tuple[Any, AbstractContextManager[object]]]] = defaultdict(list)
        #: Name of each module: its path from the outermost module that the script called, and its type.
        self._names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

    def start(self) -> None:
        with self._end_ranges_on_error():
            self._backend = backend = self._open_backend()
            if backend.open_profiler_range("a module") is None:
                raise UnavailableError(f"no profiler of {backend.info.name} ({backend.name}) shows ranges")
            self._cleanup.enter_context(backend.open_profiler_window("steps"))
            for each in _list_eager_modules():
                self._cleanup.callback(each.register_forward_pre_hook(self._open_range, prepend=True).remove)
                self._cleanup.callback(each.register_forward_hook(self._close_range, always_call=True).remove)

    def finish(self) -> None:
        with self._end_ranges_on_error():
            while ranges := self._open_ranges[threading.get_ident()]:
                ranges.pop()[1].__exit__(None, None, None)
            self._cleanup.close()

    @contextmanager
    def _end_ranges_on_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.remark = f"mamf could not mark the modules in the trace: {describe_error(error)}"
            self._open_ranges.clear()
            self._cleanup.close()

    def _open_range(self, module: Any, *_: object) -> None:
        if torch.compiler.is_compiling():  # torch.compile would make the range a part of the module's code.
            return
        with self._end_ranges_on_error():
            module_range = self._backend.open_profiler_range(self._get_module_name(module))
            module_range.__enter__()
            self._open_ranges[threading.get_ident()].append((module, module_range))

    def _close_range(self, module: Any, *_: object) -> None:
        ranges = () if torch.compiler.is_compiling() else self._open_ranges[threading.get_ident()]
        if ranges and ranges[-1][0] is module:
            with self._end_ranges_on_error():
                ranges.pop()[1].__exit__(None, None, None)

    def _get_module_name(self, module: Any) -> str:
        """Return a module's name, such as ``model.layers.0.mlp: LlamaMLP``."""
        if module not in self._names:
            for name, each in module.named_modules():
                module_type = type(each).__name__
                self._names.setdefault(each, f"{name}: {module_type}" if name else module_type)
        return self._names[module]


def make_range_provider(
    make_range: Callable[[str], AbstractContextManager[object]] = lambda name: torch.profiler.record_function(
        f"{MODULE_PREFIX}{name}"
    ),
) -> SimpleNamespace:
    """Make an object that ModuleRangeWatch can use instead of a backend.

    ``make_range``: returns a context manager for a range with the given name. By default, it adds the range to the
    trace of torch.profiler.
    """
    return SimpleNamespace(open_profiler_window=nullcontext, open_profiler_range=make_range)


# List the modules that torch.compile did not compile. A hook on a compiled module would make torch compile the module
# again within the profiled steps. For the same reason, mamf does not use a global hook on all modules.
def _list_eager_modules() -> list[Any]:
    modules = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    compiled_modules = [
        each for each in modules if hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None)
    ]
    compiled_submodules = {
        submodule
        for each in compiled_modules
        for submodule in each.modules()
        if submodule is not each or not hasattr(each, "_orig_mod")
    }
    return [each for each in modules if each not in compiled_submodules and not isinstance(each, torch.fx.GraphModule)]
