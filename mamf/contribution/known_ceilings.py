"""``mamf.peak``: how fast a device multiplies, from the best source there is, which is always named.

Measured on this device, else contributed for devices of its name, build and power limit (a CPU: name, core count and
clock), else its datasheet's dense figure; never another device's.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

from mamf.backend import Backend, DeviceInfo
from mamf.ceilings.contributed import ContributedCeiling, contributed_ceilings
from mamf.dtypes import canonical_name
from mamf.errors import IncomparableError, MamfWarning, RunLogError, UnavailableError
from mamf.limits import require_known
from mamf.logs.found import cached_ceiling
from mamf.measurement import TERA
from mamf.peaks import find_peak
from mamf.plugins.discovery import open_backend
from mamf.regime_names import CEILINGS
from mamf.statistics import CONFIDENCE, Interval

Source = Literal["measured", "contributed", "datasheet"]


@dataclass(frozen=True)
class KnownPeak:
    """``flops``: FLOP/s of a device for a dtype, and ``interval`` (FLOP/s), the 95 % repeat interval. Of a datasheet's
    figure regime and interval are None. ``description``: what it is and where it comes from, one line.
    """

    flops: float
    interval: Interval | None
    regime: str | None
    source: Source
    description: str
    dtype: str
    device: str

    @property
    def tflops(self) -> float:
        """In 1e12 FLOP/s."""
        return self.flops / TERA


def peak(
    device: int | str | Backend | None = None,
    dtype: str | None = None,
    regime: str = "sustained",
    *,
    anyway: bool = False,
) -> KnownPeak:
    """How fast a device multiplies: measured on it (``mamf find`` leaves that), contributed for its kind, or promised
    by its datasheet, the first that is there.

    - ``device``: by default the one that this process uses, of the first accelerator or else the CPU; an index, a name
      of ``mamf backends`` with or without an index (``cuda:1``), or an open backend. Opening another makes it current.
    - ``dtype``: by default the device's own, as ``mamf.find`` takes it.
    - ``regime``: ``burst`` or ``sustained``.
    - ``anyway``: take a contributed figure of another power limit or unit count.

    Raises UnavailableError where nothing is known of the device, IncomparableError where what is contributed is of
    another power limit or unit count, UnknownNameError for a dtype or regime.

    >>> peak = mamf.peak("simulated", "bfloat16")
    >>> peak.source, f"{peak.tflops:.1f} TFLOPS"
    ('datasheet', '989.0 TFLOPS')
    """
    require_known(("regime", regime, CEILINGS))
    backend = opened(device)
    info, dtype = backend.info, backend.resolve_dtype(canonical_name(dtype or backend.default_dtype))
    known = (
        _measured(backend, dtype, regime) or _contributed(info, dtype, regime, anyway) or datasheet_peak(info, dtype)
    )
    if known is None:
        raise UnavailableError(
            f"nothing is known of {dtype} on {info.name}: nobody contributed its ceiling and no datasheet of it is "
            f"listed; measure it: {_command(dtype)}"
        )
    return known


def measured_peak(
    device: int | str | Backend | None, dtype: str, regime: str = "sustained", *, anyway: bool = False
) -> KnownPeak:
    """As :func:`peak`, but measured, here or on a device of the same kind. Also raises UnavailableError if only a
    datasheet is known.
    """
    known = peak(device, dtype, regime, anyway=True) if anyway else peak(device, dtype, regime)
    if known.source == "datasheet":
        raise UnavailableError(f"a datasheet's figure is no ceiling; measure it: {_command(dtype)}")
    return known


def opened(device: int | str | Backend | None) -> Backend:
    """Raises UnavailableError or UnknownNameError."""
    if isinstance(device, Backend):
        return device
    if device is None or isinstance(device, int):
        return open_backend("auto", device)
    name, colon, index = device.rpartition(":")
    return open_backend(name, int(index)) if colon and index.isdecimal() else open_backend(device, None)


def _labels(dtype: str) -> tuple[str, str]:
    """8-bit floats may be multiplied with fewer bits in partial sums: used if nothing else is known."""
    return dtype, f"{dtype}, fast accumulation"


def _command(dtype: str) -> str:
    return f"mamf find --dtype {dtype}"


def _measured(backend: Backend, dtype: str, regime: str) -> KnownPeak | None:
    for label in _labels(dtype):
        try:
            before = cached_ceiling(backend.info, label, regime)
        except RunLogError as error:
            warnings.warn(f"not used: {error}", MamfWarning, stacklevel=3)
            continue
        if before is None:
            continue
        is_this = backend.info.uuid_hash is not None or not backend.is_accelerator
        which = "this very device" if is_this else "a device of this name in this machine"
        ceiling = before.ceiling
        description = f"measured on {which}, {before.started[:10]}: {label} at {ceiling.shape} by {ceiling.kernel}"
        interval = _flops(ceiling.interval.low, ceiling.interval.high, ceiling.interval.coverage)
        return KnownPeak(ceiling.rate * TERA, interval, regime, "measured", description, dtype, ceiling.device)
    return None


def _contributed(info: DeviceInfo, dtype: str, regime: str, anyway: bool) -> KnownPeak | None:
    for label in _labels(dtype):
        kind = (info.name, label, regime)
        rows = [row for row in contributed_ceilings() if (row.device, row.dtype, row.regime) == kind]
        if not rows:
            continue
        row = min(rows, key=lambda each: bool(_differences(each, info)))
        differences = _differences(row, info)
        if differences and not anyway:
            raise IncomparableError(
                f"the ceiling contributed for {info.name} is of {differences}: measure this one ({_command(dtype)}), "
                "or take it anyway (--anyway, anyway=True)"
            )
        remark = f", although of {differences}" if differences else ""
        description = (
            f"contributed for {info.name}{remark}: {label}, results/{row.log}; cards differ: {_command(dtype)}"
        )
        interval = _flops(row.low, row.high, CONFIDENCE)
        return KnownPeak(row.tflops * TERA, interval, regime, "contributed", description, dtype, info.name)
    return None


def _differences(row: ContributedCeiling, info: DeviceInfo) -> str:
    """How the build and settings of the measured device differ from this one. Unknown values count only for CPUs:
    virtual machines give many CPUs one name, and the clock distinguishes them.
    """
    compared = (
        ("{} compute units, here {}", row.compute_units, info.compute_units),
        ("{} W, here {} W", row.power_limit_watts, info.power_limit_watts)
        if info.is_accelerator
        else ("a clock of {} MHz, here {} MHz", row.clock_mhz, (info.max_clock_hz or 0) / 1e6),
    )
    return ", ".join(
        text.format(*(f"{each:g}" if each else "unknown" for each in (of, own)))
        for text, of, own in compared
        if (of != own if of and own else not info.is_accelerator)
    )


def datasheet_peak(info: DeviceInfo, dtype: str) -> KnownPeak | None:
    """The dense figure that a device's vendor promises, or None if no figure is listed."""
    listed = find_peak(info.name, dtype, info.compute_units)
    if listed is None:
        return None
    description = f"datasheet of {listed.origin}, dense {listed.dtype}; no kernel reaches it: {_command(dtype)}"
    return KnownPeak(listed.flops, None, None, "datasheet", description, dtype, info.name)


def _flops(low: float, high: float, coverage: float) -> Interval:
    return Interval(low * TERA, high * TERA, coverage)
