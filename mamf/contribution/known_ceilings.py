"""``mamf.peak``: how fast a device multiplies, from the best source there is, which is always named.

Of a device at hand: measured on it, else contributed for accelerators of its name, build and power limit, else its
datasheet's dense figure. By name, on a machine without it: contributed, else published by other people, else the
datasheet's. Never another device's.

``results/published`` has figures that other people published. This project checked none of them, and never ranks them
with measured ones. The package ships published.csv, the highest of each listed device and dtype, written by
``tools/published_peaks.py``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mamf.backend import Backend, DeviceInfo
from mamf.ceilings.ceiling import Ceiling
from mamf.dtypes import canonical_name
from mamf.errors import (
    PEAK_SOURCES,
    IncomparableError,
    MamfWarning,
    PeakSource,
    RunLogError,
    UnavailableError,
    UsageError,
    require_known,
    shorten,
)
from mamf.files import packaged_rows
from mamf.measurement import DATASHEET, PUBLISHED, Rate
from mamf.operations.matmul.operation import problem_for
from mamf.operations.unknown import is_of_products
from mamf.peaks import (
    ContributedRate,
    DatasheetRate,
    NamedDevice,
    contributed_for,
    contributed_rates,
    find_devices,
    find_peak,
    listed_peak,
)
from mamf.plans import CEILINGS
from mamf.plugins.discovery import open_backend

FIGURES, NOTICE = Path("published", "figures.csv"), Path("published", "NOTICE.md")
SHIPPED = "published.csv"
_USUAL_DTYPES = ("bfloat16", "float16", "float32")
#: Figures of devices that differ by less are one figure: datasheets round.
_ROUNDING = 0.01


def peak(
    device: int | str | Backend | None = None,
    dtype: str | None = None,
    regime: str = "sustained",
    *,
    anyway: bool = False,
    name: str | None = None,
    source: PeakSource | None = None,
) -> Rate:
    """How fast a device multiplies: measured on it (``mamf find`` leaves that), contributed for its kind, or promised
    by its datasheet, the first that is there.

    - ``device``: by default the one that this process uses, of the first accelerator or else the CPU; an index, a name
      of ``mamf backends`` with or without an index (``cuda:1``), or an open backend. Opening another makes it current.
    - ``dtype``: by default the device's own, as ``mamf.find`` takes it.
    - ``regime``: ``burst`` or ``sustained``.
    - ``anyway``: take a contributed figure of another power limit or unit count.
    - ``name``: instead of ``device``, any listed device, here or not: torch's name (``NVIDIA H100 80GB HBM3``) or a
      common one (``h100 sxm``). Needs no torch. After contributed figures, those that other people published count.
    - ``source``: only ``measured``, ``contributed``, ``published`` or ``datasheet`` figures.

    Raises UnavailableError where nothing is known of the device, IncomparableError where what is contributed is of
    another power limit or unit count, UnknownNameError for a dtype, regime or source, UsageError for a name that means
    no device or several with different figures.

    >>> peak = mamf.peak("simulated", "bfloat16")
    >>> peak.source, f"{peak.tflops:.1f} TFLOPS"
    ('datasheet', '989.0 TFLOPS')
    >>> peak = mamf.peak(name="NVIDIA B200", dtype="bfloat16", source="datasheet")
    >>> peak.tflops, peak.tier
    (2250.0, 'datasheet')
    """
    require_known(("regime", regime, CEILINGS), ("source", source or DATASHEET, PEAK_SOURCES))
    if name is not None:
        if device is not None:
            raise UsageError("give a device or a name, not both")
        return peaks_by_name(name, dtype, regime, source)[0]
    backend = resolve_backend(device)
    info, dtype = backend.info, backend.resolve_dtype(canonical_name(dtype or backend.default_dtype))
    finders = {
        "measured": lambda: _find_measured(backend, dtype, regime),
        "contributed": lambda: _find_contributed(info, dtype, regime, anyway),
        "datasheet": lambda: datasheet_peak(info, dtype),
    }
    known = _first(find() for kind, find in finders.items() if source in (None, kind))
    if known is None:
        raise UnavailableError(
            f"nothing is known of {dtype} on {info.name}: nobody contributed its ceiling and no datasheet of it is "
            f"listed; measure it: {_find_command(dtype)}"
        )
    return known


def peaks_by_name(
    name: str, dtype: str | None = None, regime: str = "sustained", source: PeakSource | None = None
) -> list[Rate]:
    """All that is known of a device by name; the answer of :func:`peak` comes first. Raises its errors."""
    devices = find_devices(name)
    for each in [canonical_name(dtype)] if dtype else _USUAL_DTYPES:
        known = [_known_rates(device, each, regime, source) for device in devices]
        if any(known):
            return _require_one_figure(name, devices, known)
    raise UnavailableError(
        f"nothing is listed for {devices[0].name}, {dtype or 'any usual dtype'}, source {source or 'any'}"
    )


def _known_rates(device: NamedDevice, dtype: str, regime: str, source: PeakSource | None) -> list[Rate]:
    """The best first; empty without a figure of this regime and source."""
    # Its adapter knows which format of fp8 a device supports.
    dtypes = ("float8_e4m3fn", "float8_e4m3fnuz") if dtype == "fp8" else (dtype,)
    other = next(each for each in CEILINGS if each != regime)
    found = [
        _first(_find_highest_contributed(device, regime, each) for each in dtypes),
        _first(_find_published(device, each) for each in dtypes),
        _first(_describe_datasheet_rate(listed_peak(device.device, each), device.name, each) for each in dtypes),
        _first(_find_highest_contributed(device, other, each) for each in dtypes),
    ]
    known = [each for each in found if each and source in (None, each.source)]
    return known if known and known[0].regime in (None, regime) else []


def _first(found: Iterable[Rate | None]) -> Rate | None:
    return next(filter(None, found), None)


def _require_one_figure(name: str, devices: Sequence[NamedDevice], known: Sequence[list[Rate]]) -> list[Rate]:
    """What all these devices have in common. Choosing one of several cards that differ would often be wrong."""
    rates = [each[0].rate if each else 0.0 for each in known]
    if max(rates) > (1 + _ROUNDING) * min(rates):
        figures = [f"{device.name} ({rate:g})" for device, rate in zip(devices, rates, strict=True)]
        listed = ", ".join(figures).replace("(0)", "(none)")
        raise UsageError(f"{shorten(name)!r} may be one of several devices; name one, in TFLOPS: {listed}")
    lowest = known[rates.index(min(rates))]
    return lowest if len(devices) == 1 else [replace(lowest[0], device=name)]


def measured_peak(device: int | str | Backend | None, dtype: str, regime: str = "sustained") -> Rate:
    """As :func:`peak`, but measured, here or on a device of the same kind. Also raises UnavailableError if only a
    datasheet is known, or if the interval of what was measured is unknown.
    """
    known = peak(device, dtype, regime)
    if known.source == "datasheet":
        raise UnavailableError(f"a datasheet's figure is no ceiling; measure it: {_find_command(dtype)}")
    if known.interval is not None and not known.interval.is_known:
        raise UnavailableError(f"the ceiling of {known.device} is too noisy for shares of it: {_find_command(dtype)}")
    return known


def resolve_backend(device: int | str | Backend | None) -> Backend:
    """Raises UnavailableError or UnknownNameError."""
    if isinstance(device, Backend):
        return device
    if device is None or isinstance(device, int):
        return open_backend("auto", device)
    name, colon, index = device.rpartition(":")
    return open_backend(name, int(index)) if colon and index.isdecimal() else open_backend(device, None)


def _find_command(dtype: str) -> str:
    return f"mamf find --dtype {dtype}"


def _find_measured(backend: Backend, dtype: str, regime: str) -> Ceiling | None:
    from mamf.logs.found import cached_ceiling  # here, because a look-up by name reads no log

    problem = problem_for(backend, dtype)
    for each in (problem, replace(problem, fast_accumulation=True)):
        try:
            ceiling = cached_ceiling(backend.info, each, regime)
        except RunLogError as error:
            warnings.warn(f"not used: {error}", MamfWarning, stacklevel=3)
            continue
        if ceiling is not None:
            is_this = backend.info.uuid_hash is not None or not backend.is_accelerator
            which = "this very device" if is_this else "a device of this name in this machine"
            when = ceiling.date[:10] + ("" if ceiling.tier == "complete" else f", {ceiling.tier}")
            what = f"{ceiling.dtype} at {ceiling.shape} by {ceiling.kernel}"
            return replace(ceiling, description=f"measured on {which}, {when}: {what}")
    return None


def _find_contributed(info: DeviceInfo, dtype: str, regime: str, anyway: bool) -> Rate | None:
    # Virtual machines give many CPUs one name.
    rows = _contributed_rates_for([info.name], dtype, regime) if info.is_accelerator else []
    if not rows:
        return None
    row = min(rows, key=lambda each: bool(_describe_differences(each, info)))
    differences = _describe_differences(row, info)
    if differences and not anyway:
        raise IncomparableError(
            f"the ceiling contributed for {info.name} is of {differences}: measure this one ({_find_command(dtype)}), "
            "or take it anyway (--anyway, mamf.peak(anyway=True))"
        )
    return _with_origin(row, f", although of {differences}" if differences else "")


def _contributed_rates_for(names: Collection[str], dtype: str, regime: str) -> list[ContributedRate]:
    """The rows for devices of these names; those with fast accumulation only if there are no others."""
    rows = [row for row in contributed_rates() if row.device in names and row.regime == regime]
    exact = [row for row in rows if row.dtype == dtype]
    return exact or [row for row in rows if row.dtype == f"{dtype}, fast accumulation"]


def _find_highest_contributed(device: NamedDevice, regime: str, dtype: str) -> Rate | None:
    rows = _contributed_rates_for(device.names, dtype, regime)
    return _with_origin(max(rows, key=lambda row: row.rate)) if rows else None


def _with_origin(row: ContributedRate, remark: str = "") -> Rate:
    limit = f"{row.power_limit_watts:g} W" if row.power_limit_watts else ""
    conditions = ", ".join(filter(None, (row.date, limit, row.software)))
    what = f"{row.dtype}, {row.reference} ({conditions}); cards differ: {_find_command(row.dtype.partition(',')[0])}"
    return replace(row, description=f"contributed for {row.device}{remark}: {what}")


def _describe_differences(row: ContributedRate, info: DeviceInfo) -> str:
    """How the build and power limit of the measured device differ from this one, as far as they are known."""
    units = ("compute units", row.compute_units, info.compute_units)
    limits = ("W", row.power_limit_watts, info.power_limit_watts)
    return ", ".join(
        f"{theirs:g} {unit}, here {ours:g} {unit}"
        for unit, theirs, ours in (units, limits)
        if theirs and ours and theirs != ours
    )


def datasheet_peak(info: DeviceInfo, dtype: str) -> Rate | None:
    """The dense figure that a device's vendor promises, or None if no figure is listed."""
    return _describe_datasheet_rate(find_peak(info.name, dtype, info.compute_units), info.name, dtype)


