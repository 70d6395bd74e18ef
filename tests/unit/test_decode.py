"""Test decode: FLOP and bytes, random sequence lengths, and rows as shares of the bandwidth and matmul ceilings."""

import json
from dataclasses import replace
from functools import partial

import library
import pytest
from contribution_logs import RESULTS

from mamf.cli import main
from mamf.errors import UsageError
from mamf.logs.run_log import read_run_log
from mamf.operations.decode.operation import (
    DECODE_PRESETS,
    DecodeKernel,
    DecodeOperation,
    DecodeProblem,
    DecodeShape,
    draw_sequence_sizes,
)
from mamf.testing import Physics, SimulatedBackend
from mamf.testing.simulated_kernels import SimulatedKernel

SIMULATED = ["--backend", "mamf.testing:SimulatedBackend", "--kernel", "test_decode:HalfBandwidthKernel"]


class HalfBandwidthKernel(SimulatedKernel[DecodeProblem, DecodeShape], DecodeKernel):
    """A kernel that reads at half of the simulated device's bandwidth."""

    name = "half-bandwidth"

    def make_launch_function(self, device, problem, shape):
        return partial(device.launch_memory_transfer, 2 * problem.compute_work(shape).nbytes)


def parse_shape(text):
    return DecodeShape.parse(text)


# -- FLOP, bytes and lengths -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "flop", "nbytes"),
    [
        # A sequence has 100 keys and values for each of 8 kv heads, and a query and an output for each of 32 heads.
        ("b2h32kv8q1c100d128", 2 * 32 * 2 * 2 * 100 * 128, 2 * (2 * 100 * 8 * 256 + 2 * 32 * 256)),
        # The last query sees 100 keys, the one before it 99. The tables have 7 pages and a length for each sequence.
        ("b2h32kv8q2c100d128p16", 2 * 32 * 2 * 2 * 199 * 128, 2 * (2 * 100 * 8 * 256 + 4 * 32 * 256) + 4 * (14 + 2)),
        # A latent of 576 elements is both key and value, so it is read once.
        ("b1h128kv1q1c100d576v512l", 2 * 128 * 100 * 1088, 2 * (100 * 576 + 128 * 1088)),
        # All tokens are new, so the mask is causal and leaves 10 pairs of a query and a key.
        ("b1h4q4c4d8", 2 * 4 * 10 * 16, 2 * (4 * 4 * 16 + 4 * 4 * 16)),
    ],
)
def test_flop_and_bytes_are_exact(text, flop, nbytes):
    work = DecodeProblem("bfloat16").compute_work(parse_shape(text))
    assert (work.flop, work.nbytes, work.unit) == (flop, nbytes, "TB/s")


def test_an_8_bit_cache_halves_only_the_bytes_of_the_cache():
    shape = parse_shape("b2h32kv8q1c100d128")
    work_16_bit, work_8_bit = (
        DecodeProblem("bfloat16", cache_dtype).compute_work(shape) for cache_dtype in ("same", "float8_e4m3fn")
    )
    assert work_16_bit.nbytes - work_8_bit.nbytes == 2 * 100 * 8 * 256
    assert work_16_bit.flop == work_8_bit.flop


def test_a_graph_uses_more_kv_caches_than_fit_in_the_cache_of_the_device():
    shape, single, graph = parse_shape("b1h32kv8q1c1024d128"), DecodeProblem(), DecodeProblem(graph=True)
    count = graph.count_kernel_launches(shape)
    assert single.count_kernel_launches(shape) == 1
    assert graph.compute_work(shape).nbytes == count * single.compute_work(shape).nbytes
    assert count == 64 or graph.compute_work(shape).nbytes >= 512 * 2**20
    assert graph.list_buffers(shape)["k"].element_count == count * single.list_buffers(shape)["k"].element_count
    assert graph.count_kernel_launches(parse_shape("b64h32kv8q1c8192d128")) == 3


