"""Test that mamf finds the rows of each device in peaks.csv by the name that the device's driver reports, and that it
does not use unverified figures as bounds.
"""

import csv
import importlib.resources
import re
from dataclasses import replace

import pytest

from mamf import peaks
from mamf.backend import DeviceInfo
from mamf.dtypes import DTYPES
from mamf.operations.bandwidth.operation import BandwidthProblem, BandwidthShape
from mamf.peaks import compute_max_flops, find_datasheet_bandwidth, find_datasheet_rate, read_device_models
from mamf.plugins.discovery import make_operation

ROWS = list(csv.DictReader(importlib.resources.files("mamf").joinpath("peaks.csv").open(encoding="utf-8")))
#: Devices that only the name and the number of compute units together identify. The keys are the beginnings of their
#: names in peaks.csv; the values are the name that the driver reports and the number of compute units.
BY_UNITS = {
    "RTX 3080": ("NVIDIA GeForce RTX 3080", 68),
    "Jetson AGX Orin": ("Orin", 16),
    "MI250X / MI250 shared name, 110": ("AMD Instinct MI250X / MI250", 110),
    "MI250X / MI250 shared name, 104": ("AMD Instinct MI250X / MI250", 104),
    "Data Center GPU Max 1550 - one": ("Intel(R) Data Center GPU Max 1550", 512),
    "Data Center GPU Max 1550 - both": ("Intel(R) Data Center GPU Max 1550", 1024),
    "AMD EPYC 9965": ("AMD EPYC 9965 192-Core Processor", 192),
    "Xeon Platinum 8480+": ("Intel(R) Xeon(R) Platinum 8480+", 56),
    "Xeon 6980P": ("Intel(R) Xeon(R) 6980P", 128),
}


def yield_devices():
    """Yield each device in peaks.csv with the name that its driver reports and its number of compute units.

    The first name in the list of a device is the one that its driver reports.
    """
    for device in read_device_models():
        names_and_units = [identity for start, identity in BY_UNITS.items() if device.listed_name.startswith(start)]
        yield device.listed_name, *(names_and_units[0] if names_and_units else (device.names[0], None))


DEVICES = list(yield_devices())


def find_rows(name, units=None):
    return peaks._find_device_rows(name, units)


@pytest.mark.parametrize(("device", "name", "units"), DEVICES)
def test_a_device_finds_its_own_rows(device, name, units):
    assert {row.device for row in find_rows(name, units)} == {device}


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("AMD Radeon Graphics", None),  # the driver reports this name for many devices
        ("AMD Instinct MI250X / MI250", None),  # two devices that differ in their number of compute units
        ("NVIDIA GeForce RTX 3080", 70),  # the 12 GB card
        ("NVIDIA GeForce RTX 3080", None),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("Ascend910B2", None),  # sources contradict one another
        ("Orin", 8),  # the Orin NX or the Orin Nano
        ("AMD EPYC 9965 192-Core Processor", 384),  # two sockets
        ("AMD EPYC 9965 192-Core Processor", 2),  # a virtual machine
    ],
)
def test_an_ambiguous_name_matches_nothing(name, units):
    assert find_rows(name, units) == ()
    assert find_datasheet_bandwidth(name, units) is None


# -- unverified figures ------------------------------------------------------------------------------------------------

UNVERIFIED = [row for row in ROWS if row["verified"] == "no"]


def test_unverified_figures_are_marked_and_none_is_from_memory():
    assert {row["verified"] for row in ROWS} == {"yes", "flops", "no"}
    assert len(UNVERIFIED) == 31
    assert not [row for row in ROWS if "from memory" in row["source"]]


@pytest.mark.parametrize(("device", "name", "units"), DEVICES)
def test_an_unverified_figure_is_shown_as_such_and_bounds_nothing(device, name, units):
    info = DeviceInfo("x", 0, name, "x", compute_units=units)
    unverified = {row.dtype for row in find_rows(name, units) if row.verified_figures == "no"}
    for dtype, properties in DTYPES.items():
        peak = find_datasheet_rate(name, dtype, units)
        if peak is None:
            continue
        assert peak.is_verified is (properties.datasheet_dtype not in unverified)
        assert peak.is_verified is ("unverified" not in peak.device_label) is ("unverified" not in peak.tier)
        bound = compute_max_flops(info, dtype)
        assert (bound is not None) is (peak.is_verified or (dtype == "float64" and "fp32" not in unverified))


def test_an_unverified_bandwidth_bounds_nothing():
    assert find_datasheet_bandwidth("TPU v6 lite") == pytest.approx(1.64e12)
    assert find_datasheet_bandwidth("TPU v6 lite", must_be_verified=True) is None
    assert find_datasheet_bandwidth("NVIDIA H200", must_be_verified=True) == pytest.approx(4.8e12)
    tpu = DeviceInfo("x", 0, "TPU v6 lite", "x", cache_bytes=2**20)
    shape = BandwidthShape(2**30)
    assert make_operation("bandwidth").find_max_possible_rate(tpu, BandwidthProblem(), shape) is None
    assert make_operation("bandwidth").find_max_possible_rate(
        replace(tpu, name="NVIDIA H200"), BandwidthProblem(), shape
    )


# -- upper bounds of rates ---------------------------------------------------------------------------------------------


def test_the_upper_bound_allows_rates_above_the_datasheet_that_boards_reached():
    limit = compute_max_flops(DeviceInfo("cuda", 0, "NVIDIA GeForce RTX 4090", "NVIDIA"), "bfloat16")
    assert limit is not None
    assert limit > 178.8e12


#: Matches a web address with a common top-level domain, or a repository as OWNER/NAME.
PUBLIC_SOURCE = re.compile(
    r"\b[\w-]+(\.[\w-]+)*\.(ai|be|cn|com|cz|dev|info|io|net|org|pl|ru|uk)\b|\b[\w-]+/[\w.-]+(@[0-9a-f]{7}| )"
)


def test_every_figure_names_a_public_source():
    rows = [row for row in ROWS if row["dense_tflops"] or row["bandwidth_tb_s"]]
    assert not [(row["name"], row["dtype"]) for row in rows if not PUBLIC_SOURCE.search(row["source"])]
