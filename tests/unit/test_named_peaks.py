"""Test ``mamf peak --name`` and ``mamf.peak(name=...)``, which look up rates of a device that need not be in this
machine: which device a name means, which rate mamf chooses, and that this works without torch.
"""

import importlib.resources
import json
import subprocess
import sys
from pathlib import Path

import pytest
from published_peaks import format_csv, read_published

import mamf
from mamf.contribution.known_ceilings import SHIPPED_PUBLISHED_FIGURES_FILE, find_peaks_by_name, read_published_rates
from mamf.dtypes import DTYPES
from mamf.errors import UnavailableError, UnknownNameError, UsageError
from mamf.peaks import find_device_models, find_peak_of_listed_device, read_contributed_rates, read_device_models

ROOT = Path(__file__).resolve().parents[2]
H100 = "NVIDIA H100 80GB HBM3"


# -- which device a name means -----------------------------------------------------------------------------------------


def test_only_one_name_of_a_listed_device_is_ambiguous():
    ambiguous_names = {
        name for device in read_device_models() for name in device.names if find_device_models(name) != [device]
    }
    assert ambiguous_names == {"AMD Instinct MI250X / MI250"}


def test_every_contributed_device_is_found_by_its_name():
    for row in read_contributed_rates():
        assert mamf.peak(name=row.device, dtype=row.dtype.partition(",")[0], regime=row.regime).source == "contributed"


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("h100 sxm", H100),
        ("nvidia h100 pcie", "NVIDIA H100 PCIe"),
        ("NVIDIA B300 SXM6 AC", "NVIDIA B300 SXM6 AC"),
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA GeForce RTX 4090 48GB", "NVIDIA GeForce RTX 4090"),
        ("3090 Ti", "NVIDIA GeForce RTX 3090 Ti"),
        ("RTX PRO 6000 Blackwell Workstation Edition", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
        ("V100 SXM2", "Tesla V100-SXM2-16GB"),
        ("mi300x", "AMD Instinct MI300X"),
        ("Strix Halo", "AMD Radeon 8060S Graphics"),
        ("Data Center GPU Max 1550", "Intel(R) Data Center GPU Max 1550"),
        ("TPU v5p", "TPU v5"),
        ("trillium", "TPU v6 lite"),
        ("M4 Max", "Apple M4 Max"),
    ],
)
def test_a_common_name_finds_its_device(name, device):
    assert [model.name for model in find_device_models(name)] == [device]


@pytest.mark.parametrize(
    ("name", "dtype", "candidates"),
    [
        ("H100", "bfloat16", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", H100]),
        ("NVIDIA H100", "bfloat16", ["NVIDIA H100 PCIe"]),
        ("RTX PRO 6000", "bfloat16", ["Max-Q Workstation Edition", "Blackwell Server Edition"]),
        ("Tesla V100", "float16", ["Tesla V100-SXM2-16GB", "Tesla V100-PCIE-16GB"]),
        ("AMD Instinct MI250X / MI250", "bfloat16", ["110 compute units", "104 compute units"]),
    ],
)
def test_an_ambiguous_name_is_refused_in_one_line_with_the_candidates(name, dtype, candidates):
    with pytest.raises(UsageError, match="matches several devices") as raised:
        mamf.peak(name=name, dtype=dtype)
    assert all(candidate in str(raised.value) for candidate in candidates) and "TFLOPS" not in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("RTX 4090 Laptop GPU", "unknown device"),
        ("NVIDIA GeForce RTX 3080 12GB", "unknown device.*RTX 3080 10GB"),
        ("AMD Radeon Graphics", "unknown device"),  # the driver reports this name for many devices
        ("NVIDIA A101", "similar name:.*A100|similar name:.*A10"),
        ("\x1b[2J", r"'\\x1b\[2J'"),
        ("x" * 10000, "10000 characters"),
        (f"{H100} MIG 3g.40gb", "part of a card"),
        ("NVIDIA H200 (shared: other processes)", "part of a card"),
    ],
)
def test_an_unknown_name_or_a_part_of_a_card_is_refused_in_one_line(name, error):
    with pytest.raises(UsageError, match=error) as raised:
        mamf.peak(name=name)
    assert len(str(raised.value).splitlines()) == 1


# -- which rate mamf chooses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("regime", ["sustained", "burst"])
def test_a_contributed_ceiling_comes_first(regime):
    peak = mamf.peak(name=H100, dtype="bfloat16", regime=regime)
    (row,) = (
        row for row in read_contributed_rates() if (row.device, row.dtype, row.regime) == (H100, "bfloat16", regime)
    )
    assert (peak.source, peak.tier, peak.regime) == ("contributed", "complete", regime)
    assert (peak.tflops, peak.reference) == (pytest.approx(row.tflops), row.reference)
    assert f"({row.date}, 700 W, torch " in peak.description
    header = json.loads((ROOT / row.reference).open(encoding="utf-8").readline())
    assert header["started"].startswith(row.date)


