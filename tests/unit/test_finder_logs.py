"""Every grammar of mamf-finder: what its log says is imported, what it leaves open stays open."""

import json
from dataclasses import asdict

import finder_log_samples as samples
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamf.errors import RunLogError
from mamf.logs.finder import parse, read_finder_logs
from mamf.logs.legacy import STATISTICS, FinderRun, Reported, read_legacy_or_none, write_legacy_log
from mamf.operations.matmul.shapes import MatmulShape

# The three shapes of the samples where the second printed number is the reduction, and where the third is.
OF_SECOND = [MatmulShape(m, 4096, 1024) for m in (256, 512, 768)]
OF_THIRD = [MatmulShape(m, 1024, 4096) for m in (256, 512, 768)]


def run_of(text):
    (run,) = parse(text)
    return run


def shapes(run):
    return [row.shape for row in run.rows]


def remarks(run):
    return " | ".join(run.remarks)


@pytest.mark.parametrize("version", samples.ALL)
def test_the_grammar_is_told_by_looks(version):
    assert run_of(samples.ALL[version]).version == version


@pytest.mark.parametrize("version", samples.ALL)
def test_a_whole_log_is_complete_and_private(version):
    run = run_of(samples.ALL[version])
    assert run.is_complete, run.remarks
    assert run.rows and run.best
    written = json.dumps(asdict(run))
    assert not [name for name in samples.PRIVATE if name in written]


@pytest.mark.parametrize("version", samples.ALL)
def test_figures_have_known_names(version):
    run = run_of(samples.ALL[version])
    assert {name for row in (*run.rows, *run.best.values()) for name in row.tflops} <= set(STATISTICS)
    assert set(run.best) <= set(STATISTICS)


@pytest.mark.parametrize("version", samples.ALL)
def test_survives_being_written_and_read_as_a_run_log(version, tmp_path):
    run = run_of(samples.ALL[version])
    write_legacy_log(run, tmp_path / "run.jsonl")
    assert read_legacy_or_none(tmp_path / "run.jsonl") == run


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (samples.V1A, OF_SECOND),
        (samples.V1B, OF_SECOND),
        (samples.V1C, OF_SECOND),
        (samples.V1C_PLUS, OF_SECOND),
        (samples.V1D, OF_SECOND),
        (samples.V2A, OF_SECOND),
        (samples.V2B, OF_SECOND),
        (samples.V2B_LATE, OF_SECOND),
        (samples.V2C_EARLY, OF_THIRD),
        (samples.V2C, OF_THIRD),
        (samples.V2D, OF_THIRD),
        (samples.V2G, OF_THIRD),
    ],
)
def test_which_printed_number_is_the_reduction(text, expected):
    run = run_of(text)
    assert shapes(run) == expected
    assert {best.shape for best in run.best.values()} == {expected[1]}


@pytest.mark.parametrize("text", [samples.V1A, samples.V1B, samples.V1C])
def test_version_1_does_not_say_which_statistic_it_prints(text):
    run = run_of(text)
    assert [row.tflops for row in run.rows] == [{"stated": 100.0}, {"stated": 300.5}, {"stated": 200.0}]
    assert set(run.best) == {"stated"}
    assert run.elapsed_seconds == 9


def test_version_1_notes_of_none_are_no_notes():
    assert run_of(samples.V1B).notes == ()


def test_v1d_prints_the_median_of_the_shape_with_the_highest_maximum():
    run = run_of(samples.V1D)
    assert run.rows[2].tflops == {"fastest": 210.0, "median": 200.0}
    assert {name: best.tflops for name, best in run.best.items()} == {"fastest": {"fastest": 310.5, "median": 300.5}}


