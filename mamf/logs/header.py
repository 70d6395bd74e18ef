"""The header of a run log: tool, command, device, software, settings and the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mamf.backend import Backend, DeviceInfo, Unavailable
from mamf.logs.records import utc_now
from mamf.logs.trait_records import traits_record
from mamf.machine.environment import describe_environment, tool_version


def header_of(
    backend: Backend,
    command: str,
    kernel: str,
    plan: Mapping[str, Any],
    findings: Sequence[str] = (),
    notes: str = "",
    devices: Sequence[DeviceInfo] = (),
) -> dict[str, Any]:
    """``plan``: from mamf.logs.plan_records. ``findings``: the doctor's, one line each. ``devices``: those that share
    the run; empty for a run on one device.
    """
    sensors = backend.telemetry
    return {
        "tool": tool_version(),
        "command": command,
        "started": utc_now(),
        "device": asdict(backend.info),
        **({"devices": [asdict(device) for device in devices]} if devices else {}),
        "timer": backend.timer,
        **({"traits": traits} if (traits := traits_record(backend)) else {}),
        "sensors": f"unavailable: {sensors.reason}" if isinstance(sensors, Unavailable) else "available",
        "kernel": kernel,
        "plan": dict(plan),
        "settings": backend.settings(),
        "environment": describe_environment(backend.environment_variables),
        "findings": list(findings),
        "notes": notes,
    }
