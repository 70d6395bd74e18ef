"""Test where ``mamf.peak`` finds a rate: in the cache of ceilings measured on this card, in the contributed ceilings of
this model, or in its datasheet, but never in figures of another device.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from made_rates import contributed
from refusals import assert_refused

import mamf
from mamf.contribution import known_ceilings
from mamf.errors import IncomparableError, UnavailableError, UsageError
from mamf.logs import ceiling_cache
from mamf.logs.run_log import read_run_log
from mamf.peaks import read_contributed_rates
from mamf.testing import SimulatedBackend

RESULTS = Path(__file__).resolve().parents[2] / "results"
H200 = RESULTS / "nvidia-h200" / "find-bfloat16-burst-sustained-20261121-154925.jsonl"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Return the folder of an empty cache of ceilings, which all tests of this file use."""
    monkeypatch.setenv("MAMF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_device(**changes):
    """Return a simulated backend whose device has the properties of the H200 in the log, with ``changes``."""
    header = json.loads(H200.read_text().partition("\n")[0])
    backend = SimulatedBackend()
    backend.info = replace(mamf.DeviceInfo(**header["device"]), **changes)
    return backend


@pytest.fixture
def same_torch(monkeypatch):
    """Make the cache see the package versions of the log, because its file names depend on the version of torch."""
    header = json.loads(H200.read_text().partition("\n")[0])
    monkeypatch.setattr(ceiling_cache, "get_package_version", lambda name: header["environment"]["packages"][name])


def test_a_ceiling_that_find_cached_comes_first(cache, same_torch):
    ceiling_cache.cache_ceilings(H200, pytest.fail)
    rate = mamf.peak(make_device(), "bf16")
    assert (rate.source, rate.regime, rate.tflops) == ("measured", "sustained", pytest.approx(711.981))
    ceiling = read_run_log(H200).ceilings["sustained"]
    assert rate.interval.low == pytest.approx(ceiling.interval.low, rel=1e-5)
    assert rate.description.startswith("measured on this device, 2026-11-21: bfloat16 at")
    assert mamf.peak(make_device(), regime="burst").tflops == pytest.approx(861.8, abs=0.5)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    "change", [{"uuid_hash": "another"}, {"driver": "1"}, {"uuid_hash": None}, {"power_limit_watts": None}]
)
def test_a_cached_ceiling_is_not_used_for_another_card_or_driver(same_torch, change):
    ceiling_cache.cache_ceilings(H200, pytest.fail)
    assert mamf.peak(make_device(**change)).source == "contributed"


def test_a_ceiling_of_a_device_without_uuid_is_not_described_as_measured_on_this_device(same_torch, tmp_path):
    header, _, other_lines = H200.read_text().partition("\n")
    record = json.loads(header)
    record["device"]["uuid_hash"] = None
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(record) + "\n" + other_lines)
    ceiling_cache.cache_ceilings(log, pytest.fail)
    assert "a device with this name in this machine" in mamf.peak(make_device(uuid_hash=None)).description


def write_changed_log(
    path, *, is_complete=True, day="2026-11-21", is_interval_known=True, output="bfloat16", finding="", factor=1.0
):
    """Write the log of the H200 to ``path`` with changes that matter to the ranking in the cache. Return ``path``."""
    header, *records = H200.read_text().replace('"out_dtype": "bfloat16"', f'"out_dtype": "{output}"').splitlines()
    header_record = json.loads(header)
    header_record["started"] = day + header_record["started"][10:]
    header_record["findings"] = [finding]
    records = [json.loads(record) for record in (records if is_complete else records[:-1])]
    for record in records:
        if record["record"] == "ceiling":
            record["tflops"] *= factor
            if not is_interval_known:
                record["interval_tflops"] = [record["tflops"] / 9, record["tflops"] * 9]
    path.write_text("".join(json.dumps(record) + "\n" for record in (header_record, *records)))
    return path


@pytest.mark.parametrize(
    ("better", "worse", "reason"),
    [
        ({}, {"day": "2026-11-20"}, "is older"),
        ({}, {"is_complete": False, "day": "2026-11-22"}, "comes from an interrupted search"),
        ({"is_complete": False}, {"is_interval_known": False, "day": "2026-11-22"}, "has an unknown interval"),
    ],
)
def test_the_better_find_is_kept_whichever_comes_first(cache, same_torch, tmp_path, better, worse, reason):
    good, bad = write_changed_log(tmp_path / "good.jsonl", **better), write_changed_log(tmp_path / "bad.jsonl", **worse)
    ceiling_cache.cache_ceilings(bad, pytest.fail)
    ceiling_cache.cache_ceilings(good, pytest.fail)
    assert {path.read_bytes() for path in cache.iterdir()} == {good.read_bytes()}
    messages = []
    ceiling_cache.cache_ceilings(bad, messages.append)
    assert {path.read_bytes() for path in cache.iterdir()} == {good.read_bytes()}
    assert len(messages) == 2
    assert all(
        "is not stored for 'mamf peak': " in message and f" ceiling {reason}, so mamf keeps the ceiling" in message
        for message in messages
    )


