"""Decode problems: shapes, drawn lengths, exact FLOP and bytes, presets. Pure.

A launch is the attention of one layer: the new tokens of each sequence (queries) attend to all its tokens, whose keys
and values are cached. The queries are the last tokens of their sequence, so a causal mask is aligned to the bottom
right. FLOP count the visible pairs of queries and keys. Bytes count each cached token of a sequence once, whatever
number of heads share it, the queries, the output, and the tables that say where the tokens are.
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from mamf.backend import Backend
from mamf.dtypes import DTYPES
from mamf.errors import UsageError, parse_digits, parse_size, whole_number
from mamf.kernel import Buffer, Kernel, Work, aligned
from mamf.operation import DERIVED, DeclaredProblem, Preset, describe
from mamf.operations.attention.shapes import HeadDims, equal_widths

#: How the lengths of the sequences are chosen, by the letter in the text of a shape.
LENGTHS: Mapping[str, str] = {"": "equal", "u": "uniform", "t": "tail"}
_PATTERN = re.compile(r"b(\d+)h(\d+)(?:kv(\d+))?q(\d+)c(\d+)([ut]?)d(\d+)(?:v(\d+))?(l?)(?:p(\d+))?", re.ASCII)
_SIZES = ("batch", "heads", "kv_heads", "queries", "cache_len", "head_dim", "head_dim_v")
#: Width of the keys that DeepSeek's latent stands for: 128 and the position. It sets the scale of scores.
_KEYS_OF_LATENT = 192
#: Of 4 tokens, a sequence of a long tail has one on average.
_TAIL_EXPONENT = 3
#: The caches of a graph together are larger than any last-level cache, twice over.
_BYTES_OF_GRAPH, _MIN_IN_GRAPH, _MAX_IN_GRAPH = 512 * 2**20, 3, 64
_INDEX_BYTES = DTYPES["int32"].itemsize
SAME = "same"


@dataclass(frozen=True, order=True)
class DecodeShape:
    """``batch`` sequences, each with ``queries`` new tokens and at most ``cache_len`` tokens in all.

    - ``lengths``: ``equal`` (all sequences are full), ``uniform`` from 1 token to full, or a long ``tail``: most are
      short. The first sequence is always full. A sequence has no more queries than tokens.
    - ``page_size``: tokens of a page; pages are in random places of the cache. None: a contiguous cache, in which the
      sequences follow one another.
    - ``is_latent``: a token has one vector of ``head_dim``, whose first ``head_dim_v`` dimensions are also its values
      (DeepSeek's MLA, absorbed).

    Printed and parsed as ``b64h32kv8q1c8192ud128p16``: u for uniform and t for tail lengths; ``v512`` after the head
    dimension if values are narrower, ``l`` for a latent, ``p16`` for pages.
    """

    batch: int = field(metadata=describe("number of sequences", default="64, or 2 on a CPU", read=parse_size))
    heads: int = field(metadata=describe("number of query heads", default="32", read=parse_size, metavar="H"))
    kv_heads: int = field(
        metadata=describe("number of key and value heads; 1 is MQA", default="8", read=parse_size, metavar="H")
    )
    queries: int = field(
        metadata=describe("new tokens per sequence", default="1", keyword="query_lens", read=parse_size, metavar="S")
    )
    cache_len: int = field(
        metadata=describe(
            "tokens per full sequence, including the new ones",
            default="1024 8192 32768",
            keyword="cache_lens",
            read=parse_size,
            metavar="S",
        )
    )
    head_dim: int = field(
        metadata=describe(
            "head dimension; 576/512 if that of keys and values differs",
            default="128",
            keyword="head_dims",
            read=HeadDims.parse,
            metavar="D",
        )
    )
    head_dim_v: int = field(metadata=DERIVED)
    lengths: str = field(
        default="equal", metadata=describe("how sequence lengths are distributed", choices=tuple(LENGTHS.values()))
    )
    page_size: int | None = field(
        default=None,
        metadata=describe(
            "tokens per page of the cache; none for a contiguous cache",
            default="none",
            keyword="page_sizes",
            metavar="S",
        ),
    )
    is_latent: bool = field(
        default=False, metadata=describe("use one latent vector as key and value of all heads", keyword="latent")
    )

    def __post_init__(self) -> None:
        for name in _SIZES:
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        if self.page_size is not None:
            object.__setattr__(self, "page_size", whole_number("page size", self.page_size))
        of_sequence = f"{self.queries} new tokens in a sequence of {self.cache_len}"
        known, has_one_head = tuple(LENGTHS.values()), self.kv_heads == 1 and self.head_dim_v < self.head_dim
        refusals = (
            (
                self.heads % self.kv_heads,
                f"{self.heads} heads cannot share {self.kv_heads} kv heads: heads must be a multiple",
            ),
            (self.queries > self.cache_len, f"{of_sequence}: --cache-lens includes the new ones"),
            (self.lengths not in known, f"lengths {self.lengths!r}: they are {', '.join(known)}"),
            (
                self.is_latent and not has_one_head,
                "a latent has 1 kv head, and values narrower than keys, such as --head-dims 576/512",
            ),
        )
        for is_wrong, text in refusals:
            if is_wrong:
                raise UsageError(text)

    def __str__(self) -> str:
        kv = "" if self.kv_heads == self.heads else f"kv{self.kv_heads}"
        letter = next(letter for letter, name in LENGTHS.items() if name == self.lengths)
        value = "" if self.head_dim_v == self.head_dim else f"v{self.head_dim_v}"
        page = "" if self.page_size is None else f"p{self.page_size}"
        latent = "l" if self.is_latent else ""
        cache = f"c{self.cache_len}{letter}d{self.head_dim}{value}{latent}{page}"
        return f"b{self.batch}h{self.heads}{kv}q{self.queries}{cache}"

    @classmethod
    def parse(cls, text: str) -> DecodeShape:
        """Read the text that ``str`` writes. Raises UsageError for any other text."""
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"{text!r} is not a decode shape; for example b64h32kv8q1c8192d128p16")
        batch, heads, kv, queries, cache, letter, d, v, latent, page = match.groups()
        digits = (batch, heads, kv or heads, queries, cache, d, v or d)
        sizes = dict(zip(_SIZES, map(parse_digits, digits), strict=True))
        return cls(
            **sizes, lengths=LENGTHS[letter], page_size=parse_digits(page) if page else None, is_latent=bool(latent)
        )

    @property
    def head_dims(self) -> HeadDims:
        return HeadDims(self.head_dim, self.head_dim_v)

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        """The factor of scores before the softmax."""
        return 1 / math.sqrt(_KEYS_OF_LATENT if self.is_latent else self.head_dim)

    @property
    def has_equal_queries(self) -> bool:
        """Whether each sequence has as many queries as the others."""
        return self.lengths == "equal" or self.queries == 1

    @property
    def token_elements(self) -> int:
        """Elements of the cache for each token."""
        return self.head_dim if self.is_latent else self.kv_heads * (self.head_dim + self.head_dim_v)


@dataclass(frozen=True)
class Drawn:
    """The tokens, new tokens and pages of each sequence."""

    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    pages: tuple[int, ...]

    @property
    def pairs(self) -> int:
        """Visible pairs of queries and keys of one head: the last query sees every key, each earlier one fewer."""
        return sum(q * n - q * (q - 1) // 2 for q, n in zip(self.queries, self.lengths, strict=True))


@functools.lru_cache(maxsize=1024)
def draw_lengths(shape: DecodeShape, seed: int) -> Drawn:
    """Choose the lengths of a shape's sequences; the same for each kernel."""
    chooser = random.Random(f"{seed} {shape.batch} {shape.cache_len} {shape.lengths}")
    exponent = {"equal": 0, "uniform": 1, "tail": _TAIL_EXPONENT}[shape.lengths]
    shares = [1.0, *(chooser.random() ** exponent for _ in range(shape.batch - 1))]
    lengths = tuple(max(1, math.ceil(share * shape.cache_len)) for share in shares)
    pages = tuple(-(-length // (shape.page_size or length)) for length in lengths)
    return Drawn(lengths, tuple(min(shape.queries, length) for length in lengths), pages)


@dataclass(frozen=True)
class DecodeProblem(DeclaredProblem):
    """All parameters of a decode except its shape.

    ``cache_dtype``: of keys and values; ``same`` as queries and output, or one of 8 bits. ``graph``: a launch replays a
    graph with one captured launch for each of several caches, as serving replays the layers of a model.
    """

    operation: ClassVar[str] = "decode"

    dtype: str = "bfloat16"
    cache_dtype: str = field(
        default=SAME, metadata=describe("dtype of the cached keys and values", choices=(SAME, "float8_e4m3fn"))
    )
    graph: bool = field(
        default=False, metadata=describe("capture launches over several caches in one graph, and launch that")
    )
    data: str = "normal"
    seed: int = 0

    @property
    def stored_dtype(self) -> str:
        """The dtype of the cache."""
        return self.dtype if self.cache_dtype == SAME else self.cache_dtype

    def drawn(self, shape: DecodeShape) -> Drawn:
        return draw_lengths(shape, self.seed)

    def launches(self, shape: DecodeShape) -> int:
        """The number of captured launches of a graph, else 1."""
        if not self.graph:
            return 1
        return min(_MAX_IN_GRAPH, max(_MIN_IN_GRAPH, -(-_BYTES_OF_GRAPH // self._bytes_of_one(shape))))

    def work(self, shape: DecodeShape) -> Work:
        count = self.launches(shape)
        convention = "2*h*pairs*(d + dv), masked pairs not counted; each cached token, query, output and table once"
        flop = 2 * shape.heads * self.drawn(shape).pairs * (shape.head_dim + shape.head_dim_v)
        return Work(count * flop, count * self._bytes_of_one(shape), convention, "TB/s", has_products=True)

    def _bytes_of_one(self, shape: DecodeShape) -> int:
        drawn = self.drawn(shape)
        cache = sum(drawn.lengths) * shape.token_elements * DTYPES[self.stored_dtype].itemsize
        rows = sum(drawn.queries) * shape.heads * (shape.head_dim + shape.head_dim_v) * DTYPES[self.dtype].itemsize
        return cache + rows + _INDEX_BYTES * self._table_entries(shape)

    def _table_entries(self, shape: DecodeShape) -> int:
        """Entries of the tables of pages, lengths and, if they differ, query counts."""
        pages = 0 if shape.page_size is None else sum(self.drawn(shape).pages)
        has_lengths = shape.page_size is not None or shape.lengths != "equal"
        return pages + shape.batch * (has_lengths + (not shape.has_equal_queries))

    def slots(self, shape: DecodeShape) -> int:
        """Tokens that the cache has room for: whole pages."""
        drawn = self.drawn(shape)
        return sum(drawn.lengths) if shape.page_size is None else sum(drawn.pages) * shape.page_size

    def buffers(self, shape: DecodeShape, sets: int = 1, rewrite: bool = False) -> dict[str, Buffer]:
        """The device buffers: for each set queries, and keys and values or one latent."""
        count, slots = sets * self.launches(shape), self.slots(shape)
        queries = sum(self.drawn(shape).queries) * shape.heads * shape.head_dim
        widths = {"k": shape.kv_heads * shape.head_dim, "v": shape.kv_heads * shape.head_dim_v}
        if shape.is_latent:
            widths = {"k": shape.head_dim}
        cache = {name: Buffer(aligned(slots * width) * count, self.stored_dtype) for name, width in widths.items()}
        return {"q": Buffer(aligned(queries) * count, self.dtype), **cache}

    def nbytes(self, shape: DecodeShape, sets: int = 1, rewrite: bool = False) -> int:
        """Bytes of all operands and results."""
        return sets * self.work(shape).nbytes


_DEFAULT: Mapping[str, Sequence[object]] = {"batch": (64,), "cache_len": (1024, 8192, 32768)}
_LLAMA_8B: Mapping[str, Sequence[object]] = {"heads": (32,), "kv_heads": (8,), "head_dim": equal_widths(128)}
_DEEPSEEK: Mapping[str, Sequence[object]] = {
    "heads": (128,),
    "kv_heads": (1,),
    "head_dim": (HeadDims(576, 512),),
    "is_latent": (True,),
    "page_size": (64,),
}
_BOTH_CACHES = (None, 16)

PRESETS: Mapping[str, Preset[DecodeShape]] = {
    "llama-8b-decode": Preset(sizes={**_LLAMA_8B, **_DEFAULT, "batch": (8, 64), "page_size": _BOTH_CACHES}),
    "llama-70b-decode": Preset(
        sizes={**_LLAMA_8B, **_DEFAULT, "heads": (64,), "batch": (8, 64), "page_size": _BOTH_CACHES}
    ),
    "deepseek-v3-decode": Preset(sizes={**_DEEPSEEK, **_DEFAULT, "batch": (16, 128)}),
    "speculative": Preset(
        sizes={**_LLAMA_8B, "batch": (16,), "queries": (2, 4, 8, 16), "cache_len": (8192,), "page_size": _BOTH_CACHES}
    ),
    "chunked-prefill": Preset(
        sizes={**_LLAMA_8B, "batch": (4,), "queries": (512, 2048), "cache_len": (8192, 32768), "page_size": (16,)}
    ),
    "ragged-decode": Preset(
        sizes={**_LLAMA_8B, **_DEFAULT, "lengths": ("uniform", "tail"), "cache_len": (32768,), "page_size": (16,)}
    ),
    "ragged-prefill": Preset(
        shapes={
            DecodeShape(16, 32, 8, length, length, 128, 128, "uniform", page): ""
            for length in (2048, 8192)
            for page in _BOTH_CACHES
        }
    ),
}


class DecodeKernel(Kernel[DecodeProblem, DecodeShape]):
    """One implementation. ``dtypes`` and ``cache_dtypes``: those that it supports."""

    operation = "decode"
    reports_memory = True
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16")
    cache_dtypes: ClassVar[tuple[str, ...]] = (SAME,)

    def unsupported(self, backend: Backend, problem: DecodeProblem) -> str | None:
        if problem.cache_dtype not in self.cache_dtypes:
            return f"{self.name} has no cache of {problem.cache_dtype}; it has {', '.join(self.cache_dtypes)}"
        if problem.graph and not backend.has_graphs:
            return f"{backend.name} has no graphs of launches"
        return self._unsupported_dtype(problem) or backend.unsupported_dtype(problem.stored_dtype)
