"""Which rows of two logs belong together, and by which fields. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from mamf.logs.comparability import Difference, described
from mamf.logs.entries import Entry

# What may differ without a word: kernels are paired by name where they can be.
_ALWAYS_DROPPED = "kernel"


def values(rows: Iterable[Entry], name: str) -> list[object]:
    """The values of a field, once each, in the order of the log."""
    return list({row.fields[name]: None for row in rows if name in row.fields})


def field_differences(a: Sequence[Entry], b: Sequence[Entry]) -> list[Difference]:
    """Fields of the regime and the problem in which no row of A is like any row of B."""
    if not a or not b:
        return []
    names = [name for name in a[0].fields if name in b[0].fields and name not in ("shape", "kernel")]
    found = ((name, values(a, name), values(b, name)) for name in names)
    return [described(name, of_a, of_b) for name, of_a, of_b in found if not set(of_a) & set(of_b)]


def droppable(a: Sequence[Entry], b: Sequence[Entry]) -> list[Difference]:
    """Fields that rows can be paired without: one value throughout A, another throughout B."""
    apart = [each for each in field_differences(a, b) if len(values(a, each.what)) == len(values(b, each.what)) == 1]
    kernels = values(a, _ALWAYS_DROPPED), values(b, _ALWAYS_DROPPED)
    if len(kernels[0]) == len(kernels[1]) == 1 and kernels[0] != kernels[1]:
        apart.append(described(_ALWAYS_DROPPED, *kernels))
    return apart


def by_fields(rows: Iterable[Entry], left_out: Iterable[str]) -> dict[object, Entry]:
    """Rows by what they are paired by; their fields are what is left of them."""
    found: dict[object, Entry] = {}
    for row in rows:
        fields = {name: value for name, value in row.fields.items() if name not in set(left_out)}
        found[frozenset(fields.items())] = replace(row, fields=fields)
    return found


def is_paired(a: Entry, b: Entry | None) -> bool:
    return a.tflops is not None and b is not None and b.tflops is not None


def alone(own: Mapping[object, Entry], other: Mapping[object, Entry]) -> Iterable[tuple[Entry, Entry | None]]:
    """Rows with a figure here and none there, and what is there instead."""
    for key, entry in own.items():
        if entry.tflops is not None and not is_paired(entry, other.get(key)):
            yield entry, other.get(key)
