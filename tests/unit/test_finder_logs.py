"""Test the import of logs of mamf-finder 2 to 4: it must keep all of their figures, and make up none."""

import gzip
from pathlib import Path

import finder_log_samples as samples
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamf.errors import RunLogError
from mamf.logs.finder import parse_finder_runs, read_finder_logs
from mamf.logs.legacy import FINDER_STATISTICS, read_legacy_log_or_none, write_legacy_log
from mamf.logs.run_log import read_run_log
from mamf.report.imported import make_compared_run

RESULTS = Path(__file__).parents[2] / "results" / "nvidia-h200"


def parse_run(text):
    (run,) = parse_finder_runs(text)
    return run


def join_remarks(run):
    return " | ".join(run.remarks)


@pytest.mark.parametrize("version", samples.ALL)
def test_a_whole_log_is_complete_private_and_unchanged_when_read_back(version, tmp_path):
    run = parse_run(samples.ALL[version])
    assert run.is_complete, run.remarks
    assert run.rows and run.best
    assert {name for row in (*run.rows, *run.best.values()) for name in row.tflops} <= set(FINDER_STATISTICS)
    assert not [name for name in samples.PRIVATE if name in repr(run)]
    assert "did not understand" not in join_remarks(run)
    write_legacy_log(run, tmp_path / "run.jsonl")
    assert read_legacy_log_or_none(tmp_path / "run.jsonl") == run


@pytest.mark.parametrize(
    ("text", "version", "n"),
    [(samples.V2A, "v2", 4096), (samples.V2B, "v2", 4096), (samples.V2C, "v2", 1024), (samples.V2G, "v2", 1024)],
)
def test_shapes_of_version_2_are_read_as_mxnxk(text, version, n):
    run = parse_run(text)
    expected = [f"{m}x{n}x{5120 - n}" for m in (256, 512, 768)]
    assert run.version == version
    assert [row.shape for row in run.rows] == expected
    assert {best.shape for best in run.best.values()} == {expected[1]}
    assert ("prints shapes as MxKxN" in join_remarks(run)) == (n == 4096)


def test_version_2_rows_and_summary():
    run = parse_run(samples.V2G)
    assert [dict(row.tflops) for row in run.rows][1] == {"mean": 300.5, "median": 301.5, "fastest": 310.5}
    assert {name: best.tflops[name] for name, best in run.best.items()} == dict(run.rows[1].tflops)
    assert run.means == {"arithmetic": 200.2, "geometric": 181.8}
    assert (run.tried, run.elapsed_seconds) == (3, 39)
    assert parse_run(samples.V2D).means == {"geometric": 181.8}


def test_lines_that_are_not_understood_are_counted():
    run = parse_run(samples.V2G.replace("(median)", "(mode)", 4))
    assert len(run.rows) == 1
    assert join_remarks(run) == "lines with figures that mamf did not understand when it imported the log: 2"


class TestHead:
    def test_version_2(self):
        run = parse_run(samples.V2G)
        assert run.started == "2025-01-04T16:01:02"
        assert run.command == (
            "<path>/python ./mamf-finder.py --m_range 0 769 256 --n 1024 --k 4096 --output_file=<path>/mm.txt"
        )
        assert run.dtype == "bfloat16"
        assert run.device == "NVIDIA H100 80GB HBM3"
        assert run.device_properties == {
            "major": "9",
            "minor": "0",
            "total_memory": "81079MB",
            "multi_processor_count": "132",
            "L2_cache_size": "50MB",
        }
        assert run.software == {"torch": "2.5.1+cu124", "cuda": "12.4"}

    @pytest.mark.parametrize(
        "path", ["'/home/grace_h/my results/a b.txt'", '"C:\\Users\\grace_h\\my results\\a b.txt"']
    )
    def test_a_path_with_blanks(self, path):
        run = parse_run(samples.v2(header=samples.head(f"--output_file {path}", notes=samples.V2_NOTES)))
        assert "my results" not in run.command
        assert "grace_h" not in run.command
        assert "a b.txt" in run.command


