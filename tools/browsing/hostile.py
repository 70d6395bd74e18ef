"""Write logs with texts that try to run scripts, load files, or break out of the HTML element that contains them.

A script that runs sets ``window.pwned``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

_PARTS = (
    "</title></style></script>",
    "<script>window.pwned = 1</script>",
    "<img src=x onerror=window.pwned=1>",
    "\"><svg onload='window.pwned=1'>",
    "' onmouseover='window.pwned=1' onfocus='window.pwned=1' autofocus tabindex=1 x='",
    '" onmouseover="window.pwned=1" style="position:fixed;inset:0" x="',
    "<style>@import 'http://evil.invalid/a.css'; body { display: none }</style>",
    "<base href='http://evil.invalid/'><link rel=stylesheet href='http://evil.invalid/b.css'>",
    "<meta http-equiv=refresh content='0;url=http://evil.invalid/'>",
    "<iframe src='javascript:parent.pwned=1'></iframe><form action='http://evil.invalid/'><button>send</button></form>",
    "<a href='javascript:window.pwned=1'>click</a> [click](javascript:window.pwned=1)",
    "'; script-src 'unsafe-inline'; style-src *; x='",
    "--> ]]> <!-- <![CDATA[",
    "{{ 7 * 7 }} {% raw %}",
    "\u202e\u2066\u200b\x1b[31m\x00\ud800",
)
PAYLOAD = " ".join(_PARTS)
ADDRESS = "javascript:window.pwned=1//"
#: The fields that mamf interprets. Their values stay as they are, because mamf would refuse a log with other values.
INTERPRETED_FIELDS = {"record", "status", "best_by", "command", "shape", "shapes", "phase", "regime", "regimes"}
INTERPRETED_FIELDS |= {"reference", "dtype", "out_dtype", "layout", "data", "direction", "backward_count", "clock"}
INTERPRETED_FIELDS |= {"uuid_hash", "started", "time", "order"}


def write_hostile_logs(folder: Path, *logs: Path) -> list[Path]:
    """Write a copy of each log with PAYLOAD in all texts that mamf only prints, and with markup in its file name.
    Return the paths.
    """
    folder.mkdir()
    return [
        _write_hostile_log(folder / f"{number} <img src=x onerror=window.pwned=1>.jsonl", log)
        for number, log in enumerate(logs)
    ]


def _write_hostile_log(path: Path, log: Path) -> Path:
    records = [
        rewrite_texts(json.loads(line), _add_payload, {*INTERPRETED_FIELDS, "operation"})
        for line in log.read_text(encoding="utf-8").splitlines()
    ]
    header = records[0]
    header["notes"] = header["command"] = f"mamf find {PAYLOAD}"
    header["findings"] = [f"{level} {PAYLOAD}" for level in ("ok", "warn", PAYLOAD)] + [ADDRESS]
    header["device"]["versions"] = {PAYLOAD: PAYLOAD, "address": ADDRESS}
    header["environment"]["variables"] = {PAYLOAD: ADDRESS}
    for record in records:
        if record["record"] == "measurement":
            record |= {"remarks": [PAYLOAD, ADDRESS], "throttle_reasons": [PAYLOAD], "details": {"ran": PAYLOAD}}
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def _add_payload(text: str) -> str:
    return f"{text} {PAYLOAD}"


def rewrite_texts(value: Any, rewrite: Callable[[str], str], kept_fields: Collection[str], name: str = "") -> Any:
    """Return a copy of a JSON value in which ``rewrite`` has replaced each text, except in ``kept_fields``.

    ``name``: the field that contains the value.
    """
    if name in kept_fields:
        return value
    if isinstance(value, str):
        return rewrite(value)
    if isinstance(value, dict):
        return {key: rewrite_texts(element, rewrite, kept_fields, key) for key, element in value.items()}
    return [rewrite_texts(element, rewrite, kept_fields) for element in value] if isinstance(value, list) else value
