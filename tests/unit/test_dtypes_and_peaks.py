import pytest

from mamf.backend import DeviceInfo
from mamf.dtypes import DTYPES, OPERAND_DTYPES, canonical_name, tolerance
from mamf.errors import UnknownNameError
from mamf.peaks import fastest_possible_flops, find_peak


@pytest.mark.parametrize(
    ("alias", "name"),
    [("bf16", "bfloat16"), ("torch.float16", "float16"), ("FP32", "float32"), ("e4m3", "fp8"), ("tf32", "tf32")],
)
def test_aliases_mean_one_dtype(alias, name):
    assert canonical_name(alias) == name


def test_an_unknown_dtype_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match=r"did you mean 'bfloat16'"):
        canonical_name("bfloat")


def test_float32_computed_as_tf32_fails_as_float32():
    assert tolerance("float32", "float32", False) < 2.8e-4 < tolerance("tf32", "float32", False)


@pytest.mark.parametrize("dtype", [name for name in OPERAND_DTYPES if DTYPES[name].itemsize > 1 or name == "int8"])
def test_one_wrong_entry_of_256_is_wrong(dtype):
    assert tolerance(dtype, DTYPES[dtype].default_output, False) < 1 / 16


# The names are those that torch reports. Traps: H20 in H200 in GH200, L4 in L40 in L40S, A10 in A100, B200 in GB200.
@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H100 NVL", "float16", 835),
        ("NVIDIA H200", "float8_e4m3fn", 1979),
        ("NVIDIA H200", "tf32", 494.5),
        ("NVIDIA GH200 480GB", "bfloat16", 989),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA L40S", "bfloat16", 362),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("AMD Instinct MI300X", "bfloat16", 1307.4),
        ("GAUDI3", "bfloat16", 1677),
    ],
)
def test_a_device_finds_its_own_peak(name, dtype, tflops):
    peak = find_peak(name, dtype)
    assert peak is not None
    assert peak.flops == pytest.approx(tflops * 1e12, rel=0.01)
    assert peak.source


@pytest.mark.parametrize("name", ["AMD EPYC", "NVIDIA GeForce GTX 1080", "NVIDIA X9000", ""])
def test_an_unknown_device_has_no_peak(name):
    assert find_peak(name, "bfloat16") is None
    assert fastest_possible_flops(DeviceInfo("cuda", 0, name, "NVIDIA"), "bfloat16") is None


@pytest.mark.parametrize(("units", "tflops"), [(110, 191.5), (104, 181)])
def test_compute_units_tell_apart_devices_of_one_name(units, tflops):
    peak = find_peak("AMD Instinct MI250X / MI250", "bfloat16", units)
    assert peak is not None
    assert peak.flops == pytest.approx(tflops * 1e12)


def test_physics_scale_with_the_clock_where_the_source_names_it():
    h100 = DeviceInfo("cuda", 0, "NVIDIA H100 80GB HBM3", "NVIDIA", max_clock_hz=1980e6)
    limit = fastest_possible_flops(h100, "bfloat16")
    assert limit is not None
    assert 132 * 4096 * 1980e6 <= limit <= 1.03 * 132 * 4096 * 1980e6


def test_physics_allow_what_boards_were_seen_to_do_above_their_datasheet():
    limit = fastest_possible_flops(DeviceInfo("cuda", 0, "NVIDIA GeForce RTX 4090", "NVIDIA"), "bfloat16")
    assert limit is not None
    assert limit > 178.8e12
