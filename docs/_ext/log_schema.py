"""The schema of run logs as tables and as JSON Schema, from mamf.logs.schema and the meanings in meanings.toml.

``{log-schema}`` in a page writes a table for each record; the site has ``log.schema.json`` beside that page. A field
without a meaning, and a meaning without a field, are warnings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomllib
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from mamf.logs import schema
from mamf.logs.run_log import SCHEMA
from mamf.logs.validator import ANY_NAME, PLAIN, Nullable

MEANINGS = Path(__file__).with_name("meanings.toml")
JSON_NAME = "log.schema.json"
_LOGGER = logging.getLogger(__name__)
_WORDS = {str: "text", bool: "true or false", int: "whole number", float: "number", PLAIN: "value, or list of values"}
_JSON_TYPES: Mapping[Any, Any] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    PLAIN: ["string", "boolean", "number", "array", "null"],
}
_PRODUCTS_ROW = schema.record_schema({"record": "measurement", "operation": "matmul"})
_REPEATABILITY: Any = schema.MEASUREMENT["repeatability"]
#: Objects that several records hold.
SHARED: Mapping[str, Any] = {
    "tool": schema.HEADER["tool"],
    "device": schema.HEADER["device"],
    "product": _PRODUCTS_ROW["problem"],
    "repeatability": _REPEATABILITY.schema,
    "plan": schema.PLAN,
    "search": schema.SEARCH,
    "options": schema.OPTIONS,
}
#: Each record by its title on the page, with its kind in ``record``.
RECORDS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "header": ("header", schema.HEADER),
    "measurement": ("measurement", schema.MEASUREMENT),
    "ceiling of products": ("ceiling", schema.record_schema({"record": "ceiling"})),
    "ceiling of another operation": ("ceiling", schema.record_schema({"record": "ceiling", "operation": ""})),
    "summary": ("summary", schema.SUMMARY),
    "resume": ("resume", schema.RESUME),
    "known_ceiling": ("known_ceiling", schema.KNOWN_CEILING),
    "counters": ("counters", schema.COUNTERS),
    "header of an imported log": ("header", schema.LEGACY_HEADER),
    "reported": ("reported", schema.REPORTED),
    "summary of an imported log": ("summary", schema.LEGACY_SUMMARY),
}


def _name_of_shared(of: Any) -> str:
    return next((name for name, shared in SHARED.items() if shared is of), "")


# -- tables ------------------------------------------------------------------------------------------------------------


def type_in_words(of: Any) -> str:
    if isinstance(of, Nullable):
        return f"{type_in_words(of.schema)}, or null"
    if isinstance(of, list):
        return f"list of: {type_in_words(of[0])}"
    if not isinstance(of, dict):
        return _WORDS[of]
    if shared := _name_of_shared(of):
        return f"[{shared}](#{shared.replace(' ', '-')})"
    return f"{type_in_words(of[ANY_NAME])} by name" if ANY_NAME in of else "object"


def fields(of: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each field with its dotted name and type; fields of objects follow, unless the object is shared."""
    for name, type in of.items():
        if name == ANY_NAME:
            continue
        path = f"{prefix}{name.removesuffix('?')}"
        yield f"{path}{'?' if name.endswith('?') else ''}", type
        inner = type.schema if isinstance(type, Nullable) else type
        inner, path = (inner[0], f"{path}[]") if isinstance(inner, list) else (inner, path)
        if isinstance(inner, dict) and not _name_of_shared(inner):
            yield from fields(inner, f"{path}.")


class Meanings:
    """What fields mean: those of one record, else those of any. ``unused``: table and field of texts not used yet."""

    def __init__(self) -> None:
        self._texts = tomllib.loads(MEANINGS.read_text(encoding="utf-8"))["log"]
        self.unused = {(table, name) for table, texts in self._texts.items() for name in texts}
        self.missing: list[str] = []

    def find(self, record: str, field: str) -> str:
        last = field.rpartition(".")[2]
        for table, name in ((record, field), ("any", field), ("any", last)):
            if name in self._texts.get(table, {}):
                self.unused.discard((table, name))
                return str(self._texts[table][name])
        self.missing.append(f"{record}: {field}")
        return ""


def markdown(meanings: Meanings) -> str:
    lines = []
    for title, of in [*((title, of) for title, (_, of) in RECORDS.items()), *SHARED.items()]:
        lines += [f"## {title}", "", "| field | type | meaning |", "|:--|:--|:--|"]
        for name, type in fields(of):
            name = name.removesuffix("?") if (is_optional := name.endswith("?")) else name
            words = type_in_words(type) + (", may be missing" if is_optional else "")
            lines.append(f"| `{name}` | {words} | {meanings.find(title, name)} |")
        lines.append("")
    return "\n".join(lines)


class LogSchema(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        meanings = Meanings()
        found = self.parse_text_to_nodes(markdown(meanings), allow_section_headings=True)
        for name in meanings.missing:
            _LOGGER.warning("%s has no meaning for the field %s", MEANINGS.name, name)
        for table, name in sorted(meanings.unused):
            _LOGGER.warning("%s: no record has the field %s.%s", MEANINGS.name, table, name)
        self.env.note_dependency(str(MEANINGS))
        self.env.note_dependency(__file__)
        link = nodes.reference("", JSON_NAME, refuri=JSON_NAME)  # beside the page, once that is written
        return [nodes.paragraph("", "", nodes.Text("JSON Schema of one line: "), link), *found]


# -- JSON Schema -------------------------------------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """Of one line of a log. Further fields are allowed: a log also holds what readers compute from others."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A line of a mamf run log, schema {SCHEMA}",
        "anyOf": [_json_record(title) for title in RECORDS],
        "$defs": {name: _json_object(of) for name, of in SHARED.items()},
    }


def _json_record(title: str) -> dict[str, Any]:
    kind, of = RECORDS[title]
    found = _json_object(of)
    found["title"] = title
    found["properties"] = {"record": {"const": kind}, **found["properties"]}
    found["required"] = ["record", *found["required"]]
    if of is schema.MEASUREMENT:
        found["if"] = {"properties": {"operation": {"const": "matmul"}}}
        found["then"] = {"properties": {"problem": {"$ref": "#/$defs/product"}}}
    return found


def _json_object(of: Mapping[str, Any]) -> dict[str, Any]:
    named = {name.removesuffix("?"): _json_type(type) for name, type in of.items() if name != ANY_NAME}
    required = [name for name in of if name != ANY_NAME and not name.endswith("?")]
    return {"type": "object", "properties": named, "required": required}


def _json_type(of: Any) -> dict[str, Any]:
    if isinstance(of, Nullable):
        return {"anyOf": [_json_type(of.schema), {"type": "null"}]}
    if isinstance(of, list):
        return {"type": "array", "items": _json_type(of[0])}
    if not isinstance(of, dict):
        return {"type": _JSON_TYPES[of]}
    if shared := _name_of_shared(of):
        return {"$ref": f"#/$defs/{shared}"}
    return {"type": "object", "additionalProperties": _json_type(of[ANY_NAME])} if ANY_NAME in of else _json_object(of)


def write_json(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        (Path(app.outdir) / JSON_NAME).write_text(json.dumps(json_schema(), indent=2) + "\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("log-schema", LogSchema)
    app.connect("build-finished", write_json)
    return {"parallel_read_safe": True}
