"""The ceilings of results/ for programs: index.json with its JSON Schema, and ceilings.csv. docs/site.md shows them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mamf.logs.records import significant_digits
from mamf.measurement import TERA
from mamf.pages.site_data import ALL_TIERS, CeilingLine
from mamf.report.text import csv_text

#: Of the feed. It changes if a field is removed, renamed or gets another meaning; new fields leave it.
SCHEMA = 1
_TITLE = "Measured ceilings of matrix products by device, dtype and regime"


@dataclass(frozen=True)
class Field:
    """``kind``: a type of JSON Schema, or several."""

    name: str
    kind: str | Sequence[str]
    description: str
    read: Callable[[CeilingLine], Any]


def _rounded(value: float | None) -> float | None:
    return None if value is None else significant_digits(value)


FIELDS = (
    Field("device", "string", "The device's name as torch reports it", lambda line: line.device),
    Field("vendor", "string", '"unknown" if no log names it', lambda line: line.vendor),
    Field("dtype", "string", "torch's name, or mamf's for a scaled format", lambda line: line.dtype),
    Field(
        "regime",
        "string",
        "burst (highest clock), sustained (power limit, as in training), classic (the loop of mamf-finder); "
        "of tier legacy the statistic of mamf-finder",
        lambda line: line.regime,
    ),
    Field("tflops", "number", "1e12 FLOP/s of the fastest card (int8: operations)", lambda line: _rounded(line.tflops)),
    Field(
        "low",
        ["number", "null"],
        "Lower end of the 95 % repeat interval, TFLOPS",
        lambda line: line.interval and _rounded(line.interval.low),
    ),
    Field(
        "high",
        ["number", "null"],
        "Upper end of the 95 % repeat interval, TFLOPS",
        lambda line: line.interval and _rounded(line.interval.high),
    ),
    Field(
        "datasheet_tflops",
        ["number", "null"],
        "The datasheet's dense peak, null if no datasheet is listed",
        lambda line: line.peak and _rounded(line.peak.flops / TERA),
    ),
    Field(
        "tier",
        "string",
        "complete; unconfirmed (no second card reaches it yet); interrupted; legacy (not checked). Use complete",
        lambda line: line.tier,
    ),
    Field("cards", "integer", "How many cards were measured; 0 if unknown", lambda line: len(line.cards)),
    Field("lowest_tflops", ["number", "null"], "TFLOPS of the slowest card", lambda line: _rounded(line.lowest)),
    Field(
        "compute_units",
        ["integer", "null"],
        "Of the fastest card",
        lambda line: line.entry and line.entry.header["device"]["compute_units"],
    ),
    Field(
        "power_limit_watts",
        ["number", "null"],
        "Of the fastest card",
        lambda line: line.entry and line.entry.header["device"]["power_limit_watts"],
    ),
    Field("source", "string", "The log, as a path in results/", lambda line: line.place.as_posix()),
    Field("software", "object", "Versions by name: torch, libraries, driver", lambda line: dict(line.software)),
)


def feed_json(lines: Sequence[CeilingLine]) -> str:
    """index.json: a line per ceiling."""
    head = f'{{"schema": {SCHEMA}, "title": {json.dumps(_TITLE)}, "ceilings": ['
    rows = (json.dumps({field.name: field.read(line) for field in FIELDS}, allow_nan=False) for line in lines)
    return head + ",".join(f"\n{row}" for row in rows) + "\n]}\n"


def feed_csv(lines: Sequence[CeilingLine]) -> str:
    """ceilings.csv: the same, software as text."""
    names = [field.name for field in FIELDS]
    rows = [dict(zip(names, (_as_cell(field.read(line)) for field in FIELDS), strict=True)) for line in lines]
    return csv_text(rows) or ",".join(names) + "\n"


def _as_cell(value: Any) -> Any:
    return ", ".join(f"{name} {version}" for name, version in value.items()) if isinstance(value, dict) else value


def feed_schema() -> str:
    """index.schema.json."""
    fields: dict[str, dict[str, Any]] = {
        field.name: {"type": field.kind, "description": field.description} for field in FIELDS
    }
    fields["tier"]["enum"] = list(ALL_TIERS)
    fields["software"]["additionalProperties"] = {"type": "string"}
    names = list(fields)
    ceilings = {"type": "array", "items": {"type": "object", "required": names, "properties": fields}}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": _TITLE,
        "type": "object",
        "required": ["schema", "ceilings"],
        "properties": {"schema": {"const": SCHEMA}, "title": {"type": "string"}, "ceilings": ceilings},
    }
    return json.dumps(schema, indent=2) + "\n"