class TestRowsThatPrintTheBestShape:
    def test_the_tried_shape_is_rebuilt_from_the_command_line(self):
        run = run_of(samples.V1C_BROKEN)
        assert shapes(run) == OF_SECOND
        assert "rebuilt from row number and command line" in remarks(run)

    def test_without_ranges_only_rows_of_a_new_best_have_a_shape(self):
        run = run_of(samples.v1c(samples.head("--m_range 0 769"), of_third=samples.SECOND))
        assert shapes(run) == [*OF_SECOND[:2], None]
        assert "not known" in remarks(run)

    def test_ranges_that_contradict_a_new_best_rebuild_nothing(self):
        run = run_of(samples.v1c(samples.head("--m_range 0 7690 2560 --n 1024 --k 4096"), of_third=samples.SECOND))
        assert shapes(run) == [*OF_SECOND[:2], None]

    def test_fewer_sizes_than_rows_rebuild_nothing(self):
        run = run_of(samples.v1c(samples.head("--m_range 0 513 256 --n 1024 --k 4096"), of_third=samples.SECOND))
        assert shapes(run) == [*OF_SECOND[:2], None]
        assert "not known" in remarks(run)

    def test_a_head_that_is_cut_off_leaves_the_shape_unknown(self):
        rows = samples.V1C_BROKEN.split(samples.DASHES)[1]
        run = run_of(rows.split("\n", 4)[4])  # the first row is lost too
        assert [row.tflops["stated"] for row in run.rows] == [300.5, 200.0]
        assert shapes(run) == [None, None]

    @pytest.mark.parametrize("text", [samples.V1B, samples.V1C, samples.V1C_PLUS])
    def test_healthy_logs_are_left_alone(self, text):
        assert "best shape" not in remarks(run_of(text))

    @given(
        st.lists(st.integers(1, 9), min_size=2, max_size=4, unique=True),
        st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True),
        st.data(),
    )
    @settings(max_examples=50, deadline=None)
    def test_the_order_is_that_of_the_loops(self, ms, ks, data):
        tried = [f"{m}x7x{k}" for m in ms for k in ks]
        tflops = data.draw(st.lists(st.integers(1, 99), min_size=len(tried), max_size=len(tried), unique=True))
        tflops[-1], best, best_shape = 0, 0, ""  # the last one is no new best: the trap shows
        text = samples.head(f"--m {' '.join(map(str, ms))} --n 7 --k {' '.join(map(str, ks))}")
        for number, (value, shape) in enumerate(zip(tflops, tried, strict=True), start=1):
            if value > best:
                best, best_shape = value, shape
            text += samples.stated_row(number, value, best_shape, best, best_shape)
        expected = [MatmulShape(m, k, 7) for m in ms for k in ks]
        assert shapes(run_of(text)) == expected


@pytest.mark.parametrize("text", [samples.V2C, samples.V2D, samples.V2E, samples.V2F, samples.V2G])
def test_version_2_rows_and_summary(text):
    run = run_of(text)
    assert run.rows[2].tflops == {"mean": 200.0, "median": 201.0, "fastest": 210.0}
    assert {name: best.tflops[name] for name, best in run.best.items()} == {
        "mean": 300.5,
        "median": 301.5,
        "fastest": 310.5,
    }
    assert (run.tried, run.elapsed_seconds, run.rows[2].stage) == (3, 39, "")


def test_means_and_ranges():
    assert run_of(samples.V2C).means == {}
    assert run_of(samples.V2E).means == {"geometric": 181.8}
    assert run_of(samples.V2G).means == {"arithmetic": 200.2, "geometric": 181.8}
    assert run_of(samples.V2C).ranges is None
    assert run_of(samples.V2E).ranges == run_of(samples.V2G).ranges == "m=[0, 769, 256] | n=[1024] | k=[4096]"


@pytest.mark.parametrize("text", [samples.V2A, samples.V2B])
def test_a_misleading_version_number_is_remarked(text):
    assert "prints benchmark version 2, but its second number is the reduction" in remarks(run_of(text))


def test_version_2_as_printed_from_v2c_on_is_not_remarked():
    assert run_of(samples.V2G).remarks == ()


def test_rows_alone_between_two_meanings_have_no_shape():
    rows = samples.three_row(1, 100.0, "256x1024x4096", 100.0, end="") + "\n"
    rows += samples.three_row(2, 90.0, "256x1024x1024", 100.0, end="") + "\n"
    run = run_of(rows)
    assert run.version == "v2b/v2c"
    assert shapes(run) == [None, MatmulShape(256, 1024, 1024)]  # equal numbers leave nothing open
    assert "does not say which number is the reduction" in run.rows[0].remarks[0]


def test_a_cut_head_leaves_several_versions():
    run = run_of(samples.V2E.split(samples.DASHES)[1])
    assert run.version == "v2e/v2f"
    assert shapes(run) == OF_THIRD
    assert (run.started, run.dtype, run.device, run.command) == (None, None, None, None)


