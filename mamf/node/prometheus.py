"""A verdict in Prometheus' text format, for node_exporter's textfile collector, in base units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mamf.measurement import TERA
from mamf.node.figures import Device
from mamf.node.verdict import Verdict, lost
from mamf.text import visible

Sample = tuple[dict[str, object], float]


def exposition(devices: Sequence[Device], verdict: Verdict) -> str:
    """https://prometheus.io/docs/instrumenting/exposition_formats. The reason is a comment in the first line."""
    lines = [f"# {visible(verdict.reason)}"]
    for name, description, samples in _families(devices, verdict):
        lines += [f"# HELP {name} {description}", f"# TYPE {name} gauge"]
        lines += [f"{name}{_labels(labels)} {value:.10g}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _families(devices: Sequence[Device], verdict: Verdict) -> Iterator[tuple[str, str, list[Sample]]]:
    yield "mamf_node_verdict", "0 OK, 1 WARN, 2 CRITICAL, 3 UNKNOWN", [({}, verdict.exit_code)]
    yield "mamf_node_lost_share", "What a synchronous job loses to the slowest device", [({}, lost(devices))]
    failed = [(_of(device), float(bool(device.failures))) for device in devices]
    yield "mamf_device_failed", "1 if the device failed", failed
    rates = [({**_of(each), "figure": name}, rate * TERA) for each in devices for name, rate in each.figures.items()]
    yield "mamf_device_rate", "FLOP or bytes a second", rates
    throttled = [({**_of(each), "reason": why}, share) for each in devices for why, share in each.throttled.items()]
    yield "mamf_device_throttled_share", "Share of the time", throttled
    for name, unit in (("clock_hz", "hertz"), ("watts", "watts"), ("celsius", "celsius")):
        readings = [(_of(each), getattr(each.conditions, name)) for each in devices]
        yield f"mamf_device_{unit}", "At the sustained ceiling", [each for each in readings if each[1] is not None]


def _of(device: Device) -> dict[str, object]:
    return {"node": device.node, "device": device.index, "uuid": device.uuid_hash or ""}


def _labels(labels: Mapping[str, object]) -> str:
    def quoted(value: object) -> str:
        return visible(str(value)).replace("\\", "\\\\").replace('"', '\\"')

    return "{" + ",".join(f'{name}="{quoted(value)}"' for name, value in labels.items()) + "}" if labels else ""
