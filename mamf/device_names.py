"""The devices of peaks.csv by the names that drivers and people give them, from device_names.csv.

The first name of a device is torch's, if torch has one for it alone; it means that device and no other.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass

from mamf.backend import shared_ways
from mamf.errors import UsageError
from mamf.files import packaged_rows
from mamf.limits import shorten
from mamf.peaks import matching_device


@dataclass(frozen=True)
class NamedDevice:
    """``device``: its name in peaks.csv."""

    device: str
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.names[0]

    @functools.cached_property
    def words(self) -> frozenset[str]:
        return _words(" ".join(self.names))


@functools.cache
def named_devices() -> tuple[NamedDevice, ...]:
    """All devices with a figure, in the order of peaks.csv."""
    return tuple(
        NamedDevice(row["device"], tuple(row["names"].split("; "))) for row in packaged_rows("device_names.csv")
    )


def find_devices(name: str) -> list[NamedDevice]:
    """The devices that a name may mean; several if it leaves open which.

    A listed name comes first, in any case and with any blanks. Else a name with a number means the devices that have
    all its words; of these the plain model, all of whose words the others have too, as RTX 3090 beside RTX 3090 Ti.
    Else the device of peaks.csv whose pattern matches. Raises UsageError with near names for any other.
    """
    devices, words = named_devices(), _words(name)
    if equal := [each for each in devices if _letters(name) in map(_letters, (each.device, *each.names))]:
        return equal
    if having := [each for each in devices if re.search(r"\d", name) and words <= each.words]:
        return [each for each in having if all(each.words <= other.words for other in having)] or having
    pattern = matching_device(name, by_name_alone=True)
    if matching := [each for each in devices if each.device == pattern]:
        return matching
    if pattern or shared_ways(name):
        raise UsageError(f"{shorten(name)!r} is part of a card: listed figures are those of whole cards")
    listed = {each.casefold(): each for device in devices for each in device.names}
    near = ", ".join(listed[each] for each in difflib.get_close_matches(name[:99].casefold(), listed, cutoff=0.5))
    hint = f" (near: {near})" if near else ""
    raise UsageError(f"unknown device {shorten(name)!r}{hint}")


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9+]", "", name.lower())


def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", name.lower()))