def test_a_line_of_a_readme_is_enough():
    run = run_of(f"best: The best outcome was 821.2TFLOPS @ {samples.SECOND} (MxNxK) (tried 1000 shapes)\n")
    assert run.version == "v1b/v1c/v1c+/F1"
    assert run.best["stated"].shape == OF_SECOND[1]
    assert (run.tried, run.rows, run.dtype) == (1000, (), None)


def test_a_console_capture_without_head():
    run = run_of(samples.V4.split("plateaus) ...\n")[1])
    assert run.version == "v4"
    assert run.is_complete
    assert run.dtype is None


def test_a_shape_as_wide_as_its_column_tells_nothing_of_the_column():
    shape = "100000x100000x100000"
    assert run_of(samples.stated_row(1, 1.0, shape, 1.0, shape)).version == "v1b/v1c/v1c+"


def test_a_dimension_of_zero_is_no_shape():
    text = samples.V1B.replace(samples.FIRST, "0x1024x4096")
    assert shapes(run_of(text)) == [None, *OF_SECOND[1:]]


class TestHead:
    def test_of_version_2(self):
        run = run_of(samples.V2G)
        assert run.started == "2025-01-04T16:01:02"
        assert run.command == (
            "<path>/python ./mamf-finder.py --m_range 0 769 256 --n 1024 --k 4096 --output_file=<path>/mm.txt"
        )
        assert run.dtype == "bfloat16"
        assert run.platform.startswith("Linux 5.15.0-113-generic #123-Ubuntu")
        assert run.device == "NVIDIA H100 80GB HBM3"
        assert run.device_properties == {
            "major": "9",
            "minor": "0",
            "total_memory": "81079MB",
            "multi_processor_count": "132",
            "L2_cache_size": "50MB",
        }
        assert run.software == {"torch": "2.5.1+cu124", "cuda": "12.4"}
        assert run.variables == {"PYTORCH_TUNABLEOP_ENABLED": "1"}
        assert run.notes == ("node of <user>, see <path>/readme, <uuid>",)

    def test_plain_and_bulleted_values_read_the_same(self):
        plain, bulleted = run_of(samples.V2E), run_of(samples.V2F)
        for name in ("platform", "device", "device_properties", "software", "notes", "command"):
            assert getattr(plain, name) == getattr(bulleted, name)

    @pytest.mark.parametrize(
        ("device", "name", "key", "value"),
        [
            (samples.XPU, "Intel(R) Arc(TM) A770 Graphics", "sub_group_sizes", "[8 16, 32]"),
            (samples.HPU, None, "dramSize", "102005473280"),
        ],
    )
    def test_other_devices(self, device, name, key, value):
        run = run_of(samples.v2(header=samples.head(device=device, notes=samples.V2_NOTES)))
        assert run.device == name
        assert run.device_properties[key] == value

    def test_a_device_that_is_a_plain_string(self):
        run = run_of(samples.v2(header=samples.head(device=samples.MPS, compute="mps", notes=samples.V2_NOTES)))
        assert (run.device, run.device_properties) == (samples.MPS, {})
        assert run.software == {"torch": "2.5.1+cu124"}

    @pytest.mark.parametrize(
        ("printed", "name"),
        [
            ("torch.float8_e4m3fn", "float8_e4m3fn"),
            ("torch.half", "float16"),
            ("nvfp4", "nvfp4"),
            ("torch.float8_e8m0fnu", "float8_e8m0fnu"),
        ],
    )
    def test_dtypes(self, printed, name):
        assert run_of(samples.v2(header=samples.head(dtype=printed, notes=samples.V2_NOTES))).dtype == name

    @pytest.mark.parametrize(
        "path", ["'/home/grace_h/my results/a b.txt'", '"C:\\Users\\grace_h\\my results\\a b.txt"']
    )
    def test_a_path_with_blanks(self, path):
        run = run_of(samples.v2(header=samples.head(f"--output_file {path}", notes=samples.V2_NOTES)))
        assert "my results" not in run.command
        assert "grace_h" not in run.command
        assert "a b.txt" in run.command

    def test_a_host_that_was_taken_out_already_costs_no_word(self):
        text = samples.V2G.replace(f"{samples.HOST} ", "")
        assert run_of(text).platform.startswith("Linux 5.15.0-113-generic")


