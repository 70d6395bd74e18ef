"""Look up data that ships with this package: dense peaks and bandwidths from datasheets (peaks.csv), the names of
devices (device_names.csv), and confirmed ceilings from results/ (contributed.csv). A ceiling is the highest rate that
mamf measured on a device.

To find the model of a device, mamf uses the first row of peaks.csv whose pattern matches the device's name. If no row
matches, the device has no known peak. The column ``verified`` says which figures of a row were checked against a
source: ``yes`` (all), ``flops`` (not the bandwidth) or ``no`` (none). Reports mark unverified figures, and mamf never
rejects a measurement because of them.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from mamf.backend import DeviceInfo, parse_sharing_ways
from mamf.dtypes import DTYPES
from mamf.errors import UsageError, shorten_value
from mamf.files import read_packaged_csv_rows
from mamf.measurement import DATASHEET_TIER, TERA, Rate
from mamf.statistics import CONFIDENCE, Interval

#: The name of the file of confirmed ceilings in this package, which ``mamf results table`` writes.
CONTRIBUTED_FILE_NAME = "contributed.csv"

# Allow rates up to 1.25 times the datasheet's peak if the datasheet does not give a clock. Boards run faster than their
# datasheets say (an RTX 4090 reaches 178.8 TFLOPS instead of 165.2), but not 25 % faster.
UNKNOWN_CLOCK_HEADROOM = 1.25
# Allow rates up to 1.02 times the peak if the datasheet gives a clock, because drivers report and set clocks in steps
# of 15 MHz or more.
_KNOWN_CLOCK_HEADROOM = 1.02
# Allow rates up to 1.02 times the peak at the measured clock. If the clock may have fallen during the measurement,
# allow up to 1.10 times this peak (see compute_max_flops_at_clock).
READ_CLOCK_HEADROOM, FALLING_CLOCK_HEADROOM = 1.02, 1.10
# If no float64 peak is listed, use the float32 peak as the upper limit, because no device is faster in float64.
_BOUNDING_DTYPES = {"fp64": "fp32"}
# A compute unit does a multiple of 16 FLOP per cycle. A value that is computed from a datasheet may differ from the
# right multiple by 0.5 %, because datasheets round.
_FLOP_PER_CYCLE_MULTIPLE, _MAX_ROUNDING_ERROR = 16, 0.005
# Upper limits for any CPU core: the FLOP per cycle, by dtype, and the clock. Two 512-bit FMA units do 32 FLOP per cycle
# in float64 and 64 in float32. Matrix units (Intel's AMX and Apple's) do up to 256 in float32, 4096 in int8 and 2048 in
# other narrow dtypes.
_MAX_CORE_FLOP_PER_CYCLE = {"float64": 64, "float32": 256, "int8": 4096}
_MAX_CORE_FLOP_PER_CYCLE_OF_NARROW_DTYPES = 2048
_MAX_CORE_HZ = 7e9


@dataclass(frozen=True, kw_only=True)
class DatasheetRate(Rate):
    """A row of peaks.csv: the peak rate of one device model for one dtype, without sparsity.

    - ``rate``: the peak in TFLOPS; 0 in a row that lists only a bandwidth.
    - ``bandwidth_tb_per_second``: the bandwidth in TB/s.
    - ``dtype``: the datasheet's name of the dtype, as in ``DType.datasheet_dtype``.
    - ``name_pattern``: matches the names of the device model.
    - ``compute_unit_counts``: the possible numbers of compute units of the model; empty if any number is possible.
    - ``clock_hz``: the clock at which the device reaches the peak; None if the source does not give it.
    - ``verified_figures``: which figures of the row were checked against their source: "yes" (all), "flops" or "no".
    """

    name_pattern: re.Pattern[str]
    bandwidth_tb_per_second: float | None
    clock_hz: float | None
    compute_unit_counts: frozenset[int]
    verified_figures: str

    @property
    def is_verified(self) -> bool:
        """Whether the rate was checked against its source."""
        return self.verified_figures != "no"

    @property
    def device_label(self) -> str:
        """The device name for reports, with "(unverified)" if the rate was not checked against its source."""
        return self.device if self.is_verified else f"{self.device} (unverified)"


@functools.cache
def _read_peak_rows() -> tuple[DatasheetRate, ...]:
    return tuple(
        DatasheetRate(
            rate=float(row["dense_tflops"] or 0),
            dtype=row["dtype"],
            device=row["name"],
            source="datasheet",
            tier=DATASHEET_TIER if row["verified"] != "no" else f"{DATASHEET_TIER}, unverified",
            reference=row["source"],
            name_pattern=re.compile(row["match"]),
            bandwidth_tb_per_second=float(row["bandwidth_tb_s"]) if row["bandwidth_tb_s"] else None,
            clock_hz=float(row["clock_mhz"]) * 1e6 if row["clock_mhz"] else None,
            compute_unit_counts=frozenset(map(int, row["compute_units"].split())),
            verified_figures=row["verified"],
        )
        for row in read_packaged_csv_rows("peaks.csv")
    )


def find_datasheet_rate(device_name: str, dtype: str, compute_units: int | None = None) -> DatasheetRate | None:
    """Return the datasheet peak of a device for a dtype, or None if peaks.csv does not list it.

    ``dtype``: mamf's name of the dtype. ``compute_units``: distinguishes device models that have the same name.
    """
    return _find_first_peak(_find_device_rows(device_name, compute_units), DTYPES[dtype].datasheet_dtype)


def compute_flop_per_cycle(peak: DatasheetRate | None, compute_units: int | None) -> float | None:
    """Return the FLOP per cycle of one compute unit at a device's peak; None if the clock or the number of units is
    unknown.

    A compute unit does a multiple of 16 FLOP per cycle, but datasheets round the peak (989 for 989.4 TFLOPS). So round
    the result to a multiple of 16 if this changes it by at most 0.5 %.
    """
    if peak is None or not peak.clock_hz or not compute_units:
        return None
    unrounded = peak.flops / peak.clock_hz / compute_units
    rounded = _FLOP_PER_CYCLE_MULTIPLE * round(unrounded / _FLOP_PER_CYCLE_MULTIPLE)
    return float(rounded) if abs(rounded / unrounded - 1) <= _MAX_ROUNDING_ERROR else unrounded


def find_peak_of_listed_device(device: str, dtype: str) -> DatasheetRate | None:
    """Return the datasheet peak of a device for a dtype, or None if peaks.csv does not list it.

    ``device``: the name of the device in peaks.csv. ``dtype``: mamf's name of the dtype.
    """
    return _find_first_peak((row for row in _read_peak_rows() if row.device == device), DTYPES[dtype].datasheet_dtype)


def _find_first_peak(rows: Iterable[DatasheetRate], datasheet_dtype: str) -> DatasheetRate | None:
    return next((row for row in rows if row.dtype == datasheet_dtype and row.rate), None)


def find_datasheet_bandwidth(
    device_name: str, compute_units: int | None = None, *, must_be_verified: bool = False
) -> float | None:
    """Return the memory bandwidth in a device's datasheet in bytes/s, reads plus writes, or None if peaks.csv does not
    list it. ``must_be_verified``: ignore bandwidths that were not checked against their source.
    """
    rows = _find_device_rows(device_name, compute_units)
    bandwidths = (row.bandwidth_tb_per_second for row in rows if row.verified_figures == "yes" or not must_be_verified)
    return next((bandwidth * TERA for bandwidth in bandwidths if bandwidth), None)


@functools.lru_cache(64)  # All rows of a log usually come from one device.
def _find_device_rows(device_name: str, compute_units: int | None) -> tuple[DatasheetRate, ...]:
    """Return the rows of the first device in peaks.csv whose pattern and number of compute units match. Return no rows
    if the card is shared (see parse_sharing_ways), because all figures are those of whole cards.
    """
    if parse_sharing_ways(device_name):
        return ()
    rows_with_units = (
        row for row in _read_peak_rows() if not row.compute_unit_counts or compute_units in row.compute_unit_counts
    )
    matching_rows = [row for row in rows_with_units if row.name_pattern.search(device_name)]
    return tuple(row for row in matching_rows if row.device == matching_rows[0].device)


def compute_max_flops(info: DeviceInfo, dtype: str) -> float | None:
    """Return the FLOP/s that no launch on the device can exceed at its maximum clock; None if no verified peak is
    listed. For a CPU, the result is a bound that no current core exceeds.
    """
    if not info.is_accelerator:
        core_flops = _MAX_CORE_FLOP_PER_CYCLE.get(dtype, _MAX_CORE_FLOP_PER_CYCLE_OF_NARROW_DTYPES) * _MAX_CORE_HZ
        return info.compute_units * core_flops if info.compute_units else None
    peak = _find_bounding_peak(info, dtype)
    if peak is None:
        return None
    if peak.clock_hz and info.max_clock_hz:
        # Limit the ratio of the clocks. No board runs 25 % above the clock of its model, so a higher reading is wrong.
        ratio = min(info.max_clock_hz / peak.clock_hz, UNKNOWN_CLOCK_HEADROOM)
        return peak.flops * max(1.0, ratio) * _KNOWN_CLOCK_HEADROOM
    return peak.flops * UNKNOWN_CLOCK_HEADROOM


def compute_max_flops_at_clock(
    info: DeviceInfo, dtype: str, clock_hz: float, *, may_clock_fall: bool = False
) -> float | None:
    """Return the FLOP/s that a measurement on the device cannot exceed at the clock ``clock_hz``. Return None if no
    verified peak with a clock is listed.

    - ``clock_hz``: the median of the clocks that mamf read during the measurement.
    - ``may_clock_fall``: whether the clock may have fallen during the measurement, as in a burst at the power limit.

    The headroom is based on 31,256 rows in ``results/``. All but two of them reach at most 99.7 % of the peak at
    ``clock_hz``. Clocks are read in steps of less than 2 %, so READ_CLOCK_HEADROOM is 1.02. The other two rows are
    float64 bursts of an H100 at its power limit, which exceed the peak by 2.1 and 5.1 %. The clock fell during these
    bursts, so the median reading is lower than the clock of most launches. FALLING_CLOCK_HEADROOM allows about twice
    the larger excess.
    """
    peak = _find_bounding_peak(info, dtype) if info.is_accelerator else None
    if peak is None or not peak.clock_hz:
        return None
    return peak.flops * clock_hz / peak.clock_hz * (FALLING_CLOCK_HEADROOM if may_clock_fall else READ_CLOCK_HEADROOM)


def find_device_by_misspelled_name(device_name: str) -> str | None:
    """Return the device of peaks.csv that a probably misspelled name means.

    The device's pattern matches the name only if case and repeated spaces are ignored. Return None if a pattern matches
    the name as it is, or if no pattern matches.
    """
    return (
        None
        if any(row.name_pattern.search(device_name) for row in _read_peak_rows())
        else find_device_by_name(device_name)
    )


def find_device_by_name(device_name: str, *, must_name_suffice: bool = False) -> str | None:
    """Return the first device of peaks.csv whose pattern matches a name, ignoring case and repeated spaces. Return None
    if no pattern matches, or if the card is shared.

    ``must_name_suffice``: ignore devices whose name is ambiguous without the number of compute units.
    """
    spaced_name, rows = " ".join(device_name.split()), () if parse_sharing_ways(device_name) else _read_peak_rows()
    candidate_rows = (row for row in rows if not (must_name_suffice and row.compute_unit_counts))
    return next(
        (row.device for row in candidate_rows if re.search(row.name_pattern.pattern, spaced_name, re.IGNORECASE)), None
    )


def _find_bounding_peak(info: DeviceInfo, dtype: str) -> DatasheetRate | None:
    """Return the verified peak that no rate in a dtype can exceed: the peak of the dtype itself, or else that of a
    dtype that is never slower. None if neither is listed.

    In fp16 and fp8, consumer cards are twice as fast if they accumulate in 16 bits. A global flag of torch may have
    enabled this, so return the peak with 16-bit accumulation if it is listed and higher.
    """
    datasheet_dtype, rows = DTYPES[dtype].datasheet_dtype, _find_device_rows(info.name, info.compute_units)
    for name in (datasheet_dtype, _BOUNDING_DTYPES.get(datasheet_dtype, datasheet_dtype)):
        listed = (_find_first_peak(rows, listed_name) for listed_name in (name, f"{name}_acc16"))
        if verified := [peak for peak in listed if peak is not None and peak.is_verified]:
            return max(verified, key=lambda peak: peak.flops)
    return None


# -- devices by name ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceModel:
    """A device model of peaks.csv with all its names.

    - ``listed_name``: the name in peaks.csv.
    - ``names``: the names that drivers and people use. The first is the name that torch reports, unless torch reports
      this name for another model too.
    """

    listed_name: str
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.names[0]

    @functools.cached_property
    def name_words(self) -> frozenset[str]:
        return _split_name_into_words(" ".join(self.names))


@functools.cache
def read_device_models() -> tuple[DeviceModel, ...]:
    """Return all device models of peaks.csv, in the order of the file."""
    return tuple(
        DeviceModel(row["device"], tuple(row["names"].split("; ")))
        for row in read_packaged_csv_rows("device_names.csv")
    )


def find_device_models(name: str) -> list[DeviceModel]:
    """Return the device models that a name may mean; several if it is ambiguous. Apply the first of these rules that
    finds a model:

    1. The name equals a listed name, ignoring case, spaces, punctuation and the vendor.
    2. The name contains a number, and all its words occur in the names of a model. If this is true of several models,
       return only the model whose words also occur in the names of all others (RTX 3090 rather than RTX 3090 Ti).
    3. The pattern of a model in peaks.csv matches the name.

    Raises UsageError with similar names if no rule finds a model.
    """
    models, words, normalized_name = read_device_models(), _split_name_into_words(name), _normalize_device_name(name)
    matching_models = [
        model for model in models if normalized_name in map(_normalize_device_name, (model.listed_name, *model.names))
    ]
    if matching_models := matching_models or [
        model for model in models if words and normalized_name == _normalize_device_name(model.name.partition(" ")[2])
    ]:
        return matching_models
    if candidates := [model for model in models if re.search(r"\d", name) and words <= model.name_words]:
        return [
            model for model in candidates if all(model.name_words <= other.name_words for other in candidates)
        ] or candidates
    listed_name = find_device_by_name(name, must_name_suffice=True)
    if matching_models := [model for model in models if model.listed_name == listed_name]:
        return matching_models
    if listed_name or parse_sharing_ways(name):
        raise UsageError(
            f"{shorten_value(name)!r} is a part of a card, but figures are listed for whole cards only: give the name "
            "of the card"
        )
    listed_names = {listed.casefold(): listed for model in models for listed in model.names}
    similar_names = [
        listed_names[key] for key in difflib.get_close_matches(name[:99].casefold(), listed_names, cutoff=0.5)
    ]
    raise UsageError(
        f"unknown device {shorten_value(name)!r}: "
        + (
            f"choose a similar name: {', '.join(similar_names)}"
            if similar_names
            else "no known name is similar; mamf/device_names.csv lists the names"
        )
    )


def _normalize_device_name(name: str) -> str:
    return re.sub(r"[^a-z0-9+]", "", name.lower())


def _split_name_into_words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", name.lower()))


# -- contributed ceilings ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ContributedRate(Rate):
    """The highest confirmed ceiling (highest measured rate) in results/ for a device model, a dtype and a regime.

    - ``regime``: the way in which mamf loaded the device, such as ``burst``.
    - ``interval``: the confidence interval of the rate, in TFLOPS.
    - ``compute_units``, ``power_limit_watts``: properties of the device; None if the vendor's libraries did not report
      them.
    - ``shapes``: the fastest shapes that ``mamf find`` runs found on devices of this model, fastest first.
    - ``kernel``: the fastest kernel in the fastest ``mamf find`` run that tried several kernels; empty if there is no
      such run.
    - ``card_count``: the number of cards measured.
    - ``min_card_rate``: the ceiling of the slowest of these cards, in TFLOPS.
    - ``software``: the versions of torch, the vendor's libraries and the driver.
    """

    regime: str
    interval: Interval
    compute_units: int | None
    power_limit_watts: float | None
    shapes: tuple[str, ...] = ()
    kernel: str = ""
    card_count: int = 1
    min_card_rate: float = 0.0
    software: str = ""


@functools.cache
def read_contributed_rates() -> tuple[ContributedRate, ...]:
    """Return all contributed ceilings that ship with this package."""
    return tuple(
        ContributedRate(
            rate=float(row["tflops"]),
            interval=Interval(float(row["low"]), float(row["high"]), CONFIDENCE),
            device=row["device"],
            source="contributed",
            reference=f"results/{row['log']}",
            compute_units=int(row["compute_units"]) if row["compute_units"] else None,
            power_limit_watts=float(row["power_limit_watts"]) if row["power_limit_watts"] else None,
            shapes=tuple(row["shapes"].split()),
            card_count=int(row["cards"]),
            min_card_rate=float(row["lowest"]),
            **{name: row[name] for name in ("dtype", "regime", "kernel", "date", "software")},
        )
        for row in read_packaged_csv_rows(CONTRIBUTED_FILE_NAME)
    )


def find_contributed_rates(device: str, compute_units: int | None, dtype: str) -> list[ContributedRate]:
    """Return the contributed ceilings of devices with the name ``device`` and this number of compute units. ``dtype``:
    the dtype as ``make_dtype_label`` writes it.
    """
    return [
        rate
        for rate in read_contributed_rates()
        if (rate.device, rate.compute_units, rate.dtype) == (device, compute_units, dtype)
    ]
