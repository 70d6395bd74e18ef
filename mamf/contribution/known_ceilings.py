"""Find the highest known matmul rate of a device, always with its source, for ``mamf.peak``.

For a device in this machine the sources are, in this order: a ceiling measured on the device, a ceiling that someone
contributed for a device with the same name, number of compute units and power limit, and the dense peak in the
datasheet. For a device that the caller names, the sources are contributed ceilings, figures that other people
published, and the datasheet. mamf never falls back to the rate of another device.

The published figures are in ``results/published``. This project has not checked them and never ranks them with measured
rates. The package ships the highest figure for each listed device and dtype in published.csv, which
``tools/published_peaks.py`` writes.
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
from mamf.dtypes import canonicalize_dtype_name
from mamf.errors import (
    PEAK_SOURCES,
    IncomparableError,
    MamfWarning,
    PeakSource,
    RunLogError,
    UnavailableError,
    UsageError,
    require_known_names,
    shorten_value,
)
from mamf.files import read_packaged_csv_rows
from mamf.measurement import DATASHEET_TIER, PUBLISHED_TIER, Rate
from mamf.operations.matmul.operation import make_problem
from mamf.operations.unknown import sets_compute_ceiling
from mamf.peaks import (
    ContributedRate,
    DatasheetRate,
    DeviceModel,
    find_contributed_rates,
    find_datasheet_rate,
    find_device_models,
    find_peak_of_listed_device,
    read_contributed_rates,
)
from mamf.plans import CEILING_REGIMES
from mamf.plugins.discovery import open_backend

PUBLISHED_FIGURES_FILE, PUBLISHED_NOTICE_FILE = Path("published", "figures.csv"), Path("published", "NOTICE.md")
SHIPPED_PUBLISHED_FIGURES_FILE = "published.csv"
_DEFAULT_DTYPES = ("bfloat16", "float16", "float32")
#: Devices whose datasheet rates differ by less than this share count as equally fast, because datasheets round.
_DATASHEET_ROUNDING_SHARE = 0.01


def peak(
    device: int | str | Backend | None = None,
    dtype: str | None = None,
    regime: str = "sustained",
    *,
    anyway: bool = False,
    name: str | None = None,
    source: PeakSource | None = None,
) -> Rate:
    """Return the highest known matmul rate of a device, from the best source that is available.

    The sources are tried in this order: a ceiling measured on the device (``mamf find`` stores it), a ceiling
    contributed for the same model, and the datasheet's dense peak.

    - ``device``: an index, a name from ``mamf backends`` with or without an index (``cuda:1``), or an open backend. The
      default is the current device of the first accelerator, or the CPU. If this call opens a device, the device
      becomes the current device of the process.
    - ``dtype``: the default is the device's default dtype, as in ``mamf.find``.
    - ``regime``: ``burst`` or ``sustained``.
    - ``anyway``: accept a contributed ceiling for another power limit or number of compute units.
    - ``name``: the name of a listed device, instead of ``device``: torch's name (``NVIDIA H100 80GB HBM3``) or a common
      one (``h100 sxm``). The device need not be in this machine, and torch need not be installed. Figures that other
      people published are also considered.
    - ``source``: use only ``measured``, ``contributed``, ``published`` or ``datasheet`` figures.

    Raises UnavailableError if no figure is known, IncomparableError if the contributed ceiling is for another power
    limit or number of compute units, UnknownNameError for an unknown dtype, regime or source, and UsageError if
    ``name`` matches no device, or several with different figures.

    >>> peak = mamf.peak("simulated", "bfloat16")
    >>> peak.source, f"{peak.tflops:.1f} TFLOPS"
    ('datasheet', '989.0 TFLOPS')
    >>> peak = mamf.peak(name="NVIDIA B200", dtype="bfloat16", source="datasheet")
    >>> peak.tflops, peak.tier
    (2250.0, 'datasheet')
    """
    require_known_names(("regime", regime, CEILING_REGIMES), ("source", source or DATASHEET_TIER, PEAK_SOURCES))
    if name is not None:
        if device is not None:
            raise UsageError("mamf.peak does not accept both device and name: pass only one of them")
        return find_peaks_by_name(name, dtype, regime, source)[0]
    backend = open_backend_or_default(device)
    info, dtype = backend.info, backend.resolve_dtype(canonicalize_dtype_name(dtype or backend.default_dtype))
    finders = {
        "measured": lambda: _find_measured_ceiling(backend, dtype, regime),
        "contributed": lambda: _find_contributed_rate(info, dtype, regime, anyway),
        "datasheet": lambda: find_datasheet_peak(info, dtype),
    }
    known = _get_first_rate(find() for kind, find in finders.items() if source in (None, kind))
    if known is None:
        other = next(each for each in CEILING_REGIMES if each != regime)
        is_other_known = not source and _find_measured_ceiling(backend, dtype, other)
        raise UnavailableError(
            f"no {dtype} peak is known for {info.name} in {regime}, because neither a contributed ceiling nor a "
            f"datasheet figure exists: measure a ceiling with '{_format_find_command(dtype)}'"
            + (f"; the {other} ceiling is known: 'mamf peak --regime {other}' prints it" if is_other_known else "")
        )
    return known


def find_peaks_by_name(
    name: str, dtype: str | None = None, regime: str = "sustained", source: PeakSource | None = None
) -> list[Rate]:
    """Return all known rates of a device given by name. The first one is the rate that :func:`peak` returns.

    Raises the same errors as :func:`peak`.
    """
    devices = find_device_models(name)
    for each in [canonicalize_dtype_name(dtype)] if dtype else _DEFAULT_DTYPES:
        known = [_list_known_rates(device, each, regime, source) for device in devices]
        if any(known):
            return _require_unambiguous_rates(name, devices, known)
    raise UnavailableError(
        f"mamf has no {dtype or 'matmul'} rate for {devices[0].name}"
        + (f" from the source {source}: try another source" if source else ": measure one with 'mamf find'")
    )


def _list_known_rates(device: DeviceModel, dtype: str, regime: str, source: PeakSource | None) -> list[Rate]:
    """Return the known rates of a device for a dtype, the most trusted source first.

    ``source``: if given, return only rates from this source. The list is empty if no rate is known for this dtype,
    regime and source.
    """
    # Try both fp8 dtypes, because the name of a device does not say which one the device supports.
    dtypes = ("float8_e4m3fn", "float8_e4m3fnuz") if dtype == "fp8" else (dtype,)
    other = next(each for each in CEILING_REGIMES if each != regime)
    sources = [
        _get_first_rate(_find_max_contributed_rate(device, regime, each) for each in dtypes),
        _get_first_rate(_find_published_rate(device, each) for each in dtypes),
        _get_first_rate(
            _make_datasheet_rate(find_peak_of_listed_device(device.listed_name, each), device.name, each)
            for each in dtypes
        ),
        _get_first_rate(_find_max_contributed_rate(device, other, each) for each in dtypes),
    ]
    known = [each for each in sources if each and source in (None, each.source)]
    return known if known and known[0].regime in (None, regime) else []


def _get_first_rate(candidates: Iterable[Rate | None]) -> Rate | None:
    return next(filter(None, candidates), None)


def _require_unambiguous_rates(
    name: str, devices: Sequence[DeviceModel], known_rates: Sequence[list[Rate]]
) -> list[Rate]:
    """Return the rates of the device that a name identifies. Raises UsageError if the name matches several devices
    whose rates differ.

    ``known_rates``: the known rates of each of ``devices``.
    """
    rates = [each[0].rate if each else 0.0 for each in known_rates]
    if max(rates) > (1 + _DATASHEET_ROUNDING_SHARE) * min(rates):
        raise UsageError(
            f"{shorten_value(name)!r} matches several devices; name one of these: "
            + ", ".join(device.name for device in devices)
        )
    lowest = known_rates[rates.index(min(rates))]
    return lowest if len(devices) == 1 else [replace(lowest[0], device=name)]


def find_measured_peak(device: int | str | Backend | None, dtype: str, regime: str = "sustained") -> Rate:
    """Return a measured or contributed ceiling of a device, as :func:`peak` does, but never a datasheet figure.

    Raises the errors of :func:`peak`. Also raises UnavailableError if only the datasheet figure is known, or if the
    interval of the ceiling is unknown.
    """
    known = peak(device, dtype, regime)
    if known.source == "datasheet":
        raise UnavailableError(
            f"mamf knows only the datasheet peak of this device, but no ceiling; measure a ceiling: "
            f"{_format_find_command(dtype)}"
        )
    if known.interval is not None and not known.interval.is_known:
        raise UnavailableError(
            f"the measured ceiling of {known.device} is too noisy; measure it again: {_format_find_command(dtype)}"
        )
    return known


def open_backend_or_default(device: int | str | Backend | None) -> Backend:
    """Open the device with an index or name, or the default device. An open backend is returned unchanged.

    Raises UnavailableError or UnknownNameError if the device cannot be opened.
    """
    if isinstance(device, Backend):
        return device
    if device is None or isinstance(device, int):
        return open_backend("auto", device)
    name, colon, index = device.rpartition(":")
    return open_backend(name, int(index)) if colon and index.isdecimal() else open_backend(device, None)


def _format_find_command(dtype: str) -> str:
    return f"mamf find --dtype {dtype}"


def _find_measured_ceiling(backend: Backend, dtype: str, regime: str) -> Ceiling | None:
    from mamf.logs.ceiling_cache import find_cached_ceiling  # Imported late: a lookup by name needs no logs.

    problem = make_problem(backend, dtype)
    for each in (problem, replace(problem, fast_accumulation=True)):
        try:
            ceiling = find_cached_ceiling(backend.info, each, regime)
        except RunLogError as error:
            warnings.warn(f"mamf ignores a measured ceiling: {error}", MamfWarning, stacklevel=3)
            continue
        if ceiling is not None:
            is_this = backend.info.uuid_hash is not None or not backend.is_accelerator
            which = "this device" if is_this else "a device with this name in this machine"
            when = ceiling.date[:10] + ("" if ceiling.tier == "complete" else f", {ceiling.tier}")
            return replace(
                ceiling,
                description=f"measured on {which}, {when}: {ceiling.dtype} at {ceiling.shape} by {ceiling.kernel}",
            )
    return None


def _find_contributed_rate(info: DeviceInfo, dtype: str, regime: str, anyway: bool) -> Rate | None:
    # Do not use contributed rates of CPUs, because virtual machines give different CPUs the same name.
    rows = _find_contributed_rates([info.name], dtype, regime) if info.is_accelerator else []
    if not rows:
        return None
    row = min(rows, key=lambda each: bool(_describe_build_differences(each, info)))
    differences = _describe_build_differences(row, info)
    if differences and not anyway:
        raise IncomparableError(
            f"the ceiling contributed for {info.name} has {differences}: measure this device "
            f"({_format_find_command(dtype)}), or use it anyway (--anyway, mamf.peak(anyway=True))"
        )
    return _make_contributed_rate(row, f", although it has {differences}" if differences else "")


def _find_contributed_rates(names: Collection[str], dtype: str, regime: str) -> list[ContributedRate]:
    """Return the contributed rates of the devices with these names, for a dtype and a regime.

    If there are rates without fast accumulation, those with fast accumulation are left out.
    """
    rows = [row for row in read_contributed_rates() if row.device in names and row.regime == regime]
    exact = [row for row in rows if row.dtype == dtype]
    return exact or [row for row in rows if row.dtype == f"{dtype}, fast accumulation"]


def _find_max_contributed_rate(device: DeviceModel, regime: str, dtype: str) -> Rate | None:
    rows = _find_contributed_rates(device.names, dtype, regime)
    return _make_contributed_rate(max(rows, key=lambda row: row.rate)) if rows else None


def _make_contributed_rate(row: ContributedRate, remark: str = "") -> Rate:
    conditions = ", ".join(
        filter(None, (row.date, f"{row.power_limit_watts:g} W" if row.power_limit_watts else "", row.software))
    )
    what = (
        f"{row.dtype}, {row.reference} ({conditions}); cards differ, so measure "
        f"yours: {_format_find_command(row.dtype.partition(',')[0])}"
    )
    return replace(row, description=f"contributed for {row.device}{remark}: {what}")


def _describe_build_differences(row: ContributedRate, info: DeviceInfo) -> str:
    """Describe how the number of compute units and the power limit of a contributed rate differ from those of the
    device. Returns an empty string if they do not differ.
    """
    pairs = {
        "compute units": (row.compute_units, info.compute_units),
        "W": (row.power_limit_watts, info.power_limit_watts),
    }
    return ", ".join(
        f"{theirs:g} {unit}, here {ours:g} {unit}"
        for unit, (theirs, ours) in pairs.items()
        if theirs and ours and theirs != ours
    )


def find_datasheet_peak(info: DeviceInfo, dtype: str) -> Rate | None:
    """Return the dense peak for a dtype from the datasheet of a device, or None if none is listed."""
    return _make_datasheet_rate(find_datasheet_rate(info.name, dtype, info.compute_units), info.name, dtype)


def _make_datasheet_rate(listed_rate: DatasheetRate | None, device: str, dtype: str) -> Rate | None:
    if listed_rate is None:
        return None
    description = (
        f"datasheet of {listed_rate.device_label}, dense {listed_rate.dtype}; no kernel reaches "
        f"it; measure the ceiling: {_format_find_command(dtype)}"
    )
    return replace(listed_rate, dtype=dtype, device=device, description=description)


@functools.cache
def read_published_rates() -> dict[tuple[str, str], dict[str, str]]:
    """Read the published figures that this package ships: the highest one for each device (by its name in peaks.csv)
    and dtype.

    If several figures were published for a device and dtype, ``statistic`` gives their number and the lowest of them.
    For example, "the highest of 3, from 54" means three figures, of which the lowest is 54 TFLOPS. ``statistic`` is
    empty for a single figure. ``accelerator`` is the publisher's name for the device. Other people wrote these texts,
    so escape them before use in a page.
    """
    return {(row["device"], row["dtype"]): row for row in read_packaged_csv_rows(SHIPPED_PUBLISHED_FIGURES_FILE)}


def _find_published_rate(device: DeviceModel, dtype: str) -> Rate | None:
    row = read_published_rates().get((device.listed_name, dtype))
    if row is None:
        return None
    said = "; ".join(filter(None, (row["source"], row["statistic"])))
    return Rate(
        rate=float(row["tflops"]),
        dtype=dtype,
        device=device.name,
        source="published",
        description=(
            f"{PUBLISHED_TIER}, for {row['accelerator']}: {dtype}, {said}; measure it: {_format_find_command(dtype)}"
        ),
        tier=PUBLISHED_TIER,
        reference=row["source"],
    )


def compare_with_known_ceilings(ceiling: Ceiling, device: Mapping[str, Any]) -> str:
    """Return a sentence that compares a ceiling with ceilings of other cards of the same model and power limit.

    Returns an empty string if no ceilings of other cards are known.
    """
    if not sets_compute_ceiling(ceiling.problem.operation) or ceiling.problem.data != "normal":
        return ""
    for known in find_contributed_rates(device["name"], device["compute_units"], ceiling.dtype):
        if known.regime == ceiling.regime and known.power_limit_watts == device["power_limit_watts"]:
            cards = (
                f"{known.card_count} cards reach {known.min_card_rate:.4g} to"
                if known.card_count > 1
                else "1 card reach"
            )
            return (
                f"{known.device} in results/: comparable searches on {cards} {known.rate:.4g} TFLOPS; "
                f"this card reaches {ceiling.rate:.4g}"
            )
    return ""