def test_damage_by_terminals_markdown_and_libraries():
    run = run_of(samples.DAMAGED)
    assert run.version == "v2e"
    assert [row.tflops["mean"] for row in run.rows] == [100.0, 200.0]
    assert {name: best.tflops[name] for name, best in run.best.items()} == {
        "mean": 300.5,
        "median": 301.5,
        "fastest": 5.0,
    }
    assert run.device == "AMD Instinct MI300X"
    assert run.dtype == "float16"
    assert run.software == {"torch": "2.5.1+rocm6.2", "hip": "6.2.41133-dd7f95766"}
    assert run.elapsed_seconds == (2 * 24 + 14) * 3600 + 42 * 60
    assert run.remarks == ("2 rows are in the log of the 3 shapes tried",)
    assert samples.HOST not in run.platform


def test_the_lines_of_other_programs_are_no_notes():
    text = "slurm: job 12 on node\n" + samples.V2G + "slurm: done\n"
    assert run_of(text) == run_of(samples.V2G)


def test_a_missing_elapsed_time_is_unknown():
    run = run_of(samples.V2G.replace("Elapsed time: 0:00:39\n", ""))
    assert run.elapsed_seconds is None
    assert run.is_complete


@pytest.mark.parametrize(
    ("printed", "seconds"), [("0:00:39", 39), ("1 day, 10:40:32", 124832), ("2 days, 14:42:00", 225720)]
)
def test_elapsed_times(printed, seconds):
    assert run_of(samples.V2G.replace("0:00:39", printed)).elapsed_seconds == seconds


class TestInterrupted:
    def test_during_the_warm_up(self):
        run = run_of(samples.WARMUP_INTERRUPTED)
        assert (run.rows, run.best, run.means, run.tried) == ((), {}, {}, 0)
        assert not run.is_complete
        assert "before the first shape" in remarks(run)

    def test_some_of_the_shapes(self):
        header = samples.head("--m_range 0 1025 256 --n 1024 --k 4096", bullet="- ", notes=samples.NEW_NOTES)
        run = run_of(samples.v2(header=header, means=samples.BOTH_MEANS, legend=True))
        assert not run.is_complete
        assert "interrupted: 3 of the 4 shapes of its command line" in remarks(run)

    def test_scouts_are_no_ceilings(self):
        run = run_of(samples.V4_INTERRUPTED)
        assert not run.is_complete
        assert {name: best.stage for name, best in run.best.items()} == dict.fromkeys(
            ("mean", "median", "fastest"), "scout"
        )
        assert "interrupted before the confirms" in remarks(run)
        assert "of scouts" in remarks(run)

    def test_the_printed_number_decides_what_looks_leave_open(self):
        assert run_of(samples.V4_INTERRUPTED).version == "v4"
        unnumbered = samples.V4_INTERRUPTED.replace("- benchmark version: 4", "")
        assert run_of(unnumbered).version == "v3/v4"

    def test_a_run_that_was_to_scout_only_is_complete(self):
        run = run_of(samples.V4_SCOUTS_ONLY)
        assert run.is_complete
        assert run.best["mean"].stage == "scout"
        assert "of scouts" in remarks(run)

    def test_no_summary(self):
        run = run_of(samples.V2G.split("\n\n\nTried")[0] + "\n")
        assert len(run.rows) == 3
        assert not run.is_complete
        assert (run.best, run.tried) == ({}, None)
        assert "no summary" in remarks(run)