def test_damage_by_terminals_markdown_and_libraries():
    run = parse_run(samples.DAMAGED)
    assert (run.device, run.dtype) == ("AMD Instinct MI300X", "float16")
    assert [str(row.shape) for row in run.rows] == [samples.FIRST, samples.THIRD]
    assert run.best["median"].tflops == {"median": 301.5}
    assert run.elapsed_seconds == 225720
    assert not [name for name in samples.PRIVATE if name in repr(run)]


class TestInterrupted:
    def test_during_the_warm_up(self):
        run = parse_run(samples.WARMUP_INTERRUPTED)
        assert (run.is_complete, run.tried, run.best, run.means) == (False, 0, {}, {})

    def test_scouts_are_not_ceilings(self):
        run = parse_run(samples.V4_INTERRUPTED)
        assert {best.stage for best in run.best.values()} == {"scout"}
        assert (run.is_complete, "(scouts), not ceilings" in join_remarks(run)) == (False, True)

    def test_no_summary(self):
        run = parse_run(samples.V2G.split("Tried 3")[0])
        assert (len(run.rows), run.is_complete, "no summary" in join_remarks(run)) == (3, False, True)


class TestStaged:
    def test_rows_of_v3(self):
        run = parse_run(samples.V3)
        assert [(row.stage, dict(row.tflops), row.clock_mhz) for row in run.rows] == [
            ("scout", {"mean": 815.7, "median": 815.3, "fastest": 822.4}, 1980),
            ("scout", {"mean": 828.4, "median": 828.6, "fastest": 831.6}, 1965),
            ("screen", {"fastest": 837.7}, 1965),
            ("screen", {"fastest": 830.0}, None),
            ("confirm", {"MSMF": 743.0}, 1792),
            ("confirm", {"MAMF": 810.1}, 1500),
            ("confirm", {"MAMF": 842.3}, 1980),
        ]
        assert run.best["MAMF"].shape == "3072x2816x20480"

    def test_rows_of_v4(self):
        run = parse_run(samples.V4)
        sustained = [row for row in run.rows if "MSMF" in row.tflops]
        assert [(row.stage, row.tflops["MSMF"], row.remarks) for row in sustained] == [
            ("screen", 730.0, ("rank",)),
            ("confirm", 727.0, ("not steady",)),
            ("confirm", 723.5, ()),
            ("confirm", 722.5, ("locked in",)),
        ]
        assert (sustained[2].watts, sustained[2].celsius) == (None, None)
        assert (sustained[3].watts, sustained[3].celsius) == (681, 63)
        assert run.best["MSMF"].celsius == 63
        assert run.best["MSMF"].tflops == {"MSMF": 722}
        assert run.best["MSMF"].stage == "confirm"
        assert run.dtype == "mxfp8"
        assert run.tried == 2


class TestNode:
    def test_figures_by_gpu_and_of_the_node(self):
        run = parse_run(samples.V4_NODE)
        assert [(row.label, dict(row.tflops), row.watts, row.clock_mhz) for row in run.rows] == [
            ("GPU 0", {"MAMF": 852}, None, None),
            ("GPU 0", {"MSMF": 745}, 700, 1850),
            ("GPU 1", {"MAMF": 848}, None, None),
            ("GPU 1", {"MSMF": 755}, 699, None),
            ("GPU 2", {"MSMF": 741}, 698, 1838),
        ]
        assert run.best["MAMF"].tflops == {"MAMF": 850}
        assert run.best["MSMF"].label == "node, median GPU"

    def test_a_gpu_that_failed(self):
        row = next(line for line in samples.V4_NODE.splitlines() if line.startswith("    2 "))
        failed = f"    2      n/a  {'':<18}      n/a  {'':<18} {'':>4} {'':>5} {'':>3}    0%"
        run = parse_run(samples.V4_NODE.replace(row, failed))
        assert {row.label for row in run.rows} == {"GPU 0", "GPU 1"}
        assert not run.is_complete

    def test_a_truncated_summary(self):
        run = parse_run(samples.V4_NODE.split("MSMF (node")[0])
        assert set(run.best) == {"MAMF"}
        assert not run.is_complete

    def test_without_a_figure(self):
        table = samples.V4_NODE.split("    0 ")[0]
        with pytest.raises(RunLogError, match="has no row or summary"):
            parse_finder_runs(table)
        assert parse_finder_runs(samples.V4 + table) == parse_finder_runs(samples.V4)