@pytest.mark.parametrize(("letter", "mean"), [("u", 0.5), ("t", 0.25)])
def test_lengths_are_drawn_once_for_all_kernels(letter, mean):
    shape = parse_shape(f"b400h8q16c10000{letter}d64p16")
    sequence_sizes = draw_sequence_sizes(shape, 0)
    assert sequence_sizes.sequence_lengths[0] == max(sequence_sizes.sequence_lengths) == 10000
    assert sum(sequence_sizes.sequence_lengths) / 400 == pytest.approx(mean * 10000, rel=0.15)
    assert sequence_sizes == draw_sequence_sizes(parse_shape(str(shape)), 0) != draw_sequence_sizes(shape, 1)
    assert all(
        q == min(16, n) for q, n in zip(sequence_sizes.query_counts, sequence_sizes.sequence_lengths, strict=True)
    )
    assert sequence_sizes.page_counts == tuple(-(-n // 16) for n in sequence_sizes.sequence_lengths)


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("b1h16q1", "'b1h16q1' is not a decode shape: write it like b64h32kv8q1c8192d128p16"),
        (
            "b1h6kv4q1c8d64",
            "the number of query heads (6) must be a multiple of the number of kv heads (4): change one of them",
        ),
        ("b1h4q9c8d64", "9 new tokens do not fit in a sequence of 8 tokens: --cache-lens includes the new tokens"),
        (
            "b1h4kv2q1c8d576v512l",
            "--latent needs 1 kv head, and a smaller head dimension for values than for keys: "
            "use --kv-heads 1 --head-dims 576/512",
        ),
        ("b1h4q1c8d64p0", "page size must be at least 1, not 0"),
    ],
)
def test_an_impossible_shape_is_refused_in_one_line(text, reason):
    with pytest.raises(UsageError) as refused:
        parse_shape(text)
    assert str(refused.value) == reason


def test_the_names_of_preset_shapes_are_parsed_to_the_same_shapes():
    operation, backend = DecodeOperation(), SimulatedBackend()
    for name, preset in DECODE_PRESETS.items():
        shapes = [*preset.shapes] or operation.build_shapes(preset.sizes, backend)
        assert all(parse_shape(str(shape)) == shape for shape in shapes), name
        assert len(set(shapes)) == len(shapes)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def decode(run, monkeypatch):
    library.install(monkeypatch)
    return lambda *options: run("attention", *SIMULATED, *options)


def test_rows_are_shares_of_both_ceilings_which_are_measured_first(decode, run, tmp_path):
    options = ["--cache-lens", "8192", "--batch", "8", "--page-sizes", "16", "--output", "run.jsonl"]
    code, out, err = decode("--preset", "llama-8b-decode", *options, "--format", "json")
    assert code == 0, err
    log = read_run_log(tmp_path / "run.jsonl")
    assert log.plan.operation == "decode"
    assert [ceiling.problem.pattern for ceiling in log.other_ceilings.values()] == ["read"]
    (row,) = [row for row in json.loads(out)["measurements"] if row["operation"] == "decode"]
    assert row["mbu"] == pytest.approx(0.5, abs=0.02)
    assert row["bound_by"] == "bandwidth"
    assert row["share_of_roof"] == pytest.approx(row["mbu"], rel=1e-6)
    assert row["mamfu"] == pytest.approx(row["flop"] / (row["time_ms"] / 1e3) / 1e12 / row["ceiling_tflops"], rel=1e-6)
    # ``mamf show`` prints the same, and a resumed run has nothing left to measure.
    assert run("show", "run.jsonl", "--format", "json")[1] == out
    code, _, err = decode("--resume", "run.jsonl")
    assert (code, err.count("\n")) == (0, 1)
    assert err.startswith("run.jsonl is complete, so this run measures nothing; ")


def test_one_message_names_both_ceilings_that_a_short_budget_leaves_unconfirmed(decode):
    code, out, err = decode("--preset", "llama-8b-decode", "--budget", "1s")
    message = "no bfloat16 burst ceiling and no read bandwidth burst ceiling was confirmed in 0.25 s"
    assert (code, out.count(message), err.count(message)) == (0, 1, 1)
    assert (out + err).count("was confirmed in") == 2
    assert err.count("0.25 of the usual 12 s for the bfloat16 ceiling and the read bandwidth ceiling, so") == 1


