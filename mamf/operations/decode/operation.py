"""The operation ``decode`` and the columns of its rows."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from mamf.backend import Backend, DeviceInfo
from mamf.measurement import TERA, Measurement
from mamf.operation import Operation, Preset, combine, random_sizes
from mamf.operations.attention.shapes import equal_widths
from mamf.operations.decode.shapes import LENGTHS, PRESETS, DecodeKernel, DecodeProblem, DecodeShape
from mamf.peaks import fastest_possible_flops, find_bandwidth

_DEFAULT_SIZES: Mapping[str, Sequence[Any]] = {
    "batch": (64,),
    "heads": (32,),
    "kv_heads": (8,),
    "queries": (1,),
    "cache_len": (1024, 8192, 32768),
    "head_dim": equal_widths(128),
    "lengths": ("equal",),
    "page_size": (None,),
    "is_latent": (False,),
}
# Smaller sizes, because what takes an accelerator a millisecond takes a CPU seconds.
_CPU_SIZES: Mapping[str, Sequence[Any]] = {"batch": (2,), "cache_len": (256, 1024)}


class Decode(Operation[DecodeProblem, DecodeShape]):
    name = "decode"
    kernel_group = "mamf.decode_kernels"
    kernel_type = DecodeKernel
    shape_type = DecodeShape
    problem_type = DecodeProblem
    shape_example = "b64h32kv8q1c8192d128p16"
    axis_label = "cache length"
    ranks_by_shape = True
    own_command = "attention --operation decode"
    chart = "caches"
    has_shares = True
    has_memory_shares = True
    reference = "float64 softmax over gathered pages on the device; one head of one sequence in float64 on the host"

    def default_shapes(self, backend: Backend) -> Sequence[DecodeShape]:
        return self.shapes_of({}, backend)

    def presets(self) -> Mapping[str, Preset[DecodeShape]]:
        return PRESETS

    def shapes_of(self, sizes: Mapping[str, Sequence[Any]], backend: Backend) -> Sequence[DecodeShape]:
        """Return a shape for every combination of sizes. The defaults are a layer of Llama 8B."""
        usual = _DEFAULT_SIZES if backend.is_accelerator else {**_DEFAULT_SIZES, **_CPU_SIZES}
        shapes = []
        for chosen in combine({**usual, **sizes}):
            keys, values = chosen.pop("head_dim")
            shapes.append(DecodeShape(**chosen, head_dim=keys, head_dim_v=values))
        return shapes

    def fastest_possible(
        self, info: DeviceInfo, problem: DecodeProblem, shape: DecodeShape | None = None
    ) -> float | None:
        """Return the highest possible rate in bytes/s, or None if no limit is known.

        It is the lower of two limits: peak compute at the problem's ratio of bytes to FLOP, and peak memory bandwidth
        if the data is too large for the cache.
        """
        if shape is None:
            return None
        from mamf.operations.bandwidth.operation import fastest_memory  # not for --help

        work, flops = problem.work(shape), fastest_possible_flops(info, problem.dtype)
        compute = flops and flops * work.nbytes / work.flop
        return min(filter(None, (compute, fastest_memory(info, work.nbytes))), default=None)

    def peak(self, info: DeviceInfo, problem: DecodeProblem) -> float | None:
        """Return the datasheet's memory bandwidth in bytes/s, or None if it is not known."""
        return find_bandwidth(info.name, info.compute_units)

    def columns(self, row: Measurement, info: DeviceInfo | None = None) -> Mapping[str, object]:
        """Return TFLOPS, the microseconds of a launch (of one captured launch in a graph), memory, planning time."""
        if not row.ok:
            return {}
        seconds = row.seconds / row.problem.count_launches(row.shape)
        planning_us = row.details.get("planning_us")
        return {
            "TFLOPS": row.flop / row.seconds / TERA,
            "us": seconds * 1e6,
            "memory MiB": row.peak_memory_bytes and row.peak_memory_bytes / 2**20,
            **({} if planning_us is None else {"planning us": float(planning_us)}),
        }

    def random_case(self, chooser: random.Random, terms: range) -> dict[str, Any]:
        """Draw a random problem with few sequences, so that the reference can compute all of its output."""
        batch, kv_heads = chooser.choice(((1, 1), (3, 2), (4, 1)))
        heads, width = kv_heads * chooser.choice((1, 4, 8)), chooser.choice((64, 128, 256))
        queries, cache = sorted(random_sizes(chooser, 2, terms, 2 * batch * heads * width))
        lengths, page = chooser.choice(tuple(LENGTHS.values())), chooser.choice((None, 16, 256))
        shape = DecodeShape(batch, heads, kv_heads, min(queries, 16), cache, width, width, lengths, page)
        return {"data": chooser.choice(("normal", "uniform")), "shape": shape}

    def describe_problem(self, problem: DecodeProblem) -> Sequence[str]:
        """Return the fields that differ from the defaults, as text."""
        rest = [
            f"cache {problem.stored_dtype}" if problem.stored_dtype != problem.dtype else "",
            "graph over rotating caches" if problem.graph else "",
            f"data {problem.data}" if problem.data != "normal" else "",
            f"seed {problem.seed}" if problem.seed else "",
        ]
        return [*filter(None, rest)]

    def describe_shape(self, shape: DecodeShape) -> str:
        cache = "contiguous" if shape.page_size is None else f"pages of {shape.page_size}"
        kv = "one latent" if shape.is_latent else f"{shape.kv_heads} kv"
        lengths = "" if shape.lengths == "equal" else f" ({shape.lengths} lengths)"
        return (
            f"batch {shape.batch}, {shape.heads} heads ({kv}), {shape.queries} on {shape.cache_len} tokens{lengths}, "
            f"head dimension {shape.head_dims}, {cache}"
        )

    def axis(self, shape: DecodeShape) -> float:
        return float(shape.cache_len)