def test_published_figures_come_second_with_their_address():
    peak = mamf.peak(name="NVIDIA B200", dtype="bfloat16")
    assert (peak.source, peak.tier, peak.regime) == ("published", "published, not checked", None)
    assert peak.reference.startswith("https://")
    assert peak.tflops < find_peak_of_listed_device("B200 SXM", "bfloat16").flops / 1e12
    assert peak.description.startswith("published, not checked, for NVIDIA B200")


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        # For these devices, training frameworks had no peak or a wrong one, such as the peak with sparsity, or the peak
        # of two dies for one.
        ("AMD Instinct MI350X", "bfloat16", 2306.9),
        ("NVIDIA B300 SXM6 AC", "bfloat16", 2250),
        ("NVIDIA H100 NVL", "bfloat16", 835),
        (H100, "fp8", 1979),
        ("NVIDIA A100-SXM4-80GB", "torch.bfloat16", 312),
        ("AMD Instinct MI250X", "bfloat16", 191.5),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "bfloat16", 480),
        ("NVIDIA B100", "bfloat16", 1750),
        ("Intel(R) Data Center GPU Max 1550", "bfloat16", 419),
        ("trn2", "bfloat16", 166.75),
    ],
)
def test_a_datasheet_peak_is_the_dense_peak_of_the_whole_device(name, dtype, tflops):
    assert mamf.peak(name=name, dtype=dtype, source="datasheet").flops == pytest.approx(tflops * 1e12)


def test_no_figure_exceeds_the_dense_peak_by_a_factor_of_sparsity():
    for device in read_device_models():
        for dtype in DTYPES:
            peak = find_peak_of_listed_device(device.listed_name, dtype)
            rates = find_peaks_by_name(device.name, dtype) if peak else []
            assert all(rate.flops <= 1.25 * peak.flops for rate in rates)
            assert not peak or rates[-1].source == "contributed" or rates[-1].flops == peak.flops


def test_fp8_is_the_format_that_the_device_has():
    assert "float8_e4m3fnuz" in mamf.peak(name="MI300X", dtype="fp8").description
    assert "float8_e4m3fn," in mamf.peak(name="H200", dtype="fp8").description.replace(":", ",")


def test_an_unlisted_rate_or_a_wrong_argument_is_refused():
    with pytest.raises(UnavailableError, match="mamf has no nvfp4 rate for Tesla T4"):
        mamf.peak(name="T4", dtype="nvfp4")
    with pytest.raises(UnavailableError, match="from the source contributed"):
        mamf.peak(name="T4", source="contributed")
    with pytest.raises(UnknownNameError, match="datasheet"):
        mamf.peak(name="T4", source="rumor")
    with pytest.raises(UnknownNameError, match="bfloat16"):
        mamf.peak(name="T4", dtype="bfloat15")
    with pytest.raises(UsageError, match="both device and name"):
        mamf.peak("cpu", name="T4")


# -- what the package ships --------------------------------------------------------------------------------------------


def test_the_published_figures_of_the_package_are_those_of_results(monkeypatch):
    monkeypatch.setattr("mamf.peaks.difflib.get_close_matches", lambda *arguments, **options: [])  # it is slow
    shipped = importlib.resources.files("mamf").joinpath(SHIPPED_PUBLISHED_FIGURES_FILE).read_text(encoding="utf-8")
    assert format_csv(read_published(ROOT / "results")) == shipped
    assert len(shipped) < 50_000


def test_a_shipped_figure_contains_nothing_that_needs_a_license():
    listed_names = {model.listed_name for model in read_device_models()}
    for (device, _), row in read_published_rates().items():
        assert device in listed_names and row["source"].startswith("https://")
        assert not any(row[name] for name in ("m", "software", "date", "version", "license"))
        assert "A800" not in row["accelerator"]


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_answers_in_its_last_lines(run):
    code, out, _ = run("peak", "--name", "h100 sxm", "--dtype", "bfloat16")
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines[1:5]] == ["contributed", "published,", "datasheet", "contributed"]
    assert lines[-2].startswith(f"{H100}, bfloat16, sustained: ")
    assert "results/nvidia-h100" in lines[-1]


def test_the_command_prints_records(run):
    record = json.loads(run("peak", "--name", "MI300X", "--format", "json")[1])
    assert (record["tier"], record["flops"]) == ("published, not checked", record["known"][0]["tflops"] * 1e12)
    assert run("peak", "--name", "MI300X", "--format", "csv")[1].startswith("source,tier,regime,tflops,reference\n")


# -- without torch -----------------------------------------------------------------------------------------------------

LOOK_UP_WITHOUT_PACKAGES = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {*sys.stdlib_module_names, "mamf", "mamf_backends"}:
            raise ImportError(f"blocked: {name}")

sys.meta_path.insert(0, Blocker())
import mamf
from mamf.cli import main
print(mamf.peak(name="NVIDIA H100 80GB HBM3", dtype="bfloat16").tflops)
code = main(["peak", "--name", "NVIDIA B200", "--format", "csv"])
print(code, sorted({"torch", "numpy"} & set(sys.modules)))
"""


@pytest.mark.parametrize("command", [["find"], ["node"], ["profile", __file__]])
def test_a_command_that_needs_torch_says_so_in_one_line(command):
    code = f"import sys; sys.modules['torch'] = None; from mamf.cli import main; sys.exit(main({command}))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (process.returncode, process.stderr.count("\n")) == (2, 1)
    assert process.stderr.startswith(("mamf: this command needs torch", "mamf: no backend can be loaded without torch"))


def test_a_look_up_needs_no_third_party_package():
    process = subprocess.run([sys.executable, "-c", LOOK_UP_WITHOUT_PACKAGES], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
    lines = process.stdout.splitlines()
    assert float(lines[0]) == mamf.peak(name=H100).tflops
    assert lines[1].startswith("source,")
    assert lines[-1] == "0 []"