def test_the_read_bandwidth_of_a_bandwidth_log_is_a_ceiling(decode, run):
    device_options = ["--backend", "mamf.testing:SimulatedBackend"]
    run("bandwidth", *device_options, "--pattern", "read", "--size", "4GiB", "--output", "bandwidth.jsonl")
    run(
        "find",
        *device_options,
        "--kernel",
        "mamf.testing:SimulatedMatmul",
        "--quick",
        "--regime",
        "burst",
        "--output",
        "find.jsonl",
    )
    options = ["--shapes", "b8h32kv8q1c8192d128", "--output", "run.jsonl", "--operation", "decode"]
    code, out, err = decode(*options, "--ceiling", "find.jsonl", "bandwidth.jsonl")
    assert code == 0, err
    assert "read bandwidth (4GiB, simulated-bandwidth)" in out
    code, _, err = decode(*options[:2], "--operation", "decode", "--output", "other.jsonl", "--ceiling", "find.jsonl")
    assert (code, "find.jsonl has no read bandwidth burst ceiling" in err) == (2, True)


@pytest.mark.parametrize(("options", "is_listed"), [([], True), (["--operation", "attention"], False)])
def test_help_of_attention_lists_the_presets_that_select_decode(capsys, options, is_listed):
    with pytest.raises(SystemExit):
        main(["attention", *options, "--help"])
    help_text = capsys.readouterr().out
    presets = help_text.partition("  --preset NAME")[2].partition("problem of attention")[0]
    assert "scaling" in presets and ("llama-8b-decode" in presets) == is_listed


def test_other_commands_read_the_log(decode, run, tmp_path):
    options = ["--preset", "llama-8b-decode", "--cache-lens", "1024", "8192", "--batch", "8"]
    for name in ("one.jsonl", "other.jsonl"):
        assert decode(*options, "--output", name)[0] == 0
    code, out, _ = run("compare", "one.jsonl", "other.jsonl")
    assert (code, "no regression" in out) == (0, True)
    assert "4 rows" in out, "the read bandwidth that each run measured first must not be compared"
    code, out, err = run("plot", "one.jsonl", "--output", "caches.svg")
    assert code == 0, err
    text = (tmp_path / "caches.svg").read_text()
    assert all(part in text for part in ("cache length", "% MBU", "pages of 16", "contiguous"))
    code, out, err = run("reproduce", "one.jsonl", *SIMULATED[:2], "--kernel", SIMULATED[3], "--output", "again.jsonl")
    assert (code, err) == (0, ""), err
    assert "\nreproduced: burst" in out and "by half-bandwidth: 1.500 TB/s claimed, 1.500 TB/s here: " in out


def test_chunks_of_a_prompt_are_drawn_under_the_compute_ceiling_that_limits_them(run, tmp_path):
    (log,) = RESULTS.rglob("decode-bfloat16-burst-20261124-162358.jsonl")
    assert run("plot", str(log), "--output", "chunks.svg")[0] == 0
    text = (tmp_path / "chunks.svg").read_text()
    assert all(part in text for part in ("TFLOPS", "% MAMFU", "the matmul")) and "MBU" not in text


def test_a_guard_checks_the_bandwidth_of_a_decode_row(decode, run, monkeypatch, tmp_path):
    (tmp_path / "guard.toml").write_text(
        'operation = "decode"\nkernels = ["test_decode:HalfBandwidthKernel"]\nbaseline = "baseline.jsonl"\n'
        'shapes = ["b8h32kv8q1c8192d128", "b8h32kv8q1c4096d128"]\n'
    )
    guard = ["guard", "guard.toml", *SIMULATED[:2]]
    assert run(*guard, "--update", "--output", "first.jsonl")[0] == 0
    code, out, _ = run(*guard, "--output", "same.jsonl")
    assert (code, "TB/s" in out) == (0, True), out
    monkeypatch.setattr(
        SimulatedBackend, "physics", replace(Physics(), memory_bandwidth=0.95 * Physics.memory_bandwidth)
    )
    code, out, _ = run(*guard, "--output", "slower.jsonl")
    assert (code, "b8h32kv8q1c8192d128" in out) == (3, True), out
