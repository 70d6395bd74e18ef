"""Whether a run may resume on a device: a log holds figures of one card and one software stack."""

from __future__ import annotations

from dataclasses import asdict

from mamf.backend import DeviceInfo
from mamf.errors import LogMismatchError
from mamf.logs.run_log import RunLog
from mamf.machine.environment import describe_environment


def require_same_device(log: RunLog, then: DeviceInfo, now: DeviceInfo) -> None:
    """Figures of two devices or two software stacks do not belong in one log. Raises LogMismatchError."""
    before, after = asdict(then), asdict(now)
    for name in ("backend", "name", "uuid_hash", "compute_units", "driver", "versions"):
        require_same(log, f"device {name}", before[name], after[name])
    packages = log.header["environment"].get("packages", {})
    require_same(log, "torch", packages.get("torch"), describe_environment()["packages"].get("torch"))


def require_same(log: RunLog, what: str, then: object, now: object) -> None:
    if then != now:
        raise LogMismatchError(f"{log.path} was measured with {what} {then}, not {now}; start a new log")
