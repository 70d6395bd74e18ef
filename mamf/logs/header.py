"""What a run log says before its first row: tool, command, device, software, settings and the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mamf.backend import Backend, DeviceInfo, Unavailable
from mamf.logs.records import utc_now
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
    """``plan``: as mamf.logs.plan_records writes it; ``findings``: the doctor's, a line each; ``devices``: that share
    the run, where it is not of one.
    """
    sensors = backend.telemetry
    return {
        "tool": tool_version(),
        "command": command,
        "started": utc_now(),
        "device": asdict(backend.info),
        **({"devices": [asdict(device) for device in devices]} if devices else {}),
        "timer": backend.timer,
        "sensors": f"unavailable: {sensors.reason}" if isinstance(sensors, Unavailable) else "available",
        "kernel": kernel,
        "plan": dict(plan),
        "settings": backend.settings(),
        "environment": describe_environment(backend.environment_variables),
        "findings": list(findings),
        "notes": notes,
    }