class TestStaged:
    def test_v3_dev(self):
        run = run_of(samples.V3_DEV)
        scouts = [row for row in run.rows if row.stage == "scout"]
        assert [row.remarks for row in scouts] == [("wave",), ("plane", "SUSPECT")]
        assert (scouts[1].watts, scouts[1].clock_mhz) == (401, 1905)
        confirms = [(dict(row.tflops), str(row.shape)) for row in run.rows if row.stage == "confirm"]
        assert confirms == [
            ({"MSMF": 728.1}, "8192x8448x20480"),
            ({"MSMF": 724.9}, "8192x8448x20480"),
            ({"MAMF": 800.0}, "2816x1536x1024"),
            ({"MAMF": 700.0}, "8192x8448x20480"),
        ]
        assert run.rows[3].remarks == ("best available; still jittery", "spread 2.8%", "lock-in")
        assert run.rows[5].remarks == ("base-clock, not boost",)
        assert run.best["MSMF"].tflops == {"MSMF": 724.9}
        assert run.best["MAMF"].clock_mhz == 1980
        assert run.elapsed_seconds == 124832

    def test_a_reset_version_number_is_remarked(self):
        assert "prints benchmark version 8" in remarks(run_of(samples.V3_DEV))
        again = run_of(samples.V3_DEV.replace("benchmark version: 8", "benchmark version: 4"))
        assert again.version == "v3-dev"
        assert "prints benchmark version 4" in remarks(again)

    def test_rows_of_v3(self):
        run = run_of(samples.V3)
        assert [(row.stage, dict(row.tflops), row.clock_mhz) for row in run.rows] == [
            ("scout", {"mean": 815.7, "median": 815.3, "fastest": 822.4}, 1980),
            ("scout", {"mean": 828.4, "median": 828.6, "fastest": 831.6}, 1965),
            ("screen", {"fastest": 837.7}, 1965),
            ("screen", {"fastest": 830.0}, None),
            ("confirm", {"MSMF": 743.0}, 1792),
            ("confirm", {"MAMF": 810.1}, 1500),
            ("confirm", {"MAMF": 842.3}, 1980),
        ]
        assert run.rows[4].remarks == ("spread 1.6%",)
        assert run.best["MAMF"].shape == MatmulShape(3072, 2816, 20480)

    def test_rows_of_v4(self):
        run = run_of(samples.V4)
        sustained = [row for row in run.rows if "MSMF" in row.tflops]
        assert [(row.stage, row.tflops["MSMF"], row.remarks) for row in sustained] == [
            ("screen", 730.0, ("rank", "drop 0.1%", "spread 0.2%")),
            ("confirm", 727.0, ("not steady", "drop 1.7%", "spread 4.2%")),
            ("confirm", 723.5, ("drop -0.1%", "spread 4.0%")),
            ("confirm", 722.5, ("locked in", "drop 0.7%", "spread 4.2%")),
        ]
        assert (sustained[2].watts, sustained[2].celsius) == (None, None)
        assert (sustained[3].watts, sustained[3].celsius) == (681, 63)
        assert run.best["MSMF"].celsius == 63
        assert run.best["MSMF"].tflops == {"MSMF": 722}
        assert run.best["MSMF"].stage == "confirm"
        assert run.dtype == "mxfp8"
        assert run.tried == 2
        assert run.ranges == "exact shapes from <path>/shapes.txt (2 shapes)"
        assert run.notes == ("search mode: grid",)

    def test_doubts_of_v4_itself_are_remarks(self):
        said = remarks(run_of(samples.V4))
        assert "1 same-board sibling GPU(s) sat idle" in said
        assert "not boost-clock validated" in said

    def test_a_headline_of_no_figure_is_absent(self):
        line = "MAMF (max achievable,  boost burst): 842 TFLOPS @ 3072x2816x20480 (MxNxK)  172W 1980MHz"
        run = run_of(samples.V4.replace(line, "MAMF (max achievable,  boost burst): n/a"))
        assert set(run.best) == {"MSMF"}
        assert run.is_complete

    def test_a_staged_run_with_headlines_is_complete_whatever_it_skipped(self):
        run = run_of(samples.V4.replace("--k 8192 20480", "--k 8192 16384 20480"))
        assert "--k 8192 16384 20480" in run.command
        assert run.is_complete

    def test_the_echo_of_an_interrupt_before_a_row(self):
        echoed = samples.V4.replace("     1  3072x2816x8192 ", "^C^C     1  3072x2816x8192 ")
        assert echoed != samples.V4
        assert run_of(echoed).rows == run_of(samples.V4).rows

    def test_a_console_capture_shows_the_winner_once(self):
        row = "     2  3072x2816x20480     828.4  828.6  831.6  828.4   510  1965\n"
        run = run_of(samples.V4.replace(row, ""))
        assert [row.shape.k for row in run.rows if row.stage == "scout"] == [8192, 20480]


