"""Define the operation ``decode``: its shapes, random sequence lengths, exact FLOP and bytes, presets and columns.

A launch computes the attention of one layer: the new tokens of each sequence are the queries, and they attend to the
cached keys and values of the whole sequence. The queries are the last tokens of their sequence, so the causal mask is
aligned to the bottom right. The FLOP count only the unmasked pairs of a query and a key. The bytes count the queries,
the output, the tables that locate the tokens, and each cached token once, even if several query heads share the token.
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mamf.backend import Backend, DeviceInfo
from mamf.dtypes import DTYPES
from mamf.errors import UsageError, advise_against_commas, parse_digits, parse_size, require_whole_number
from mamf.kernel import Buffer, Kernel, Work, round_up_to_alignment
from mamf.measurement import TERA, Measurement
from mamf.operation import DERIVED_METADATA, CheckedProblem, Operation, Preset, describe, draw_sizes, yield_combinations
from mamf.operations.attention.operation import HeadDims
from mamf.peaks import compute_max_flops, find_datasheet_bandwidth

#: The distributions of sequence lengths, by the letter that represents each distribution in the text of a shape.
LENGTH_DISTRIBUTION_BY_LETTER: Mapping[str, str] = {"": "equal", "u": "uniform", "t": "tail"}
_SHAPE_PATTERN = re.compile(r"b(\d+)h(\d+)(?:kv(\d+))?q(\d+)c(\d+)([ut]?)d(\d+)(?:v(\d+))?(l?)(?:p(\d+))?", re.ASCII)
_SIZE_FIELD_NAMES = ("batch", "heads", "kv_heads", "queries", "cache_len", "head_dim", "head_dim_v")
#: The head dimension of DeepSeek's keys before they are compressed to a latent: 128, plus 64 for the position. If the
#: cache contains latents, scores are divided by the square root of this dimension.
_DEEPSEEK_KEY_DIM = 192
#: With ``tail`` lengths, a sequence has ``cache_len`` * x**3 tokens, with a random x from 0 to 1 (a mean of 1/4).
_TAIL_EXPONENT = 3
#: A graph, such as a CUDA graph, has enough launches to read _GRAPH_CACHE_BYTES in total, which is twice the largest
#: last-level cache of any accelerator. It has at least _MIN_GRAPH_LAUNCHES and at most _MAX_GRAPH_LAUNCHES launches.
_GRAPH_CACHE_BYTES, _MIN_GRAPH_LAUNCHES, _MAX_GRAPH_LAUNCHES = 512 * 2**20, 3, 64
_INDEX_BYTES = DTYPES["int32"].itemsize
SAME_AS_QUERIES = "same"


@dataclass(frozen=True, order=True)
class DecodeShape:
    """The sizes of a batch: ``batch`` sequences of up to ``cache_len`` tokens, the last ``queries`` of which are new.

    - ``lengths``: the number of tokens of a sequence: always ``cache_len`` (``equal``), random from 1 to ``cache_len``
      (``uniform``), or mostly short and sometimes long (``tail``). The first sequence always has ``cache_len`` tokens.
      If a sequence is shorter than ``queries``, all of its tokens are queries.
    - ``page_size``: the number of tokens in a page of the cache. The pages of a sequence are at random positions. None:
      the cache has no pages, and the tokens of each sequence follow those of the previous one.
    - ``is_latent``: whether each token has a single vector with ``head_dim`` elements, which is the key of all heads,
      and whose first ``head_dim_v`` elements are also the value (DeepSeek's MLA with absorbed projections).

    ``str`` returns text such as ``b64h32kv8q1c8192ud128p16``, which ``parse`` reads. After the cache length, u means
    uniform and t means tail lengths. After the head dimension, ``v512`` means 512 elements per value, ``l`` means a
    latent, and ``p16`` means pages of 16 tokens.

    Raises UsageError if the sizes contradict one another.
    """

    batch: int = field(metadata=describe("number of sequences", default="64, or 2 on a CPU", parse_text=parse_size))
    heads: int = field(metadata=describe("number of query heads", default="32", parse_text=parse_size, metavar="H"))
    kv_heads: int = field(
        metadata=describe(
            "number of key and value heads; 1 means multi-query attention (MQA)",
            default="8",
            parse_text=parse_size,
            metavar="H",
        )
    )
    queries: int = field(
        metadata=describe(
            "number of new tokens per sequence", default="1", keyword="query_lens", parse_text=parse_size, metavar="S"
        )
    )
    cache_len: int = field(
        metadata=describe(
            "number of tokens of the longest sequence, including the new tokens",
            default="1024 8192 32768, or 256 1024 on a CPU",
            keyword="cache_lens",
            parse_text=parse_size,
            metavar="S",
        )
    )
    head_dim: int = field(
        metadata=describe(
            "head dimension; 576/512 if keys have dimension 576 and values have dimension 512",
            default="128",
            keyword="head_dims",
            parse_text=HeadDims.parse,
            metavar="D",
        )
    )
    head_dim_v: int = field(metadata=DERIVED_METADATA)
    lengths: str = field(
        default="equal",
        metadata=describe(
            "distribution of sequence lengths: all equal, uniform, or many short and few long (tail)",
            choices=tuple(LENGTH_DISTRIBUTION_BY_LETTER.values()),
        ),
    )
    page_size: int | None = field(
        default=None,
        metadata=describe(
            "number of tokens in a page of the cache; none for a cache without pages",
            default="none",
            keyword="page_sizes",
            metavar="S",
        ),
    )
    is_latent: bool = field(
        default=False,
        metadata=describe("cache one latent vector per token, which all heads share (MLA)", keyword="latent"),
    )

    def __post_init__(self) -> None:
        for name in _SIZE_FIELD_NAMES:
            object.__setattr__(self, name, require_whole_number(name, getattr(self, name)))
        if self.page_size is not None:
            object.__setattr__(self, "page_size", require_whole_number("page size", self.page_size))
        known = tuple(LENGTH_DISTRIBUTION_BY_LETTER.values())
        fits_latent = self.kv_heads == 1 and self.head_dim_v < self.head_dim
        refusals = (
            (
                self.heads % self.kv_heads,
                f"the number of query heads ({self.heads}) must be a multiple of the number of "
                f"kv heads ({self.kv_heads}): change one of them",
            ),
            (
                self.queries > self.cache_len,
                f"{self.queries} new tokens do not fit in a sequence of {self.cache_len} tokens: "
                "--cache-lens includes the new tokens",
            ),
            (self.lengths not in known, f"unknown lengths {self.lengths!r}: choose from {', '.join(known)}"),
            (
                self.is_latent and not fits_latent,
                "--latent needs 1 kv head, and a smaller head dimension for values than for keys: "
                "use --kv-heads 1 --head-dims 576/512",
            ),
        )
        for is_wrong, text in refusals:
            if is_wrong:
                raise UsageError(text)

    def __str__(self) -> str:
        kv = "" if self.kv_heads == self.heads else f"kv{self.kv_heads}"
        letter = next(letter for letter, name in LENGTH_DISTRIBUTION_BY_LETTER.items() if name == self.lengths)
        value = "" if self.head_dim_v == self.head_dim else f"v{self.head_dim_v}"
        page = "" if self.page_size is None else f"p{self.page_size}"
        cache = f"c{self.cache_len}{letter}d{self.head_dim}{value}{'l' if self.is_latent else ''}{page}"
        return f"b{self.batch}h{self.heads}{kv}q{self.queries}{cache}"

    @classmethod
    def parse(cls, text: str) -> DecodeShape:
        """Read the text that ``str`` writes. Raises UsageError for any other text."""
        match = _SHAPE_PATTERN.fullmatch(text.strip())
        if match is None:
            raise UsageError(
                f"{text!r} is not a decode shape: write it like b64h32kv8q1c8192d128p16{advise_against_commas(text)}"
            )
        batch, heads, kv, queries, cache, letter, d, v, latent, page = match.groups()
        sizes = map(parse_digits, (batch, heads, kv or heads, queries, cache, d, v or d))
        return cls(
            **dict(zip(_SIZE_FIELD_NAMES, sizes, strict=True)),
            lengths=LENGTH_DISTRIBUTION_BY_LETTER[letter],
            page_size=parse_digits(page) if page else None,
            is_latent=bool(latent),
        )

    @property
    def head_dims(self) -> HeadDims:
        return HeadDims(self.head_dim, self.head_dim_v)

    @property
    def heads_per_kv_head(self) -> int:
        """The number of query heads that share one kv head."""
        return self.heads // self.kv_heads

    @property
    def score_scale(self) -> float:
        """The factor by which Q K^T is multiplied before the softmax."""
        return 1 / math.sqrt(_DEEPSEEK_KEY_DIM if self.is_latent else self.head_dim)

    @property
    def has_equal_query_counts(self) -> bool:
        """Whether all sequences have the same number of queries."""
        return self.lengths == "equal" or self.queries == 1


@dataclass(frozen=True)
class SequenceSizes:
    """The sizes of all sequences of a launch. The sequence lengths are random unless all are equal.

    - ``sequence_lengths``, ``query_counts``, ``page_counts``: the number of tokens, of new tokens and of pages of each
      sequence.
    - ``cache_slot_count``: the number of tokens for which the cache has room, including unused room in the last page of
      each sequence.
    """

    sequence_lengths: tuple[int, ...]
    query_counts: tuple[int, ...]
    page_counts: tuple[int, ...]
    cache_slot_count: int

    @property
    def unmasked_pairs_per_head(self) -> int:
        """The number of unmasked pairs of a query and a key in all sequences, per head.

        The last query of a sequence sees all keys, and each query sees one key fewer than the next query.
        """
        return sum(q * n - q * (q - 1) // 2 for q, n in zip(self.query_counts, self.sequence_lengths, strict=True))


@functools.lru_cache(maxsize=1024)
def draw_sequence_sizes(shape: DecodeShape, seed: int) -> SequenceSizes:
    """Draw random sequence lengths. They depend only on the shape and the seed, so all kernels get the same lengths."""
    chooser = random.Random(f"{seed} {shape.batch} {shape.cache_len} {shape.lengths}")
    exponent = {"equal": 0, "uniform": 1, "tail": _TAIL_EXPONENT}[shape.lengths]
    shares = [1.0, *(chooser.random() ** exponent for _ in range(shape.batch - 1))]
    lengths = tuple(max(1, math.ceil(share * shape.cache_len)) for share in shares)
    pages = tuple(-(-length // (shape.page_size or length)) for length in lengths)
    slots = sum(lengths) if shape.page_size is None else sum(pages) * shape.page_size
    return SequenceSizes(lengths, tuple(min(shape.queries, length) for length in lengths), pages, slots)


@dataclass(frozen=True)
class DecodeProblem(CheckedProblem):
    """All parameters of decode attention except its shape.

    - ``cache_dtype``: the dtype of keys and values: ``same`` (as queries and output), or an 8-bit dtype.
    - ``graph``: whether a launch replays a graph, such as a CUDA graph. The graph launches the kernel on several KV
      caches, one after another, like the graph of a server, which launches the kernel for each layer of a model.
    """

    operation: ClassVar[str] = "decode"

    dtype: str = "bfloat16"
    cache_dtype: str = field(
        default=SAME_AS_QUERIES,
        metadata=describe(
            "dtype of the cached keys and values; same: the dtype of the queries",
            choices=(SAME_AS_QUERIES, "float8_e4m3fn"),
        ),
    )
    graph: bool = field(
        default=False,
        metadata=describe("capture launches over several caches in one graph, and time the graph's replay"),
    )
    data: str = "normal"
    seed: int = 0

    @property
    def resolved_cache_dtype(self) -> str:
        """The dtype of the cached keys and values, never ``same``."""
        return self.dtype if self.cache_dtype == SAME_AS_QUERIES else self.cache_dtype

    def count_kernel_launches(self, shape: DecodeShape) -> int:
        """Return how many times one launch runs the kernel: once or, if it replays a graph, once for each cache."""
        if not self.graph:
            return 1
        return min(
            _MAX_GRAPH_LAUNCHES, max(_MIN_GRAPH_LAUNCHES, -(-_GRAPH_CACHE_BYTES // self._count_launch_bytes(shape)))
        )

    def compute_work(self, shape: DecodeShape) -> Work:
        count = self.count_kernel_launches(shape)
        convention = "2*h*pairs*(d + dv), masked pairs not counted; each cached token, query, output and table once"
        flop = (
            2
            * shape.heads
            * draw_sequence_sizes(shape, self.seed).unmasked_pairs_per_head
            * (shape.head_dim + shape.head_dim_v)
        )
        return Work(count * flop, count * self._count_launch_bytes(shape), convention, "TB/s", has_matmul_flop=True)

    def _count_launch_bytes(self, shape: DecodeShape) -> int:
        sizes, width = draw_sequence_sizes(shape, self.seed), shape.head_dim + shape.head_dim_v
        cached_width = shape.head_dim if shape.is_latent else shape.kv_heads * width
        cache_bytes = sum(sizes.sequence_lengths) * cached_width * DTYPES[self.resolved_cache_dtype].itemsize
        query_and_output_bytes = sum(sizes.query_counts) * shape.heads * width * DTYPES[self.dtype].itemsize
        # A launch also reads tables, which contain the pages and the length of each sequence and, if the numbers of
        # queries differ, the number of queries of each sequence.
        is_paged = shape.page_size is not None
        entries_per_sequence = (is_paged or shape.lengths != "equal") + (not shape.has_equal_query_counts)
        table_entries = is_paged * sum(sizes.page_counts) + shape.batch * entries_per_sequence
        return cache_bytes + query_and_output_bytes + _INDEX_BYTES * table_entries

    def list_buffers(self, shape: DecodeShape, sets: int = 1, rewrite: bool = False) -> dict[str, Buffer]:
        """Return the device buffers for ``sets`` operand sets, by name: ``q``, ``k`` and, without a latent, ``v``."""
        count, sizes = sets * self.count_kernel_launches(shape), draw_sequence_sizes(shape, self.seed)
        queries = sum(sizes.query_counts) * shape.heads * shape.head_dim
        widths = {"k": shape.kv_heads * shape.head_dim, "v": shape.kv_heads * shape.head_dim_v}
        if shape.is_latent:
            widths = {"k": shape.head_dim}
        cache = {
            name: Buffer(round_up_to_alignment(sizes.cache_slot_count * width) * count, self.resolved_cache_dtype)
            for name, width in widths.items()
        }
        return {"q": Buffer(round_up_to_alignment(queries) * count, self.dtype), **cache}

    def count_bytes(self, shape: DecodeShape, sets: int = 1, rewrite: bool = False) -> int:
        """Return the bytes of the operands and outputs of ``sets`` operand sets."""
        return sets * self.compute_work(shape).nbytes


_DEFAULT_BATCH_AND_CACHE_SIZES: Mapping[str, Sequence[object]] = {"batch": (64,), "cache_len": (1024, 8192, 32768)}
_LLAMA_8B_SIZES: Mapping[str, Sequence[object]] = {
    "heads": (32,),
    "kv_heads": (8,),
    "head_dim": (HeadDims(128, 128),),
}
_PRESET_PAGE_SIZES = (None, 16)

DECODE_PRESETS: Mapping[str, Preset[DecodeShape]] = {
    "llama-8b-decode": Preset(
        sizes={**_LLAMA_8B_SIZES, **_DEFAULT_BATCH_AND_CACHE_SIZES, "batch": (8, 64), "page_size": _PRESET_PAGE_SIZES}
    ),
    "llama-70b-decode": Preset(
        sizes={
            **_LLAMA_8B_SIZES,
            **_DEFAULT_BATCH_AND_CACHE_SIZES,
            "heads": (64,),
            "batch": (8, 64),
            "page_size": _PRESET_PAGE_SIZES,
        }
    ),
    "deepseek-v3-decode": Preset(
        sizes={
            **_DEFAULT_BATCH_AND_CACHE_SIZES,
            "batch": (16, 128),
            "heads": (128,),
            "kv_heads": (1,),
            "head_dim": (HeadDims(576, 512),),
            "is_latent": (True,),
            "page_size": (64,),
        }
    ),
    "speculative": Preset(
        sizes={
            **_LLAMA_8B_SIZES,
            "batch": (16,),
            "queries": (2, 4, 8, 16),
            "cache_len": (8192,),
            "page_size": _PRESET_PAGE_SIZES,
        }
    ),
    "chunked-prefill": Preset(
        sizes={**_LLAMA_8B_SIZES, "batch": (4,), "queries": (512, 2048), "cache_len": (8192, 32768), "page_size": (16,)}
    ),
    "ragged-decode": Preset(
        sizes={
            **_LLAMA_8B_SIZES,
            **_DEFAULT_BATCH_AND_CACHE_SIZES,
            "lengths": ("uniform", "tail"),
            "cache_len": (32768,),
            "page_size": (16,),
        }
    ),
    "ragged-prefill": Preset(
        shapes={
            DecodeShape(16, 32, 8, length, length, 128, 128, "uniform", page): ""
            for length in (2048, 8192)
            for page in _PRESET_PAGE_SIZES
        }
    ),
}


class DecodeKernel(Kernel[DecodeProblem, DecodeShape]):
    """A kernel for decode attention. ``dtypes``, ``cache_dtypes``: the supported dtypes of queries and of the cache."""

    operation = "decode"
    reports_memory = True
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16")
    cache_dtypes: ClassVar[tuple[str, ...]] = (SAME_AS_QUERIES,)

    def explain_unsupported_problem(self, backend: Backend, problem: DecodeProblem) -> str | None:
        if problem.cache_dtype not in self.cache_dtypes:
            return f"{self.name} supports only --cache-dtype {' or '.join(self.cache_dtypes)}"
        if problem.graph and not backend.has_graphs:
            return f"{backend.name} cannot capture launches in a graph: remove --graph"
        return self._explain_unsupported_dtype(problem) or backend.explain_unsupported_dtype(
            problem.resolved_cache_dtype
        )


_DEFAULT_SIZES: Mapping[str, Sequence[Any]] = {
    "batch": (64,),
    "heads": (32,),
    "kv_heads": (8,),
    "queries": (1,),
    "cache_len": (1024, 8192, 32768),
    "head_dim": (HeadDims(128, 128),),
    "lengths": ("equal",),
    "page_size": (None,),
    "is_latent": (False,),
}
# The default sizes on a CPU are smaller, because work that takes an accelerator a millisecond takes a CPU seconds.
_DEFAULT_CPU_SIZES: Mapping[str, Sequence[Any]] = {"batch": (2,), "cache_len": (256, 1024)}


class DecodeOperation(Operation[DecodeProblem, DecodeShape]):
    name = "decode"
    kernel_group = "mamf.decode_kernels"
    kernel_type = DecodeKernel
    shape_type = DecodeShape
    problem_type = DecodeProblem
    shape_example = "b64h32kv8q1c8192d128p16"
    axis_label = "cache length"
    ranks_by_shape = True
    command_name = "attention --operation decode"
    chart_kind = "caches"
    shows_ceiling_shares = True
    shows_bandwidth_shares = True
    reference = "float64 softmax over gathered pages on the device; one head of one sequence in float64 on the host"

    def choose_default_shapes(self, backend: Backend) -> Sequence[DecodeShape]:
        return self.build_shapes({}, backend)

    def list_presets(self) -> Mapping[str, Preset[DecodeShape]]:
        return DECODE_PRESETS

    def build_shapes(self, sizes: Mapping[str, Sequence[Any]], backend: Backend) -> Sequence[DecodeShape]:
        """Return a shape for every combination of sizes. The default sizes are those of a layer of Llama 8B."""
        default_sizes = _DEFAULT_SIZES if backend.is_accelerator else {**_DEFAULT_SIZES, **_DEFAULT_CPU_SIZES}
        shapes = []
        for combination in yield_combinations({**default_sizes, **sizes}):
            key_dim, value_dim = combination.pop("head_dim")
            shapes.append(DecodeShape(**combination, head_dim=key_dim, head_dim_v=value_dim))
        return shapes

    def find_max_possible_rate(
        self, info: DeviceInfo, problem: DecodeProblem, shape: DecodeShape | None = None
    ) -> float | None:
        """Return the highest possible rate in bytes/s, or None if no limit is known.

        The compute limit is the peak FLOP/s divided by the FLOP per byte of a launch. The memory limit is the peak
        bandwidth. It applies only if the data is too large for the device's cache. Return the lower limit.
        """
        if shape is None:
            return None
        # Import here instead of at the top of the file, so that --help is fast.
        from mamf.operations.bandwidth.operation import get_max_memory_rate

        work, flops = problem.compute_work(shape), compute_max_flops(info, problem.dtype)
        compute = flops and flops * work.nbytes / work.flop
        return min(filter(None, (compute, get_max_memory_rate(info, work.nbytes))), default=None)

    def find_peak_rate(self, info: DeviceInfo, problem: DecodeProblem) -> float | None:
        """Return the memory bandwidth in the device's datasheet in bytes/s, or None if it is not known."""
        return find_datasheet_bandwidth(info.name, info.compute_units)

    def make_columns(self, row: Measurement, info: DeviceInfo | None = None) -> Mapping[str, object]:
        """Return additional columns of a report: TFLOPS, the microseconds that the kernel takes for one cache (if a
        timed launch reads several), the memory that a launch needs and, if the kernel reports it, the planning time.
        """
        if not row.ok:
            return {}
        kernel_launch_count = row.problem.count_kernel_launches(row.shape)
        planning_us = row.details.get("planning_us")
        return {
            "TFLOPS": row.flop / row.seconds / TERA,
            **({"us": row.seconds / kernel_launch_count * 1e6} if kernel_launch_count > 1 else {}),
            "memory MiB": row.peak_memory_bytes and row.peak_memory_bytes / 2**20,
            **({} if planning_us is None else {"planning us": float(planning_us)}),
        }

    def draw_random_case(self, chooser: random.Random, terms: range) -> dict[str, Any]:
        """Draw a random problem with few sequences, so that the reference can compute the whole output."""
        batch, kv_heads = chooser.choice(((1, 1), (3, 2), (4, 1)))
        heads, width = kv_heads * chooser.choice((1, 4, 8)), chooser.choice((64, 128, 256))
        queries, cache = sorted(draw_sizes(chooser, 2, terms, 2 * batch * heads * width))
        lengths, page = chooser.choice(tuple(LENGTH_DISTRIBUTION_BY_LETTER.values())), chooser.choice((None, 16, 256))
        shape = DecodeShape(batch, heads, kv_heads, min(queries, 16), cache, width, width, lengths, page)
        return {"data": chooser.choice(("normal", "uniform")), "shape": shape}

    def describe_problem(self, problem: DecodeProblem) -> Sequence[str]:
        """Return texts for reports: each field of the problem that differs from its default."""
        texts = (
            f"cache {problem.resolved_cache_dtype}" if problem.resolved_cache_dtype != problem.dtype else "",
            "graph over rotating caches" if problem.graph else "",
            f"data {problem.data}" if problem.data != "normal" else "",
            f"seed {problem.seed}" if problem.seed else "",
        )
        return [*filter(None, texts)]

    def describe_shape(self, shape: DecodeShape) -> str:
        cache = "contiguous" if shape.page_size is None else f"pages of {shape.page_size}"
        kv = "one latent" if shape.is_latent else f"{shape.kv_heads} kv heads"
        lengths = "" if shape.lengths == "equal" else f", {shape.lengths} lengths"
        return (
            f"batch {shape.batch}, {shape.heads} heads ({kv}), {shape.cache_len} cached tokens "
            f"({shape.queries} new){lengths}, head dimension {shape.head_dims}, {cache}"
        )

    def find_axis_position(self, shape: DecodeShape) -> float:
        return float(shape.cache_len)
