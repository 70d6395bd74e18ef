"""Whether two runs may be compared, how they differ, which rows are paired, and which roofs hold for a log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mamf.backend import DeviceInfo
from mamf.ceilings.roof import Roofs, build_roofs, require_same_device
from mamf.errors import IncomparableError, LogMismatchError, UsageError
from mamf.logs.entries import Entry
from mamf.logs.run_log import RunLog
from mamf.machine.environment import describe_environment

_UNKNOWN = "unknown"
# May differ without a remark: kernels are paired by name if possible.
_ALWAYS_DROPPED = "kernel"


@dataclass(frozen=True)
class Difference:
    """Something that differs between A and B."""

    what: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.what} {self.a} against {self.b}"


def listed_difference(what: str, a: Sequence[object], b: Sequence[object]) -> Difference:
    return Difference(what, ", ".join(map(str, a)), ", ".join(map(str, b)))


def blocking_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Differences between two headers that forbid a comparison: device and cache state. Raises IncomparableError if
    the operations differ.
    """
    kinds = a["plan"]["operation"], b["plan"]["operation"]
    if kinds[0] != kinds[1]:
        raise IncomparableError(f"A measured {kinds[0]}, B {kinds[1]}: they have no row in common")
    found = [Difference("device", a["device"]["name"], b["device"]["name"])]
    cards = a["device"].get("uuid_hash"), b["device"].get("uuid_hash")
    if found[0].a == found[0].b and all(cards):
        # Cards of the same model differ by several percent.
        found.append(Difference(f"card {found[0].a}", *map(str, cards)))
    if kinds[0] != "matmul":
        # Without flushes in burst, the rate of a kernel can be several times as high.
        caches = ("flushed" if header["plan"]["flush"] else "warm" for header in (a, b))
        found.append(Difference("caches", *caches))
    return [each for each in found if each.a != each.b]


def noted_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Differences between two runs that may explain those of their figures, and are often the reason to compare."""
    return value_differences(circumstances(a), circumstances(b))


def value_differences(a: Mapping[str, str], b: Mapping[str, str]) -> list[Difference]:
    """Values that differ, by name."""
    names = dict.fromkeys([*a, *b])
    found = (Difference(name, a.get(name, _UNKNOWN), b.get(name, _UNKNOWN)) for name in names)
    return [each for each in found if each.a != each.b]


def circumstances(header: Mapping[str, Any]) -> dict[str, str]:
    """Software, settings and limits of a run, by name."""
    device, environment = header["device"], header["environment"]
    watts = device.get("power_limit_watts")
    tool = header["tool"]
    named = {
        "backend": device["backend"],
        "driver": device.get("driver"),
        **(device.get("versions") or {}),
        **environment.get("packages", {}),
        "power limit": watts and f"{watts:.0f} W",
        "timer": header["timer"],
        "figures and intervals": "as before schema 4" if "converted_from" in header else "as of schema 4",
        **header.get("settings", {}),
        **environment.get("variables", {}),
        "mamf": " ".join(str(tool[key]) for key in ("version", "commit") if tool.get(key)),
    }
    return {name: str(value) for name, value in named.items() if value not in (None, "")}


def values(rows: Iterable[Entry], name: str) -> list[object]:
    """The distinct values of a field, in log order."""
    return list({row.fields[name]: None for row in rows if name in row.fields})


def field_differences(a: Sequence[Entry], b: Sequence[Entry]) -> list[Difference]:
    """Fields of the regime and the problem in which A and B have no value in common."""
    if not a or not b:
        return []
    names = [name for name in a[0].fields if name in b[0].fields and name not in ("shape", "kernel")]
    found = ((name, values(a, name), values(b, name)) for name in names)
    return [listed_difference(name, of_a, of_b) for name, of_a, of_b in found if not set(of_a) & set(of_b)]


def droppable_fields(a: Sequence[Entry], b: Sequence[Entry]) -> list[Difference]:
    """Fields to ignore when pairing rows: those with one value throughout A and another throughout B."""
    apart = [each for each in field_differences(a, b) if len(values(a, each.what)) == len(values(b, each.what)) == 1]
    kernels = values(a, _ALWAYS_DROPPED), values(b, _ALWAYS_DROPPED)
    if len(kernels[0]) == len(kernels[1]) == 1 and kernels[0] != kernels[1]:
        apart.append(listed_difference(_ALWAYS_DROPPED, *kernels))
    return apart


def roofs_of_logs(logs: Iterable[RunLog], anyway: bool = False) -> Roofs:
    """The roofs given by the ceilings in logs of finds and rooflines.

    Raises UsageError for a log that holds none, IncomparableError for those of several cards, unless ``anyway``.
    """
    logs = list(logs)
    for log in logs:
        if not log.all_ceilings and not log.own_ceilings:
            raise UsageError(
                f"{log.path} holds no ceiling: give logs of 'mamf find', of 'mamf find --operation bandwidth' or of "
                "'mamf roofline'; logs whose rows are placed stand before --ceiling"
            )
    ceilings = [each for log in logs for each in (*log.all_ceilings.values(), *log.own_ceilings.values())]
    cache_bytes = next((size for log in logs if (size := log.header["device"]["cache_bytes"])), None)
    return build_roofs(ceilings, cache_bytes, anyway)


def require_same_card(log: RunLog, roofs: Roofs) -> None:
    """Raises IncomparableError for a log of another card than the roofs'."""
    device = log.header["device"]
    require_same_device((roofs.device, roofs.uuid_hash), (device["name"], device["uuid_hash"]))


def require_device_of_log(log: RunLog, then: DeviceInfo, now: DeviceInfo) -> None:
    """Figures of two devices or two software stacks do not belong in one log. Raises LogMismatchError."""
    names = ("backend", "name", "uuid_hash", "compute_units", "driver", "versions")
    values = [(f"device {name}", getattr(then, name), getattr(now, name)) for name in names]
    torch = log.header["environment"].get("packages", {}).get("torch")
    for what, before, after in [*values, ("torch", torch, describe_environment()["packages"].get("torch"))]:
        if before != after:
            raise LogMismatchError(f"{log.path} was measured with {what} {before}, not {after}; start a new log")