class TestNode:
    def test_figures_by_gpu_and_of_the_node(self):
        run = run_of(samples.V4_NODE)
        assert [(row.label, dict(row.tflops), row.watts, row.clock_mhz) for row in run.rows] == [
            ("GPU 0", {"MAMF": 852}, None, None),
            ("GPU 0", {"MSMF": 745}, 700, 1850),
            ("GPU 1", {"MAMF": 848}, None, None),
            ("GPU 1", {"MSMF": 755}, 699, None),
            ("GPU 2", {"MSMF": 741}, 698, 1838),
        ]
        assert run.rows[3].remarks == ("a sibling idle 12% of the time",)
        assert run.best["MAMF"].tflops == {"MAMF": 850}
        assert run.best["MSMF"].label == "node, median GPU"
        assert "MSMF slowest / spread: 741 TFLOPS (GPU2) / 1.9% across 3 GPUs" in run.remarks

    def test_behind_the_log_of_the_first_gpu(self):
        assert [run.version for run in parse(samples.V4 + samples.V4_NODE)] == ["v4", "v4-node"]

    def test_a_gpu_that_failed(self):
        row = next(line for line in samples.V4_NODE.splitlines() if line.startswith("    2 "))
        failed = f"    2      n/a  {'':<18}      n/a  {'':<18} {'':>4} {'':>5} {'':>3}    0%"
        run = run_of(samples.V4_NODE.replace(row, failed))
        assert {row.label for row in run.rows} == {"GPU 0", "GPU 1"}
        assert not run.is_complete

    def test_cut(self):
        run = run_of(samples.V4_NODE.split("MSMF (node")[0])
        assert set(run.best) == {"MAMF"}
        assert not run.is_complete

    def test_without_a_figure(self):
        table = samples.V4_NODE.split("    0 ")[0]
        with pytest.raises(RunLogError, match="holds nothing"):
            parse(table)
        assert parse(samples.V4 + table) == parse(samples.V4)


class TestOptunaFork:
    def test_trials(self):
        run = run_of(samples.F1)
        assert [row.shape for row in run.rows] == [MatmulShape(6912, 2048, 16384), MatmulShape(2304, 1536, 5120)]
        assert run.rows[0].tflops == {"stated": 291.57958890075423}
        assert run.best["stated"].shape == MatmulShape(6912, 2048, 16384)
        assert run.device == "Ascend910B2C"

    def test_rows_with_pipes(self):
        run = run_of(samples.F1_PIPES)
        assert run.version == "F1"
        assert shapes(run) == OF_SECOND[:2]


class TestSeveralRuns:
    def test_with_their_heads(self):
        runs = parse(samples.V2G + samples.V1D + samples.V3_DEV)
        assert [run.version for run in runs] == ["v2g", "v1d", "v3-dev"]
        assert runs[0] == run_of(samples.V2G)

    def test_the_second_head_cut_off_is_not_made_up(self):
        first, second = parse(samples.V2G + samples.V2E.split(samples.DASHES)[1].replace("300.5", "299.5"))
        assert (first.device, first.best["mean"].tflops["mean"]) == ("NVIDIA H100 80GB HBM3", 300.5)
        assert (second.device, second.best["mean"].tflops["mean"]) == (None, 299.5)

    def test_a_head_without_its_first_line(self):
        later = samples.V2G.split("16:01:02\n")[1].replace("H100 80GB HBM3", "H200")
        assert [run.device for run in parse(samples.V2G + later)] == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]

    def test_rows_that_count_from_one_again(self):
        rows = samples.V2G.split(samples.DASHES)[1].split("\n\n\nTried")[0]
        assert [len(run.rows) for run in parse(rows + rows + "\n")] == [3, 3]

    def test_a_summary_printed_twice_is_one_run(self):
        run = run_of(samples.V2G + "Tried" + samples.V2G.split("\nTried")[1])
        assert run.rows == run_of(samples.V2G).rows
        assert "printed twice" in remarks(run)

    def test_two_summaries_that_differ_are_two_runs(self):
        other = "Tried" + samples.V2G.split("\nTried")[1].replace("300.5", "123.4")
        first, second = parse(samples.V2G + other)
        assert (first.best["mean"].tflops["mean"], second.best["mean"].tflops["mean"]) == (300.5, 123.4)
        assert second.device is None