def _describe_datasheet_rate(listed: DatasheetRate | None, device: str, dtype: str) -> Rate | None:
    if listed is None:
        return None
    description = f"datasheet of {listed.origin}, dense {listed.dtype}; no kernel reaches it: {_find_command(dtype)}"
    return replace(listed, dtype=dtype, device=device, description=description)


@functools.cache
def published_rates() -> dict[tuple[str, str], dict[str, str]]:
    """The published figures that ship with this package: the row of the highest by device, as peaks.csv names it, and
    dtype. ``statistic``: of how many. ``accelerator``: as people call it. Texts are as published: escape them.
    """
    return {(row["device"], row["dtype"]): row for row in packaged_rows(SHIPPED)}


def _find_published(device: NamedDevice, dtype: str) -> Rate | None:
    row = published_rates().get((device.device, dtype))
    if row is None:
        return None
    said = "; ".join(filter(None, (row["source"], row["statistic"])))
    return Rate(
        rate=float(row["tflops"]),
        dtype=dtype,
        device=device.name,
        source="published",
        description=f"{PUBLISHED}, for {row['accelerator']}: {dtype}, {said}; measure it: {_find_command(dtype)}",
        tier=PUBLISHED,
        reference=row["source"],
    )


def place_among_known(ceiling: Ceiling, device: Mapping[str, Any]) -> str:
    """Where a ceiling stands among those of other cards of its model and power limit; empty if none is known."""
    if not is_of_products(ceiling.problem.operation) or ceiling.problem.data != "normal":
        return ""
    for known in contributed_for(device["name"], device["compute_units"], ceiling.dtype):
        if known.regime == ceiling.regime and known.power_limit_watts == device["power_limit_watts"]:
            cards = f"{known.cards} cards from {known.lowest:.4g} to" if known.cards > 1 else "one card at"
            return f"{known.device} in results/: {cards} {known.rate:.4g}; this one {ceiling.rate:.4g}"
    return ""