def test_several_runs_in_one_file():
    runs = parse_finder_runs(samples.V2G + samples.V4 + samples.V2A)
    assert [run.version for run in runs] == ["v2", "v4", "v2"]
    assert runs[1] == parse_run(samples.V4)


class TestFiles:
    @pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-8-sig"])
    @pytest.mark.parametrize("compress", [bytes, gzip.compress])
    def test_read(self, tmp_path, encoding, compress):
        path = tmp_path / "mm.txt"
        path.write_bytes(compress(samples.V2G.replace("\n", "\r\n").encode(encoding)))
        assert read_finder_logs(path) == parse_finder_runs(samples.V2G)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "has no row or summary"),
            (b"hello\n", "has no row or summary"),
            (
                b"     1 |  100.0 TFLOPS @ 256x1024x4096 | best:  100.0 TFLOPS @ 256x1024x4096 (MxNxK)\n",
                "has no row or summary",
            ),
            (b"\0\1\2", "has no row or summary"),
            (gzip.compress(samples.V2G.encode())[:200], "cannot be read"),
        ],
    )
    def test_a_file_without_figures_is_refused(self, tmp_path, content, message):
        path = tmp_path / "mm.txt"
        path.write_bytes(content)
        with pytest.raises(RunLogError, match=f"mm.txt: .*{message}"):
            read_finder_logs(path)


# -- truncated, mixed and random logs ----------------------------------------------------------------------------------


def parse_runs(text):
    """Return the runs in a text, or an empty list if it contains no run."""
    try:
        return parse_finder_runs(text)
    except RunLogError:
        return []


def collect_figures(run):
    return {(*figure, row.shape) for row in (*run.rows, *run.best.values()) for figure in row.tflops.items()}


@pytest.mark.parametrize("version", ["v2g", "v3-dev", "v4", "v4-node"])
def test_a_log_truncated_anywhere_yields_no_wrong_figure(version):
    text = samples.ALL[version]
    whole = parse_run(text)
    for end in range(1, len(text), 3):  # figures have more than 3 characters, so each is cut somewhere
        for run in parse_runs(text[:end]):
            assert collect_figures(run) <= collect_figures(whole)
            assert not run.is_complete or run.best


@given(st.lists(st.sampled_from([line for text in samples.ALL.values() for line in text.split("\n")]), max_size=40))
@settings(deadline=None)
def test_lines_in_any_order_never_crash(lines):
    assert isinstance(parse_runs("\n".join(lines)), list)


@given(st.text(max_size=300))
@settings(deadline=None)
def test_any_text_never_crashes(text):
    assert isinstance(parse_runs(text), list)


def test_the_warning_of_a_node_summary_is_kept():
    assert parse_run(samples.V4_NODE).remarks == ("GPU(s) 1 saw idle siblings during their MSMF measurement",)


def test_medians_of_mamf_finder_are_compared_with_medians_of_classic():
    log = read_run_log(RESULTS / "sweep-torch-mm-bfloat16-classic-20261123-071112.jsonl")
    row = next(row for row in log.measurements if str(row.shape) == "6400x4096x4096")
    assert row.best_rate > 1.05 * row.compute_rate("median")  # in classic, the fastest launch gives the best rate
    mamf_run = make_compared_run("", log)
    finder_run = make_compared_run(
        "", read_legacy_log_or_none(RESULTS / "mamf-finder-v2g-bfloat16-20261123-071020.jsonl")
    )
    assert (finder_run.statistic, mamf_run.statistic) == ("median", "classic median")
    assert mamf_run.tflops_by_shape["6400x4096x4096"] == pytest.approx(row.compute_rate("median"))