class TestFiles:
    def test_read(self, tmp_path):
        path = tmp_path / "mm.txt"
        path.write_text(samples.V2G)
        assert read_finder_logs(path) == parse(samples.V2G)

    @pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
    def test_redirected_by_powershell(self, tmp_path, encoding):
        path = tmp_path / "mm.txt"
        text = samples.V2G[samples.V2G.index("** Dtype") :]
        path.write_text(text.replace("\n", "\r\n"), encoding=encoding, newline="")
        assert read_finder_logs(path) == parse(text)
        assert run_of(text).dtype == "bfloat16"

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"", "empty"),
            (b" \n\n", "empty"),
            (b"\x7fELF\x00\x00\x01", "binary"),
            (b"hello\nworld\n", "holds nothing that mamf-finder prints"),
            (samples.BULLETS.encode(), "holds nothing that mamf-finder prints"),
        ],
    )
    def test_what_is_no_log(self, tmp_path, content, said):
        path = tmp_path / "mm.txt"
        path.write_bytes(content)
        with pytest.raises(RunLogError, match=said) as caught:
            read_finder_logs(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert "\n" not in str(caught.value)

    def test_no_such_file(self, tmp_path):
        with pytest.raises(RunLogError, match="cannot be read"):
            read_finder_logs(tmp_path / "absent.txt")


def imported(text):
    """The runs, or none where the text holds none."""
    try:
        return parse(text)
    except RunLogError:
        return []


def figures(run):
    return [(name, value, row.shape) for row in (*run.rows, *run.best.values()) for name, value in row.tflops.items()]


@pytest.mark.parametrize("version", samples.ALL)
def test_cut_behind_any_line(version):
    text = samples.ALL[version]
    whole = run_of(text)
    lines = text.splitlines(keepends=True)
    for end in range(len(lines)):
        for run in imported("".join(lines[:end])):
            assert not run.is_complete or run.best == whole.best


@pytest.mark.parametrize("version", samples.ALL)
def test_cut_anywhere_makes_up_no_figure(version):
    """A number cut short must not come back as a smaller one; a shape may become unknown."""
    text = samples.ALL[version]
    known = {(name, value) for name, value, _ in figures(run_of(text))}
    of_shapes = {shape for _, _, shape in figures(run_of(text))} | {None}
    start = text.rindex(samples.DASHES) if version != "v3-dev" else 0
    for end in range(start, len(text), 3):  # numbers are longer than that
        if not any(map(str.isdigit, text[text.rfind("\n", 0, end) + 1 : end])):
            continue  # no figure is cut short: as behind the line before
        for run in imported(text[:end]):
            assert {(name, value) for name, value, _ in figures(run)} <= known
            assert {shape for _, _, shape in figures(run)} <= of_shapes


@given(st.lists(st.sampled_from([line for text in samples.ALL.values() for line in text.split("\n")]), max_size=40))
@settings(deadline=None)
def test_lines_in_any_order_never_crash(lines):
    for run in imported("\n".join(lines)):
        assert run.rows or run.tried is not None or run.best or run.remarks


@given(st.text(max_size=300))
@settings(deadline=None)
def test_any_text_never_crashes(text):
    assert isinstance(imported(text), list)


sizes = st.integers(1, 99999)
tenths = st.integers(0, 99999).map(lambda value: value / 10)


@given(st.lists(st.tuples(sizes, sizes, sizes, tenths), min_size=1, max_size=20))
@settings(deadline=None)
def test_rows_of_v2g_round_trip(tried):
    best, text = 0.0, samples.BULLETS + samples.WARM_UP
    for number, (m, n, k, mean) in enumerate(tried, start=1):
        best = max(best, mean)
        text += samples.three_row(number, mean, f"{m}x{n}x{k}", best) + "\n"
    run = run_of(text)
    assert run.version == "v2f/v2g"
    assert shapes(run) == [MatmulShape(m, n, k) for m, n, k, _ in tried]
    assert [row.tflops["mean"] for row in run.rows] == [mean for *_, mean in tried]
    assert [row.tflops["fastest"] for row in run.rows] == [pytest.approx(mean + 10.0) for *_, mean in tried]


def test_rows_beyond_those_encoded_together_are_a_line_each_whatever_they_say(tmp_path):
    hostile = '}, {"record": "reported"'
    rows = tuple(Reported({"mean": float(number)}, remarks=(hostile,)) for number in range(1, 2002))
    write_legacy_log(FinderRun("v2g", rows=rows, notes=(hostile,)), tmp_path / "run.jsonl")
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert [json.loads(line)["record"] for line in lines] == ["header", *["reported"] * len(rows), "summary"]
    assert [row.tflops["mean"] for row in read_legacy_or_none(tmp_path / "run.jsonl").rows] == list(range(1, 2002))
