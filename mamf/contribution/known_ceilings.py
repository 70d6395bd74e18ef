"""``mamf.peak``: how fast a device multiplies, from the best source there is, which is always named.

Of a device at hand: measured on it, else contributed for devices of its name, build and power limit (a CPU: name, core
count and clock), else its datasheet's dense figure. By name, on a machine without it: contributed, else published by
other people, else the datasheet's. Never another device's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mamf.backend import Backend, DeviceInfo
from mamf.ceilings.contributed import ContributedCeiling, contributed_ceilings
from mamf.ceilings.share import label_dtype
from mamf.choices import PEAK_SOURCES, PeakSource
from mamf.contribution.published import published_peaks
from mamf.device_names import NamedDevice, find_devices
from mamf.dtypes import canonical_name
from mamf.errors import IncomparableError, MamfWarning, RunLogError, UnavailableError, UsageError
from mamf.limits import require_known, shorten
from mamf.logs.found import cached_ceiling
from mamf.measurement import TERA
from mamf.operations.matmul.operation import problem_for
from mamf.peaks import Peak, find_peak, listed_peak
from mamf.plugins.discovery import open_backend
from mamf.regime_names import CEILINGS
from mamf.statistics import CONFIDENCE, Interval

#: Tiers of figures without a log.
PUBLISHED, DATASHEET = "published, not checked", "datasheet"
_USUAL_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class KnownPeak:
    """``flops``: FLOP/s of a device for a dtype, and ``interval`` (FLOP/s), the 95 % repeat interval. Of a datasheet's
    figure, and of a published one, regime and interval are None. ``description``: what it is and where it comes from,
    one line. ``tier``: of the log in results/, else ``published, not checked`` or ``datasheet``. ``reference``: the
    log, address or datasheet.
    """

    flops: float
    interval: Interval | None
    regime: str | None
    source: PeakSource
    description: str
    dtype: str
    device: str
    tier: str = "complete"
    reference: str = ""

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
    name: str | None = None,
    source: PeakSource | None = None,
) -> KnownPeak:
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
    backend = opened(device)
    info, dtype = backend.info, backend.resolve_dtype(canonical_name(dtype or backend.default_dtype))
    finders = {
        "measured": partial(_measured, backend, dtype, regime),
        "contributed": partial(_contributed, info, dtype, regime, anyway),
        "datasheet": partial(datasheet_peak, info, dtype),
    }
    known = next(filter(None, (find() for kind, find in finders.items() if source in (None, kind))), None)
    if known is None:
        raise UnavailableError(
            f"nothing is known of {dtype} on {info.name}: nobody contributed its ceiling and no datasheet of it is "
            f"listed; measure it: {_command(dtype)}"
        )
    return known


def peaks_by_name(
    name: str, dtype: str | None = None, regime: str = "sustained", source: PeakSource | None = None
) -> list[KnownPeak]:
    """All that is known of a device by name; the answer of :func:`peak` comes first. Raises its errors."""
    devices = find_devices(name)
    for each in [canonical_name(dtype)] if dtype else _USUAL_DTYPES:
        known = [_known_of(device, each, regime, source) for device in devices]
        if any(known):
            return _unambiguous(name, devices, known)
    raise UnavailableError(
        f"nothing is listed for {devices[0].name}, {dtype or 'any usual dtype'}, source {source or 'any'}"
    )


def _known_of(device: NamedDevice, dtype: str, regime: str, source: PeakSource | None) -> list[KnownPeak]:
    """The best first; empty without a figure of this regime and source."""
    finders: list[Callable[[str], KnownPeak | None]] = [
        partial(_highest_contributed, device, regime),
        partial(_published, device),
        lambda dtype: _promise(listed_peak(device.device, dtype), device.name, dtype),
        *(partial(_highest_contributed, device, each) for each in CEILINGS if each != regime),
    ]
    # Which of them a device supports, its adapter knows.
    dtypes = ("float8_e4m3fn", "float8_e4m3fnuz") if dtype == "fp8" else (dtype,)
    found = [next(filter(None, map(find, dtypes)), None) for find in finders]
    known = [replace(each, dtype=dtype) for each in found if each and source in (None, each.source)]
    return known if known and known[0].regime in (None, regime) else []


def _unambiguous(name: str, devices: Sequence[NamedDevice], known: Sequence[list[KnownPeak]]) -> list[KnownPeak]:
    """What all these devices have in common. A guess among cards that differ would be wrong without a sign of it."""
    figures = [f"{each[0].tflops:g}" if each else "none" for each in known]
    if len(set(figures)) > 1:
        listed = ", ".join(f"{device.name} ({figure})" for device, figure in zip(devices, figures, strict=True))
        raise UsageError(f"{shorten(name)!r} may be one of several devices; name one, in TFLOPS: {listed}")
    return known[0] if len(devices) == 1 else [replace(known[0][0], device=name)]


def measured_peak(
    device: int | str | Backend | None, dtype: str, regime: str = "sustained", *, anyway: bool = False
) -> KnownPeak:
    """As :func:`peak`, but measured, here or on a device of the same kind. Also raises UnavailableError if only a
    datasheet is known, or if the interval of what was measured is unknown.
    """
    known = peak(device, dtype, regime, anyway=True) if anyway else peak(device, dtype, regime)
    if known.source == "datasheet":
        raise UnavailableError(f"a datasheet's figure is no ceiling; measure it: {_command(dtype)}")
    if known.interval is not None and not known.interval.is_known:
        raise UnavailableError(f"the ceiling of {known.device} is too noisy for shares of it: {_command(dtype)}")
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
    problem = problem_for(backend, dtype)
    for each in (problem, replace(problem, fast_accumulation=True)):
        try:
            before = cached_ceiling(backend.info, each, regime)
        except RunLogError as error:
            warnings.warn(f"not used: {error}", MamfWarning, stacklevel=3)
            continue
        if before is None:
            continue
        is_this = backend.info.uuid_hash is not None or not backend.is_accelerator
        which = "this very device" if is_this else "a device of this name in this machine"
        ceiling = before.ceiling
        tier = "" if before.tier == "complete" else f", {before.tier}"
        what = f"{label_dtype(ceiling.problem)} at {ceiling.shape} by {ceiling.kernel}"
        description = f"measured on {which}, {before.started[:10]}{tier}: {what}"
        interval = _flops(ceiling.interval.low, ceiling.interval.high, ceiling.interval.coverage)
        return KnownPeak(
            *(ceiling.rate * TERA, interval, regime, "measured", description, dtype, ceiling.device, before.tier),
            reference=str(before.path),
        )
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
        return _contribution(row, dtype, f", although of {differences}" if differences else "")
    return None


def _highest_contributed(device: NamedDevice, regime: str, dtype: str) -> KnownPeak | None:
    rows = [row for row in contributed_ceilings() if row.device in device.names and row.regime == regime]
    own = [row for row in rows if row.dtype in _labels(dtype)]
    return _contribution(max(own, key=lambda row: (row.dtype == dtype, row.tflops)), dtype) if own else None


def _contribution(row: ContributedCeiling, dtype: str, remark: str = "") -> KnownPeak:
    limit = f"{row.power_limit_watts:g} W" if row.power_limit_watts else ""
    conditions = ", ".join(filter(None, (row.date, limit, row.software)))
    description = (
        f"contributed for {row.device}{remark}: {row.dtype}, results/{row.log} ({conditions}); cards differ: "
        f"{_command(dtype)}"
    )
    return KnownPeak(
        *(
            row.tflops * TERA,
            _flops(row.low, row.high, CONFIDENCE),
            row.regime,
            "contributed",
            description,
            dtype,
            row.device,
        ),
        reference=f"results/{row.log}",
    )


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
    return _promise(find_peak(info.name, dtype, info.compute_units), info.name, dtype)


def _promise(listed: Peak | None, device: str, dtype: str) -> KnownPeak | None:
    if listed is None:
        return None
    description = f"datasheet of {listed.origin}, dense {listed.dtype}; no kernel reaches it: {_command(dtype)}"
    tier = DATASHEET if listed.is_verified else f"{DATASHEET}, unverified"
    return KnownPeak(listed.flops, None, None, "datasheet", description, dtype, device, tier, listed.source)


def _published(device: NamedDevice, dtype: str) -> KnownPeak | None:
    figure = published_peaks().get((device.device, dtype))
    if figure is None:
        return None
    said = "; ".join(filter(None, (figure.source, figure.statistic)))
    description = f"{PUBLISHED}, for {figure.accelerator}: {dtype}, {said}; measure it: {_command(dtype)}"
    return KnownPeak(
        *(figure.tflops * TERA, None, None, "published", description, dtype, device.name, PUBLISHED, figure.source)
    )


def _flops(low: float, high: float, coverage: float) -> Interval:
    return Interval(low * TERA, high * TERA, coverage)
