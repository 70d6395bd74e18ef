"""The verdict of a node or of many, with the figures of every device, in any format. Returns strings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from mamf.node.figures import BURST, SUSTAINED, UNITS, Device, shown
from mamf.node.gathering import Run
from mamf.node.places import NOWHERE
from mamf.node.prometheus import exposition
from mamf.node.verdict import Verdict, distribution, lost, pace_figure, slowest_line
from mamf.report.text import by_column, csv_text, drawing, prose, told_once, whole

FORMATS = ("table", "json", "markdown", "csv", "prometheus")
_LEFT = ("device", "throttled", "node", "host", "figure", "collective")
_KNOWN = ("rank", "node", "index", "name", "uuid_hash", "host", "address")
_NCCL_TESTS = "collectives: bus bandwidth in GB/s by nccl-tests' formulas, by the size of a rank's larger buffer"


def render_node(format: str, run: Run, devices: Sequence[Device], verdict: Verdict, width: int | None = None) -> str:
    """``width``: of the terminal, None for all columns. A table and markdown begin with the reason."""
    if format == "json":
        return json.dumps(node_record(run, devices, verdict), indent=2) + "\n"
    if format == "csv":
        return csv_text(flat_rows(devices))
    if format == "prometheus":
        return exposition(devices, verdict)
    draw = drawing(format, width)
    gap = "\n" if format == "markdown" else ""
    others = told_once((finding.text, finding.level) for finding in verdict.findings[1:])
    parts = [prose([verdict.reason], format, gap) + prose(others, format, gap)]
    is_cluster = len({device.node for device in devices}) > 1
    tables = [by_device(devices), by_node(devices) if is_cluster else [], by_figure(devices), collectives(devices)]
    for rows in tables:
        if rows:
            columns, cells = by_column(rows)
            parts.append(draw(columns, cells, _LEFT))
    notes = [*verdict.notes, *([slowest_line(devices)] if verdict.findings else [])]
    notes += [f"not measured together: {run.apart}"] if run.apart else []
    notes += [_NCCL_TESTS] if collectives(devices) else []
    return "\n".join([*parts, prose(notes, format, gap)])


def by_device(devices: Sequence[Device]) -> list[dict[str, str]]:
    """A row a device: figures, what the sensors said, its rank among all by pace."""
    pace = pace_figure(devices)
    order = sorted((device for device in devices if pace in device.figures), key=lambda each: -each.figures[pace])
    ranks = {device.rank: number for number, device in enumerate(order, start=1)}
    rows = []
    for device in devices:
        row = {"device": device.who}
        for name in UNITS:
            if name in device.figures:
                row[f"{name} {UNITS[name][0]}"] = shown(name, device.figures[name]).split()[0]
            if name in (BURST, SUSTAINED) and name in device.half_widths:
                row[f"{name} +-%"] = f"{100 * device.half_widths[name]:.2f}"
        told = device.conditions
        row |= {"rank": str(ranks[device.rank])} if device.rank in ranks else {}
        row |= {"MHz": whole(told.clock_hz and told.clock_hz / 1e6), "W": whole(told.watts), "C": whole(told.celsius)}
        throttled = ", ".join(f"{reason} {share:.0%}" for reason, share in device.throttled.items())
        rows.append({**row, "throttled": throttled or "-"})
    return rows


def by_node(devices: Sequence[Device]) -> list[dict[str, str]]:
    """A row a node: its slowest device, and what its own pace loses to it."""
    pace, rows = pace_figure(devices), []
    for node in sorted({device.node for device in devices}):
        own = [device for device in devices if device.node == node]
        measured = [device for device in own if pace in device.figures]
        row = {
            "node": "unknown" if node == NOWHERE else str(node),
            "devices": str(len(own)),
            "failed": str(sum(bool(each.failures) for each in own)),
        }
        if hosts := sorted({device.host for device in own if device.host}):
            row["host"] = ", ".join(hosts)
        if measured:
            slowest = min(measured, key=lambda device: device.figures[pace])
            _, middle, _ = distribution([device.figures[pace] for device in measured])
            row |= {f"{pace} median": shown(pace, middle), "slowest": shown(pace, slowest.figures[pace])}
            row |= {"of device": str(slowest.index), "lost": f"{lost(measured):.1%}"}
        rows.append(row)
    return rows


def by_figure(devices: Sequence[Device]) -> list[dict[str, str]]:
    """A row a figure: how it spreads over all devices, where there are several."""
    rows = []
    for name in UNITS:
        values = [device.figures[name] for device in devices if name in device.figures]
        if len(values) > 1:
            low, middle, high = distribution(values)
            row = {"figure": name, "lowest": shown(name, low), "median": shown(name, middle)}
            rows.append({**row, "highest": shown(name, high), "spread": f"{high / low - 1:.1%}"})
    return rows


def collectives(devices: Sequence[Device]) -> list[dict[str, str]]:
    """A row a collective, a column a size: what the slowest rank saw, in GB/s."""
    rows: dict[str, dict[str, str]] = {}
    for name, rate in slowest_collectives(devices).items():
        collective, _, size = name.partition(" ")
        rows.setdefault(collective, {"collective": collective})[size] = f"{rate * 1e3:.4g}"
    return list(rows.values())


def slowest_collectives(devices: Iterable[Device]) -> dict[str, float]:
    """Bus bandwidth in TB/s by collective and size: ranks end together, so their figures differ by their timers."""
    found: dict[str, float] = {}
    for device in devices:
        for name, rate in device.collectives.items():
            found[name] = min(rate, found.get(name, rate))
    return found


def node_record(run: Run, devices: Sequence[Device], verdict: Verdict) -> dict[str, Any]:
    """All of it as JSON values; rates in 1e12 FLOP or bytes a second."""
    spreads = {name: [device.figures[name] for device in devices if name in device.figures] for name in UNITS}
    return {
        "level": verdict.level,
        "exit_code": verdict.exit_code,
        "reason": verdict.reason,
        "findings": [{"level": each.level, "rank": each.rank, "text": each.text} for each in verdict.findings],
        "notes": list(verdict.notes),
        "ranks": run.ranks,
        "not_together": run.apart,
        "slowest": slowest_line(devices),
        "lost_share": lost(devices),
        "pace": pace_figure(devices) if devices else SUSTAINED,
        "spread": {name: distribution(values) for name, values in spreads.items() if values},
        "collectives_bus_bandwidth": slowest_collectives(devices),
        "devices": [device.record() for device in devices],
    }


def flat_rows(devices: Sequence[Device]) -> list[dict[str, Any]]:
    """A row a device of equal columns."""
    rows = []
    for device in devices:
        told: dict[str, Any] = {
            **{
                f"{name}_{unit}": device.figures[name] * factor if name in device.figures else None
                for name, (unit, factor) in UNITS.items()
            },
            **{f"{name}_half_width": device.half_widths.get(name) for name in UNITS},
            "clock_mhz": device.conditions.clock_hz and device.conditions.clock_hz / 1e6,
            "watts": device.conditions.watts,
            "celsius": device.conditions.celsius,
            "throttled": " ".join(f"{reason}:{share:g}" for reason, share in device.throttled.items()),
            "failures": "; ".join(device.failures),
            "lacks": "; ".join(device.lacks),
        }
        rows.append({name: getattr(device, name) for name in _KNOWN} | told)
    return rows