@pytest.mark.parametrize("check", ["cpu load", "host load", "other processes", "search time"])
def test_a_find_that_was_short_or_next_to_other_work_replaces_no_other_find(cache, same_torch, tmp_path, check):
    busy = write_changed_log(
        tmp_path / "busy.jsonl", day="2026-11-22", finding=f"WARN {check}: 1 found; rates are lower"
    )
    quiet = write_changed_log(tmp_path / "quiet.jsonl", day="2026-11-23", finding=f"ok   {check}: none found")
    for log in (busy, busy, quiet):  # An empty cache stores the busy log, and a log may replace itself.
        ceiling_cache.cache_ceilings(log, pytest.fail)
        assert {path.read_bytes() for path in cache.iterdir()} == {log.read_bytes()}
    later = write_changed_log(
        tmp_path / "later.jsonl", day="2026-11-24", finding=f"WARN {check}: 1 found; rates are lower"
    )
    messages = []
    ceiling_cache.cache_ceilings(later, messages.append)
    assert {path.read_bytes() for path in cache.iterdir()} == {quiet.read_bytes()}
    assert len(messages) == 2
    assert all(f"comes from a run with a warning ({check}), so mamf keeps" in message for message in messages)


@pytest.mark.parametrize("is_interval_known", [True, False])
def test_of_two_busy_finds_the_higher_one_is_kept(cache, same_torch, tmp_path, is_interval_known):
    changes = {"finding": "WARN cpu load: 1 found; rates are lower", "is_interval_known": is_interval_known}
    first = write_changed_log(tmp_path / "first.jsonl", day="2026-11-22", **changes)
    higher = write_changed_log(tmp_path / "higher.jsonl", day="2026-11-23", factor=1.001, **changes)
    for log in (first, higher):
        ceiling_cache.cache_ceilings(log, pytest.fail)
        assert {path.read_bytes() for path in cache.iterdir()} == {log.read_bytes()}
    messages = []
    ceiling_cache.cache_ceilings(
        write_changed_log(tmp_path / "lower.jsonl", day="2026-11-24", **changes), messages.append
    )
    assert {path.read_bytes() for path in cache.iterdir()} == {higher.read_bytes()}
    assert all("may be too low, like the stored one, and is lower, so mamf keeps" in message for message in messages)


def test_a_ceiling_with_an_unknown_interval_gives_no_mamfu(same_torch, tmp_path):
    ceiling_cache.cache_ceilings(write_changed_log(tmp_path / "log.jsonl", is_interval_known=False), pytest.fail)
    rate = mamf.peak(make_device())
    assert (rate.source, rate.interval.is_known) == ("measured", False)
    with pytest.raises(UnavailableError, match="too noisy"):
        known_ceilings.find_measured_peak(make_device(), "bfloat16")
    with pytest.raises(UsageError, match="too noisy"):
        mamf.Meter(flops_per_step=1e12, ceiling=rate, backend=make_device())
    with pytest.warns(UserWarning, match="MAMFU is NaN: .* too noisy"):
        mamf.Meter(flops_per_step=1e12, backend=make_device())
    ceiling = read_run_log(tmp_path / "log.jsonl").ceilings["burst"]
    with pytest.raises(IncomparableError, match="too noisy"):
        ceiling.compute_utilization(flop=1e12, seconds=1.0, regime="burst")


def test_a_link_in_the_cache_is_replaced_and_not_followed(cache, same_torch, tmp_path):
    """Check that mamf does not follow the link, because in a shared folder another user may have made it."""
    ceiling_cache.cache_ceilings(H200, pytest.fail)
    target = tmp_path / "target.jsonl"
    target.write_bytes(write_changed_log(tmp_path / "log.jsonl", day="2026-12-01").read_bytes())
    before = target.read_bytes()
    for path in cache.iterdir():
        path.unlink()
        path.symlink_to(target)
    assert mamf.peak(make_device()).source == "contributed"
    ceiling_cache.cache_ceilings(H200, pytest.fail)
    assert mamf.peak(make_device()).source == "measured"
    assert target.read_bytes() == before


def test_a_ceiling_measured_with_zeros_is_not_cached(cache, tmp_path):
    log, messages = tmp_path / "log.jsonl", []
    log.write_text(H200.read_text().replace('"data": "normal"', '"data": "zeros"'))
    ceiling_cache.cache_ceilings(log, messages.append)
    assert not cache.exists()
    assert "the operands of this run are zeros" in messages[0]


