"""Rules about the device of a log: a whole card, of one model, as the known cards of this model are."""

from __future__ import annotations

from collections.abc import Iterator

from mamf.backend import SIMULATED, DeviceInfo
from mamf.ceilings.contributed import contributed_ceilings
from mamf.contribution.evidence import Evidence, Finding
from mamf.logs.card_sharing import describe_sharing
from mamf.peaks import listed_as

# More than any machine has: the largest have 16 sockets of 128 cores.
_MOST_CORES = 2048


def simulated(evidence: Evidence) -> Iterator[Finding]:
    """Simulated devices are rejected: their figures say nothing about hardware."""
    if evidence.header["device"]["backend"] == SIMULATED:
        yield Finding("simulated", "measured on the simulated backend", 1)


def shared_devices(evidence: Evidence) -> Iterator[Finding]:
    """Devices that shared a run are of one model, and each is named once."""
    shared, own = evidence.log.devices, evidence.log.device(None)
    for name in sorted({device.name for device in shared} - {own.name}):
        yield Finding(
            "shared-devices", f"{own.name} and {name} share it: devices of two models compare with nothing", 1
        )
    if len({device.index for device in shared}) < len(shared):
        yield Finding("shared-devices", "the header names a device twice", 1)


def whole_card(evidence: Evidence) -> Iterator[Finding]:
    """The run had the whole card: tables, peaks and ceilings are those of whole cards."""
    log = evidence.log
    for name in dict.fromkeys([log.header["device"]["name"], *(device.name for device in log.devices)]):
        if shared := describe_sharing(name):
            yield Finding("shared-card", f"{shared}; run it again with the card to itself", 1)


def known_device(evidence: Evidence) -> Iterator[Finding]:
    """The device is called as its model is, and has no more units, clock and power than the contributed ones."""
    by_name = {info.name: info for info in (*evidence.log.devices, evidence.log.device(None))}
    for info in by_name.values():
        if meant := _misspelled(info.name):
            yield Finding("device", f"{info.name} is written {meant} elsewhere: leave the name as torch gives it", 1)
        yield from _beyond_known(info)


def _misspelled(name: str) -> str | None:
    """The known name that differs from this one only in case, blanks and punctuation, or None."""
    known = {_folded(each.device): each.device for each in contributed_ceilings()}
    meant = known.get(_folded(name), name)
    return listed_as(name) if meant == name else meant


def _folded(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def _beyond_known(info: DeviceInfo) -> Iterator[Finding]:
    if not info.is_accelerator:
        if (info.compute_units or 0) > _MOST_CORES:
            yield Finding("device", f"{info.compute_units} cores are more than any machine has", 1)
        return
    known = [each for each in contributed_ceilings() if each.device == info.name]
    units = {each.compute_units for each in known}
    if units and info.compute_units not in units:
        yield Finding("device", f"{info.compute_units} compute units, but {info.name} has {_listed(units)}", 1)
    limits = (
        ("MHz at most", (info.max_clock_hz or 0) / 1e6, [each.clock_mhz for each in known]),
        ("W at most", info.power_limit_watts or 0, [each.power_limit_watts for each in known]),
    )
    for unit, own, theirs in limits:
        most = max(filter(None, theirs), default=own)
        if own > most:
            yield Finding("device", f"{own:g} {unit}, but {info.name} has {most:g}", 1)


def _listed(units: set[int | None]) -> str:
    return " or ".join(f"{each}" for each in sorted(each or 0 for each in units))
