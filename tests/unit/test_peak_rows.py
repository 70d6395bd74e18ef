"""Each row of peaks.csv is the one that the device it is of finds, by the name that its driver reports."""

import csv
import importlib.resources
import re
from dataclasses import replace

import pytest

from mamf import peaks
from mamf.backend import DeviceInfo
from mamf.dtypes import DTYPES
from mamf.operations.bandwidth.shapes import BandwidthProblem, BandwidthShape
from mamf.peaks import fastest_possible_flops, find_bandwidth, find_peak
from mamf.plugins.discovery import operation

ROWS = list(csv.DictReader(importlib.resources.files("mamf").joinpath("peaks.csv").open(encoding="utf-8")))
#: Names as torch, or the vendor's library, reports them, with the compute units where those decide. Each line starts
#: with how the name in peaks.csv starts.
NAMES = """
GB300 | NVIDIA GB300
GB200 | NVIDIA GB200
MIG slice | NVIDIA H100 80GB HBM3 MIG 3g.40gb
B300 SXM | NVIDIA B300 SXM6 AC
B200 SXM | NVIDIA B200
B100 SXM | NVIDIA B100
GH200 144G HBM3e | NVIDIA GH200 144G HBM3e
GH200 96GB | NVIDIA GH200 480GB
H200 NVL | NVIDIA H200 NVL
H200 SXM | NVIDIA H200
H20 | NVIDIA H20
H100 NVL | NVIDIA H100 NVL
H800 PCIe | NVIDIA H800 PCIe
H800 SXM | NVIDIA H800
H100 PCIe | NVIDIA H100 PCIe
H100 SXM | NVIDIA H100 80GB HBM3
A100 PCIe 80GB | NVIDIA A100 80GB PCIe
A100 PCIe 40GB | NVIDIA A100-PCIE-40GB
A100 SXM 40GB | NVIDIA A100-SXM4-40GB
A100 SXM 80GB | NVIDIA A100-SXM4-80GB
A40 | NVIDIA A40
A30 | NVIDIA A30
A10G | NVIDIA A10G
A10 | NVIDIA A10
RTX A6000 | NVIDIA RTX A6000
L40S | NVIDIA L40S
L40 | NVIDIA L40
L4 | NVIDIA L4
L20 | NVIDIA L20
RTX 6000 Ada | NVIDIA RTX 6000 Ada Generation
RTX 4090 | NVIDIA GeForce RTX 4090
RTX 4090 D | NVIDIA GeForce RTX 4090 D
RTX 3090 | NVIDIA GeForce RTX 3090
RTX 3090 Ti | NVIDIA GeForce RTX 3090 Ti
RTX 5090 | NVIDIA GeForce RTX 5090
RTX 5090 D | NVIDIA GeForce RTX 5090 D
RTX 5090 D v2 | NVIDIA GeForce RTX 5090 D v2
RTX 5080 | NVIDIA GeForce RTX 5080
RTX 5070 Ti | NVIDIA GeForce RTX 5070 Ti
RTX 5070 | NVIDIA GeForce RTX 5070
RTX 4080 | NVIDIA GeForce RTX 4080
RTX 4070 Ti | NVIDIA GeForce RTX 4070 Ti
RTX 4070 | NVIDIA GeForce RTX 4070
RTX 3080 (10 GB) | NVIDIA GeForce RTX 3080 | 68
RTX 3070 | NVIDIA GeForce RTX 3070
RTX A5500 | NVIDIA RTX A5500
RTX A5000 | NVIDIA RTX A5000
RTX A4500 | NVIDIA RTX A4500
RTX A4000 | NVIDIA RTX A4000
RTX A2000 | NVIDIA RTX A2000 12GB
RTX 5000 Ada | NVIDIA RTX 5000 Ada Generation
RTX 4500 Ada | NVIDIA RTX 4500 Ada Generation
RTX 4000 SFF Ada | NVIDIA RTX 4000 SFF Ada Generation
RTX 4000 Ada | NVIDIA RTX 4000 Ada Generation
RTX PRO 6000 Blackwell Max-Q | NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition
RTX PRO 6000 Blackwell Workstation | NVIDIA RTX PRO 6000 Blackwell Workstation Edition
RTX PRO 6000 Blackwell Server | NVIDIA RTX PRO 6000 Blackwell Server Edition
GB10 (DGX Spark) | NVIDIA GB10
Jetson Thor T5000 | NVIDIA Thor
Jetson AGX Orin 64GB | Orin | 16
V100S PCIe | Tesla V100S-PCIE-32GB
V100 PCIe | Tesla V100-PCIE-16GB
V100 SXM2/SXM3 | Tesla V100-SXM2-16GB
T4 | Tesla T4
MI355X | AMD Instinct MI355X
MI350X | AMD Instinct MI350X
MI325X | AMD Instinct MI325X
MI300X | AMD Instinct MI300X
MI300A | AMD Instinct MI300A
MI250X (per GCD) | AMD Instinct MI250X
MI250X / MI250 shared name, 110 | AMD Instinct MI250X / MI250 | 110
MI250X / MI250 shared name, 104 | AMD Instinct MI250X / MI250 | 104
MI250 (per GCD) | AMD Instinct MI250
MI210 | AMD Instinct MI210
MI100 | AMD Instinct MI100
Radeon RX 7900 XTX | AMD Radeon RX 7900 XTX
Radeon RX 7900 XT | AMD Radeon RX 7900 XT
Radeon RX 9070 XT | AMD Radeon RX 9070 XT
Radeon AI PRO R9700 | AMD Radeon AI PRO R9700
Radeon 8060S | AMD Radeon 8060S Graphics
Radeon 8050S | AMD Radeon 8050S Graphics
Gaudi3 | GAUDI3
Gaudi2 | GAUDI2
Data Center GPU Max 1550 - one stack | Intel(R) Data Center GPU Max 1550 | 512
Data Center GPU Max 1550 - both stacks | Intel(R) Data Center GPU Max 1550 | 1024
Data Center GPU Max 1100 | Intel(R) Data Center GPU Max 1100
Arc A770 | Intel(R) Arc(TM) A770 Graphics
Arc B580 | Intel(R) Arc(TM) B580 Graphics
Arc Pro B70 | Intel(R) Arc(TM) Pro B70 Graphics
Arc Pro B65 | Intel(R) Arc(TM) Pro B65 Graphics
Arc Pro B60 | Intel(R) Arc(TM) Pro B60 Graphics
TPU v7x | TPU7x
TPU v7x | TPU v7x
TPU v6e | TPU v6 lite
TPU v5p | TPU v5
TPU v5e | TPU v5 lite
TPU v4 | TPU v4
Trainium2 | trn2
Trainium3 | trn3
Trainium / Inferentia2 | trn1
Trainium / Inferentia2 | inf2
Ascend 910C | Ascend910_9392
Ascend 910 (A) | Ascend910A
Apple M1 | Apple M1
Apple M1 Pro | Apple M1 Pro
Apple M1 Max | Apple M1 Max
Apple M1 Ultra | Apple M1 Ultra
Apple M2 | Apple M2
Apple M2 Pro | Apple M2 Pro
Apple M2 Max | Apple M2 Max
Apple M2 Ultra | Apple M2 Ultra
Apple M3 | Apple M3
Apple M3 Pro | Apple M3 Pro
Apple M3 Max | Apple M3 Max
Apple M3 Ultra | Apple M3 Ultra
Apple M4 | Apple M4
Apple M4 Pro | Apple M4 Pro
Apple M4 Max | Apple M4 Max
Apple M5 | Apple M5
AMD EPYC 9965 | AMD EPYC 9965 192-Core Processor | 192
Xeon Platinum 8480+ | Intel(R) Xeon(R) Platinum 8480+ | 56
Xeon 6980P | Intel(R) Xeon(R) 6980P | 128
"""
DEVICES = [[*map(str.strip, line.split("|")), None][:3] for line in NAMES.strip().splitlines()]


