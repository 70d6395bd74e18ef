"""The ceilings of results/ for programs: index.json with its JSON Schema, and ceilings.csv. docs/site.md shows them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from mamf.logs.records import significant_digits
from mamf.measurement import TERA
from mamf.pages.site_data import ALL_TIERS, CeilingLine
from mamf.report.text import csv_text

#: Of the feed. It changes if a field is removed, renamed or gets another meaning; new fields leave it.
SCHEMA = 1
_TITLE = "Measured ceilings of matrix products by device, dtype and regime"

#: By name the type in JSON Schema, the description, and how it is read from a ceiling.
FIELDS: dict[str, tuple[Any, str, Callable[[CeilingLine], Any]]] = {
    "device": ("string", "The device's name as torch reports it", lambda line: line.device),
    "vendor": ("string", '"unknown" if no log names it', lambda line: line.vendor),
    "dtype": ("string", "torch's name, or mamf's for a scaled format", lambda line: line.dtype),
    "regime": (
        "string",
        "burst (highest clock), sustained (power limit, as in training), classic (the loop of mamf-finder); of tier "
        "legacy the statistic of mamf-finder",
        lambda line: line.regime,
    ),
    "tflops": (
        "number",
        "1e12 FLOP/s of the fastest card (int8: operations)",
        lambda line: significant_digits(line.tflops),
    ),
    "low": (
        *(["number", "null"], "Lower end of the 95 % repeat interval, TFLOPS"),
        lambda line: line.interval and significant_digits(line.interval.low),
    ),
    "high": (
        *(["number", "null"], "Upper end of the 95 % repeat interval, TFLOPS"),
        lambda line: line.interval and significant_digits(line.interval.high),
    ),
    "datasheet_tflops": (
        *(["number", "null"], "The datasheet's dense peak; null if no datasheet is listed"),
        lambda line: line.peak and significant_digits(line.peak.flops / TERA),
    ),
    "tier": (
        "string",
        "complete; unconfirmed (no second card reaches it yet); interrupted; legacy (not checked). Use complete",
        lambda line: line.tier,
    ),
    "cards": ("integer", "How many cards were measured; 0 if unknown", lambda line: len(line.cards)),
    "lowest_tflops": (
        *(["number", "null"], "TFLOPS of the slowest card"),
        lambda line: significant_digits(line.cards[-1].tflops) if line.cards else None,
    ),
    "compute_units": (
        *(["integer", "null"], "Of the fastest card"),
        lambda line: line.entry and line.entry.header["device"]["compute_units"],
    ),
    "power_limit_watts": (
        *(["number", "null"], "Of the fastest card"),
        lambda line: line.entry and line.entry.header["device"]["power_limit_watts"],
    ),
    "source": ("string", "The log, as a path in results/", lambda line: line.place.as_posix()),
    "software": ("object", "Versions by name: torch, libraries, driver", lambda line: dict(line.software)),
}


def _record(line: CeilingLine) -> dict[str, Any]:
    return {name: read(line) for name, (_, _, read) in FIELDS.items()}


def feed_json(lines: Sequence[CeilingLine]) -> str:
    """index.json: a line per ceiling."""
    rows = ",".join(f"\n{json.dumps(_record(line), allow_nan=False)}" for line in lines)
    return f'{{"schema": {SCHEMA}, "title": {json.dumps(_TITLE)}, "ceilings": [{rows}\n]}}\n'


def feed_csv(lines: Sequence[CeilingLine]) -> str:
    """ceilings.csv: the same, software as text."""
    rows = [_record(line) | {"software": ", ".join(map(" ".join, line.software.items()))} for line in lines]
    return csv_text(rows) or ",".join(FIELDS) + "\n"


def feed_schema() -> str:
    """index.schema.json."""
    fields = {name: {"type": kind, "description": text} for name, (kind, text, _) in FIELDS.items()}
    fields["tier"]["enum"] = list(ALL_TIERS)
    fields["software"]["additionalProperties"] = {"type": "string"}
    ceilings = {"type": "array", "items": {"type": "object", "required": list(fields), "properties": fields}}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": _TITLE,
        "type": "object",
        "required": ["schema", "ceilings"],
        "properties": {"schema": {"const": SCHEMA}, "title": {"type": "string"}, "ceilings": ceilings},
    }
    return json.dumps(schema, indent=2) + "\n"