def test_a_broken_file_is_warned_of_and_not_used(cache, same_torch):
    ceiling_cache.cache_ceilings(H200, pytest.fail)
    for path in cache.iterdir():
        path.write_text("{}\n")
    with pytest.warns(UserWarning, match="ignores a measured ceiling"):
        assert mamf.peak(make_device()).source == "contributed"


def test_a_rate_with_fast_accumulation_is_used_and_described_only_if_no_other_is_known(monkeypatch):
    rows = [
        row for row in read_contributed_rates() if (row.device, row.dtype) != ("NVIDIA H100 80GB HBM3", "float8_e4m3fn")
    ]
    monkeypatch.setattr(known_ceilings, "read_contributed_rates", lambda: rows)
    rate = mamf.peak(make_device(name="NVIDIA H100 80GB HBM3"), "float8_e4m3fn")
    assert rate.tflops == pytest.approx(1390.39)
    assert "fast accumulation" in rate.description
    assert "fast accumulation" not in mamf.peak(make_device(), "float8_e4m3fn").description


@pytest.mark.parametrize(
    ("change", "message"),
    [({"power_limit_watts": 500.0}, "700 W, here 500 W"), ({"compute_units": 114}, "132 compute units, here 114")],
)
def test_a_rate_of_another_build_or_power_limit_is_refused_without_anyway(change, message):
    with pytest.raises(IncomparableError, match=message):
        mamf.peak(make_device(**change))
    assert message in mamf.peak(make_device(**change), anyway=True).description


def test_a_rate_of_another_cpu_with_the_same_name_is_not_used(monkeypatch):
    row = contributed("AMD EPYC", 2, None, 0.13, "float32", "burst")
    monkeypatch.setattr(known_ceilings, "read_contributed_rates", lambda: [row])
    cpu = make_device(name="AMD EPYC", compute_units=2, power_limit_watts=None, uuid_hash=None, is_accelerator=False)
    with pytest.raises(UnavailableError, match="no float32 peak is known for AMD EPYC"):
        mamf.peak(cpu, "float32", regime="burst", anyway=True)


@pytest.fixture
def real_card(monkeypatch):
    """Make the simulated accelerator look like a real card of an unlisted model, because the cache stores no
    ceilings of simulated devices.
    """
    init = SimulatedBackend.__init__

    def init_as_real_card(self, *arguments, **options):
        init(self, *arguments, **options)
        self.info = replace(self.info, backend="cuda", name="Card", uuid_hash="abc")

    monkeypatch.setattr(SimulatedBackend, "__init__", init_as_real_card)


def test_the_command_prints_a_ceiling_that_find_measured(machine, real_card, run, cache):
    assert run("find", "--regime", "burst", "--output", "new.jsonl")[0] == 0
    code, out, _ = run("peak", "--regime", "burst")
    assert code == 0
    assert "Card, bfloat16, burst:" in out
    assert "measured on this device" in out
    assert f"from: {cache}" in out
    assert_refused(run("peak"), "the burst ceiling is known: 'mamf peak --regime burst' prints it")


def test_a_cache_that_cannot_be_written_is_a_warning(machine, real_card, run, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MAMF_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="MAMF_CACHE"):
        assert mamf.find("bfloat16").tflops > 1
    code, _, err = run("find", "--regime", "burst", "--output", "new.jsonl")
    assert code == 0
    assert "not stored for 'mamf peak': " in err


@pytest.mark.parametrize(
    ("system", "variable", "expected"),
    [("win32", "LOCALAPPDATA", "mamf"), ("linux", "XDG_CACHE_HOME", "mamf"), ("darwin", "", "Library/Caches/mamf")],
)
def test_the_cache_folder_depends_on_the_system(monkeypatch, tmp_path, system, variable, expected):
    monkeypatch.delenv("MAMF_CACHE")
    monkeypatch.setattr(ceiling_cache.sys, "platform", system)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    if variable:
        monkeypatch.setenv(variable, str(tmp_path))
    assert ceiling_cache.get_cache_folder() == tmp_path / expected


def test_the_command_prints_value_interval_and_source(machine, run):
    code, out, _ = run("peak")
    assert code == 0
    assert out.splitlines()[0] == "Simulated H100, bfloat16, theoretical: 989.0 TFLOPS"
    assert out.splitlines()[1].startswith("datasheet of")


def test_an_unknown_device_is_refused_in_one_line(run):
    assert_refused(run("peak", "--backend", "cpu", "--dtype", "float64"), "mamf find --dtype float64")
