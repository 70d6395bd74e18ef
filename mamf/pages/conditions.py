"""Make the parts of a page that describe a run: when it started, and its device, software and settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mamf.report.document import Block, Table, make_text_table


def format_start_time(header: Mapping[str, Any]) -> str:
    return f"started {header['started'][:16].replace('T', ' ')}"


def make_conditions_blocks(header: Mapping[str, Any]) -> list[Block]:
    """Return two tables: the device, software and settings; and the findings of ``mamf doctor``, problems first."""
    device, environment = header["device"], header["environment"]
    clock, watts, memory = (device.get(name) for name in ("max_clock_hz", "power_limit_watts", "memory_bytes"))
    rows = {
        "device": device["name"],
        "maximum clock": f"{clock / 1e6:.0f} MHz" if clock else None,
        "power limit": f"{watts:.0f} W" if watts else None,
        "memory": f"{memory / 2**30:.0f} GiB" if memory else None,
        "driver": device.get("driver"),
        **device.get("versions", {}),
        **environment.get("packages", {}),
        "python": environment.get("python"),
        "system": environment.get("os"),
        "timer": header["timer"],
        "mamf": header.get("tool", {}).get("version"),
        **environment.get("variables", {}),
    }
    checks = [str(finding).partition(" ") for finding in header.get("findings", ())]
    checks.sort(key=lambda each: each[0].lower() == "ok")
    return [
        make_name_value_table(rows),
        make_text_table(("check", "found"), [(level, text.strip()) for level, _, text in checks]),
    ]


def make_name_value_table(values: Mapping[str, Any]) -> Table[Any]:
    """Return a table with a row for each name and its value. Names with an unknown or empty value are left out."""
    return make_text_table(("what", "value"), [(name, str(value)) for name, value in values.items() if value])