def units_of(text):
    return int(text) if text else None


def rows_found(name, units=None):
    return peaks._rows_of(name, units_of(units))


@pytest.mark.parametrize(("device", "name", "units"), DEVICES)
def test_a_device_finds_its_own_rows(device, name, units):
    (found,) = {row.device for row in rows_found(name, units)}
    assert found == device or found.startswith((f"{device} ", f"{device},", f"{device}:"))


def test_a_device_and_dtype_have_one_row():
    assert len({(row["name"], row["dtype"]) for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("AMD Radeon Graphics", None),  # the driver's name for many
        ("Intel(R) Graphics", None),
        ("AMD Instinct MI250X / MI250", None),  # told apart by units alone
        ("NVIDIA GeForce RTX 3080", 70),  # the 12 GB card
        ("NVIDIA GeForce RTX 3080", None),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", None),
        ("NVIDIA GeForce RTX 4080 SUPER", None),
        ("NVIDIA RTX A5000 Laptop GPU", None),
        ("NVIDIA RTX 5000 Ada Generation Laptop GPU", None),
        ("Ascend910B4", None),
        ("Ascend910B2", None),  # sources differ
        ("Orin", 8),  # the NX, or the Nano
        ("AMD EPYC 9965 192-Core Processor", 384),  # two sockets
        ("AMD EPYC 9965 192-Core Processor", 2),  # a virtual machine
    ],
)
def test_names_that_cannot_be_told_apart_match_nothing(name, units):
    assert rows_found(name, units) == ()
    assert find_bandwidth(name, units_of(units)) is None


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("AMD Instinct MI250X", "float32", 47.87),
        ("AMD Instinct MI250", "float32", 45.26),
        ("NVIDIA A10G", "bfloat16", 70),
        ("NVIDIA A10", "bfloat16", 125),
        ("NVIDIA A30", "bfloat16", 165),
        ("NVIDIA A30", "float64", 10.3),
        ("NVIDIA H200 NVL", "tf32", 417.5),
        ("NVIDIA H200 NVL", "float8_e4m3fn", 1670.5),
        ("NVIDIA GeForce RTX 5090", "nvfp4", 1676),
        ("NVIDIA GeForce RTX 5090 D", "bfloat16", 209.5),
        ("NVIDIA H100 80GB HBM3", "float64", 67),
        ("AMD Instinct MI355X", "bfloat16", 2516.6),
        ("AMD Instinct MI350X", "mxfp4", 9227.5),
        ("AMD Instinct MI325X", "float64", 163.4),
        ("Apple M4 Max", "float32", 18.4),
    ],
)
def test_corrected_figures(name, dtype, tflops):
    assert find_peak(name, dtype).flops == pytest.approx(tflops * 1e12)


