"""Make tables and a JSON Schema of run logs from the structs of mamf.logs and the meanings in meanings.toml.

``{log-schema}`` in a page writes a table for each record; the site has ``log.schema.json`` next to that page. The
build warns of a field without a meaning and of a meaning without a field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import tomllib
from docutils import nodes
from msgspec import inspect
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from mamf.backend import DeviceInfo
from mamf.calibration import BurstTraits, SustainedTraits
from mamf.logs.legacy import HEADER_FIELDS, SUMMARY_FIELDS, FinderRun, ReportedFigures
from mamf.logs.recording import HeaderRecord, PlanOptions, PlanRecord, SearchRecord
from mamf.logs.records import STRUCT_BY_RECORD, ToolRecord
from mamf.logs.run_log import SCHEMA_VERSION
from mamf.operations.matmul.shapes import MatmulProblem
from mamf.statistics import Repeatability

MEANINGS = Path(__file__).with_name("meanings.toml")
JSON_NAME = "log.schema.json"
_LOGGER = logging.getLogger(__name__)
#: Objects that several records contain, by their title on the page.
SHARED: Mapping[str, type] = {
    "tool": ToolRecord,
    "device": DeviceInfo,
    "matmul problem": MatmulProblem,
    "repeatability": Repeatability,
    "plan": PlanRecord,
    "search": SearchRecord,
    "options": PlanOptions,
}
#: Each record by its title on the page: its kind in ``record``, its type, and which of the fields of that it has.
TITLES: Mapping[str, tuple[str, type, tuple[str, ...]]] = {
    "header": ("header", HeaderRecord, ()),
    **{kind: (kind, of, ()) for kind, of in STRUCT_BY_RECORD.items()},
    "header of an imported log": ("header", FinderRun, HEADER_FIELDS),
    "reported": ("reported", ReportedFigures, ()),
    "summary of an imported log": ("summary", FinderRun, SUMMARY_FIELDS),
}


# -- tables ------------------------------------------------------------------------------------------------------------

_WORDS: Mapping[type, str] = {
    inspect.StrType: "text",
    inspect.LiteralType: "text",
    inspect.BoolType: "true or false",
    inspect.IntType: "whole number",
    inspect.FloatType: "number",
    inspect.NoneType: "null",
    inspect.AnyType: "any value",
}
_LISTS = (inspect.ListType, inspect.VarTupleType)


def type_in_words(of: inspect.Type) -> str:
    if isinstance(of, inspect.Metadata):
        return type_in_words(of.type)
    if isinstance(of, inspect.UnionType):
        words = dict.fromkeys(map(type_in_words, of.types))
        if "text" in words and "number" in words:  # any field of a shape or a problem
            return "value, or list of values" if any(isinstance(each, _LISTS) for each in of.types) else "value"
        return ", or ".join(word for word in words if word != "whole number" or "number" not in words)
    if isinstance(of, inspect.TupleType):
        return f"list of: {type_in_words(of.item_types[0])}"
    if isinstance(of, _LISTS):
        return f"list of: {type_in_words(of.item_type)}"
    if isinstance(of, inspect.DictType):
        return f"{type_in_words(of.value_type)} by name"
    shared = next((name for name, kind in SHARED.items() if kind is getattr(of, "cls", None)), "")
    return f"[{shared}](#{shared.replace(' ', '-')})" if shared else _WORDS.get(type(of), "object")


def fields(of: type, only: tuple[str, ...] = (), prefix: str = "") -> Iterator[tuple[str, inspect.Field]]:
    """Each field with its dotted name; fields of objects follow, unless the object is shared."""
    found = inspect.type_info(of)
    assert isinstance(found, (inspect.StructType, inspect.DataclassType))
    for each in found.fields:
        types = each.type.types if isinstance(each.type, inspect.UnionType) else (each.type,)
        kinds = [getattr(inner.item_type if isinstance(inner, _LISTS) else inner, "cls", None) for inner in types]
        is_of_traits = of in (BurstTraits, SustainedTraits) and Repeatability in kinds  # traits are written without it
        if (only and each.name not in only) or is_of_traits:
            continue
        yield prefix + each.name, each
        for kind in kinds:
            if kind is not None and kind not in SHARED.values():
                is_list = any(isinstance(inner, _LISTS) for inner in types)
                yield from fields(kind, (), f"{prefix}{each.name}{'[]' if is_list else ''}.")


class Meanings:
    """Find the meaning of a field: that of its record, or else the one that all records share. ``unused``: the table
    and the field of each meaning that no field has used.
    """

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
    for title, of, only in (
        *((title, of, only) for title, (_, of, only) in TITLES.items()),
        *((title, of, ()) for title, of in SHARED.items()),
    ):
        lines += [f"## {title}", "", "| field | type | meaning |", "|:--|:--|:--|"]
        for name, each in fields(of, only):
            words = type_in_words(each.type) + ("" if each.required else ", may be missing")
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
    """Of one line of a log. Further fields are allowed, because newer logs may have more."""
    types = [of for _, of, _ in TITLES.values()]
    _, shared = msgspec.json.schema_components([*types, *SHARED.values()], ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A line of a mamf run log, schema {SCHEMA_VERSION}",
        "anyOf": [_json_record(title, shared[of.__name__]) for title, (_, of, _) in TITLES.items()],
        "$defs": shared,
    }


def _json_record(title: str, of: dict[str, Any]) -> dict[str, Any]:
    kind, _, only = TITLES[title]
    properties = {name: each for name, each in of["properties"].items() if not only or name in only}
    required = only if kind == "summary" and only else [name for name in of.get("required", ()) if name in properties]
    tier = {"tier": {"const": "legacy"}} if kind == "header" and only else {}
    return {
        "title": title,
        "type": "object",
        "properties": {"record": {"const": kind}, **tier, **properties},
        "required": ["record", *tier, *required],
    }


def write_json(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        (Path(app.outdir) / JSON_NAME).write_text(json.dumps(json_schema(), indent=2) + "\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("log-schema", LogSchema)
    app.connect("build-finished", write_json)
    return {"parallel_read_safe": True}