# -- unverified figures ------------------------------------------------------------------------------------------------

UNVERIFIED = [row for row in ROWS if row["verified"] == "no"]


def test_unverified_figures_are_marked_and_none_is_from_memory():
    assert {row["verified"] for row in ROWS} == {"yes", "flops", "no"}
    assert len(UNVERIFIED) == 31
    assert not [row for row in ROWS if "from memory" in row["source"]]


@pytest.mark.parametrize(("device", "name", "units"), DEVICES)
def test_an_unverified_figure_is_shown_as_such_and_bounds_nothing(device, name, units):
    info = DeviceInfo("x", 0, name, "x", compute_units=units_of(units))
    unverified = {row.dtype for row in rows_found(name, units) if row.verified == "no"}
    for dtype, known in DTYPES.items():
        peak = find_peak(name, dtype, units_of(units))
        if peak is None:
            continue
        assert peak.is_verified is (known.peak_name not in unverified)
        assert peak.is_verified is ("unverified" not in peak.origin)
        bound = fastest_possible_flops(info, dtype)
        assert (bound is not None) is (peak.is_verified or (dtype == "float64" and "fp32" not in unverified))


def test_an_unverified_bandwidth_bounds_nothing():
    assert find_bandwidth("TPU v6 lite") == pytest.approx(1.64e12)
    assert find_bandwidth("TPU v6 lite", is_verified_only=True) is None
    assert find_bandwidth("NVIDIA H200", is_verified_only=True) == pytest.approx(4.8e12)
    tpu = DeviceInfo("x", 0, "TPU v6 lite", "x", cache_bytes=2**20)
    shape = BandwidthShape(2**30)
    assert operation("bandwidth").fastest_possible(tpu, BandwidthProblem(), shape) is None
    assert operation("bandwidth").fastest_possible(replace(tpu, name="NVIDIA H200"), BandwidthProblem(), shape)


# -- what no device exceeds --------------------------------------------------------------------------------------------


def test_physics_allow_what_boards_were_seen_to_do_above_their_datasheet():
    limit = fastest_possible_flops(DeviceInfo("cuda", 0, "NVIDIA GeForce RTX 4090", "NVIDIA"), "bfloat16")
    assert limit is not None
    assert limit > 178.8e12


#: A host with a path or a name of its own, or a repository at its owner.
PUBLIC = re.compile(
    r"\b[\w-]+(\.[\w-]+)*\.(ai|be|cn|com|cz|dev|info|io|net|org|pl|ru|uk)\b|\b[\w-]+/[\w.-]+(@[0-9a-f]{7}| )"
)


def test_every_figure_names_a_public_source():
    rows = [row for row in ROWS if row["dense_tflops"] or row["bandwidth_tb_s"]]
    assert not [(row["name"], row["dtype"]) for row in rows if not PUBLIC.search(row["source"])]
