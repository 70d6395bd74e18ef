"""Logs of mamf-finder by way of a console: several runs at once, prefixes, narrow terminals, escapes, crashes."""

import gzip
import itertools
import re

import finder_log_samples as samples
import pytest

from mamf.errors import RunLogError
from mamf.logs.finder import parse, read_finder_logs

WHOLE = ("V1C_PLUS", "V1D", "V2A", "V2E", "V2G", "V3_DEV", "V3", "V4", "V4_NODE")


def run_of(text):
    (run,) = parse(text)
    return run


def remarks(run):
    return " | ".join(run.remarks)


def grid_run(count, dtype="bfloat16", scale=1.0, of=None):
    """Head, rows and summary of a run of ``count`` of ``of`` shapes, whose figures rise and fall."""
    head = samples.head(f"--dtype {dtype} --m_range 256 {256 * ((of or count) + 1)} 256 --n 1024 --k 4096", dtype)
    best, rows = 0.0, []
    for number in range(1, count + 1):
        mean = scale * (100 + number * 37 % 100)
        best = max(best, mean)
        rows.append(samples.three_row(number, mean, f"{256 * number}x1024x4096", best) + "\n")
    end = (
        f"\nTried  {count} shapes => the best outcomes were:\nmean:   {best:.1f} TFLOPS @ 256x1024x4096 (MxNxK)\n"
        f"median: {best + 1:.1f} TFLOPS @ 256x1024x4096 (MxNxK)\n"
        f"max:    {best + 10:.1f} TFLOPS @ 256x1024x4096 (MxNxK)\n"
        "\nLegend: TFLOPS = 10**12 FLOPS\nElapsed time: 0:00:39\n"
    )
    return head, rows, end


def zipped(*lists):
    return [line for lines in itertools.zip_longest(*lists, fillvalue="") for line in lines]


class TestRunsAtOnce:
    def test_as_long_as_each_other_they_are_not_called_complete(self):
        """Eight processes in the background of one terminal."""
        runs = [grid_run(20, scale=1.0) for _ in range(8)]
        text = "".join([*(head for head, _, _ in runs), *zipped(*(rows for _, rows, _ in runs))])
        run = run_of(text + "".join(end for *_, end in runs))
        assert len(run.rows) == 160
        assert not run.is_complete
        assert (run.best, run.tried) == ({}, None)
        assert "mixed" in remarks(run) and "--output_file" in remarks(run)
        assert (run.dtype, run.device) == ("bfloat16", "NVIDIA H100 80GB HBM3")  # all heads agree

    def test_one_that_begins_later_is_told_apart_by_its_numbers(self):
        (head, rows, end), (late_head, late_rows, late_end) = grid_run(30), grid_run(20, dtype="float16", scale=0.5)
        text = head + "".join(rows[:10]) + late_head + "".join(zipped(rows[10:], late_rows)) + end + late_end
        first, second = parse(text)
        assert first.rows == run_of(head + "".join(rows)).rows
        assert len(second.rows) == 20 and max(row.tflops["mean"] for row in second.rows) < 100
        for run in (first, second):
            assert not run.is_complete
            assert run.dtype is None  # whose head is whose is not told
            assert run.device == "NVIDIA H100 80GB HBM3"
            assert "separated by their numbers" in remarks(run)

    def test_one_row_of_another_is_enough(self):
        (head, rows, end), (other_head, other_rows, _) = grid_run(30), grid_run(1, dtype="float16")
        text = head + "".join(rows[:10]) + other_head + "".join([rows[10], other_rows[0], *rows[11:]]) + end
        assert not any(run.is_complete for run in parse(text))
        assert {run.dtype for run in parse(text)} == {None}
        without_head = head + "".join([*rows[:10], other_rows[0], *rows[10:]]) + end
        assert not any(run.is_complete for run in parse(without_head))

    def test_what_had_ended_before_is_left_alone(self):
        (head, rows, end), mixed = grid_run(5), [grid_run(6) for _ in range(2)]
        text = head + "".join(rows) + end + mixed[0][0] + mixed[1][0] + "".join(zipped(mixed[0][1], mixed[1][1]))
        first, *rest = parse(text)
        assert first == run_of(head + "".join(rows) + end)
        assert first.is_complete and not any(run.is_complete for run in rest)

    def test_what_begins_when_all_have_ended_is_left_alone(self):
        runs, (head, rows, end) = [grid_run(6) for _ in range(2)], grid_run(5, dtype="float16")
        text = "".join([*(run[0] for run in runs), *zipped(*(run[1] for run in runs)), *(run[2] for run in runs)])
        *mixed, last = parse(text + head + "".join(rows) + end)
        assert last == run_of(head + "".join(rows) + end)
        assert [run.is_complete for run in mixed] == [False]

    def test_labels_of_srun_part_them(self):
        runs = [grid_run(20, dtype=dtype) for dtype in ("bfloat16", "float16", "float8_e4m3fn")]
        texts = [head + "".join(rows) + end for head, rows, end in runs]
        labelled = [[f"{task}: {line}" for line in text.splitlines(keepends=True)] for task, text in enumerate(texts)]
        found = parse("srun: job 7 queued\n" + "".join(zipped(*labelled)))
        assert found == [run_of(text) for text in texts]
        assert all(run.is_complete for run in found)

    def test_rows_that_are_missing_part_nothing(self):
        head, rows, end = grid_run(9)
        run = run_of(head + "".join(rows[:3] + rows[6:]) + end)
        assert run.is_complete
        assert "6 rows are in the log of the 9 shapes tried" in remarks(run)


class TestPrefixes:
    @pytest.mark.parametrize("name", WHOLE)
    @pytest.mark.parametrize(
        "prefix",
        [
            *("0: ", "12: ", "# ", "+", "| ", "> ", "[rank0]: ", "gpu-1  | ", "2025-01-04T16:01:02.123456789Z "),
            "[2025-01-04 16:01:02,123][INFO] ",
        ],
    )
    def test_on_every_line(self, name, prefix):
        text = getattr(samples, name)
        assert parse("".join(f"{prefix}{line}" for line in text.splitlines(keepends=True))) == parse(text)

    def test_time_goes_on(self):
        lines = samples.V2G.splitlines(keepends=True)
        text = "".join(f"2025-01-04T16:01:{second % 60:02}.5Z {line}" for second, line in enumerate(lines))
        assert parse(text) == parse(samples.V2G)

    def test_behind_lines_without_one(self):
        text = "module load cuda\n" * 300 + "".join(f"0: {line}" for line in samples.V2G.splitlines(keepends=True))
        assert parse(text) == parse(samples.V2G)


class TestNarrowTerminals:
    @pytest.mark.parametrize("width", [80, 100, 120])
    @pytest.mark.parametrize("name", ["V1B", "V1C", "V1D", "V2A", "V2E", "V2F", "V2G", "V3_DEV"])
    @pytest.mark.parametrize("is_stripped", [False, True])
    def test_lines_are_joined_again(self, name, width, is_stripped):
        text = getattr(samples, name).replace("\r", "\n")
        lines = [line[at : at + width] for line in text.split("\n") for at in range(0, len(line) or 1, width)]
        wrapped = "\n".join(line.rstrip() if is_stripped else line for line in lines)
        assert parse(wrapped) == parse(text)

    def test_the_tail_of_uname_is_no_device(self):
        text = samples.V2G.replace(samples.CUDA, samples.MPS)
        lines = [line[at : at + 80] for line in text.split("\n") for at in range(0, len(line) or 1, 80)]
        assert run_of("\n".join(lines)).device == samples.MPS


class TestEscapes:
    @pytest.mark.parametrize(
        "escape",
        [
            *("\x1b(B", "\x1b[m\x0f", "\x0e", "\x1b]0;a title\x07", "\x1b]8;;http://a\x1b\\", "x\x08", "ab\x08\x08"),
            *("\x1b=", "\x1b[?25h"),
        ],
    )
    def test_are_no_part_of_names(self, escape):
        text = samples.V2G.replace("NVIDIA H100", f"NVIDIA {escape}H100").replace("torch=", f"{escape}torch=")
        assert parse(text) == parse(samples.V2G)


class TestCrashes:
    def test_a_hole_of_nulls_costs_the_lines_around_it(self):
        first, second, third = (samples.three_row(number, mean, shape, 300.5) for number, mean, shape in samples.ROWS)
        head, end = samples.V2G.split(samples.three_row(1, 100.0, samples.FIRST, 100.0))[0], "\nElapsed time: 0:00:39\n"
        run = run_of(f"{head}{first}\n{second[:40]}\0\0\0\0{third[30:]}\n{third}\n{end}")
        assert [row.tflops["mean"] for row in run.rows] == [100.0, 200.0]
        assert run.device == "NVIDIA H100 80GB HBM3"

    def test_nulls_behind_the_last_line(self):
        assert parse(samples.V2G + "\0" * 512) == parse(samples.V2G)
        assert parse(samples.V2G + "\0" * 512 + samples.V1D) == parse(samples.V2G + samples.V1D)

    def test_half_a_number_before_a_hole_is_no_number(self):
        for end in range(samples.V2G.index("mean:   "), len(samples.V2G), 7):
            for run in parse(samples.V2G[:end] + "\0\0"):
                assert {best.tflops[name] for name, best in run.best.items()} <= {300.5, 301.5, 310.5}


class TestFiles:
    def test_packed(self, tmp_path):
        path = tmp_path / "mm.txt.gz"
        path.write_bytes(gzip.compress(samples.V2G.encode()) + gzip.compress(samples.V1D.encode()))
        assert read_finder_logs(path) == parse(samples.V2G + samples.V1D)

    def test_packed_and_cut(self, tmp_path):
        path = tmp_path / "mm.txt.gz"
        path.write_bytes(gzip.compress(samples.V2G.encode(), 0)[:-600])
        assert read_finder_logs(path)[0].device == "NVIDIA H100 80GB HBM3"

    def test_packed_and_damaged(self, tmp_path):
        path = tmp_path / "mm.txt.gz"
        path.write_bytes(b"\x1f\x8b nothing of the kind")
        with pytest.raises(RunLogError, match="cannot be unpacked"):
            read_finder_logs(path)


class TestHowManyWereDue:
    RANGES = "m=[0, 16384, 1024] | n=[1024] | k=[4096]"

    def of(self, ranges, tried=3, rows=""):
        text = rows + "\n\n" + re.sub(r"m=\[.*\]", ranges, "Tried" + samples.V2G.split("\nTried")[1])
        return run_of(text.replace("Tried 3", f"Tried {tried}"))

    def test_by_the_ranges_that_the_summary_prints(self):
        assert "3 of the 15 shapes of its printed ranges" in remarks(self.of(self.RANGES))
        assert self.of(self.RANGES, tried=15).is_complete

    def test_three_numbers_are_a_list_or_a_range(self):
        assert self.of("m=[256, 769, 256] | n=[1024] | k=[4096]").is_complete  # nothing tells which
        of_range = "".join(samples.three_row(n, 1.0, f"{256 * n}x1024x4096", 1.0) + "\n" for n in (1, 2, 3))
        assert not self.of("m=[256, 7690, 256] | n=[1024] | k=[4096]", rows=of_range).is_complete
        of_list = "".join(
            samples.three_row(n, 1.0, f"{m}x1024x4096", 1.0) + "\n" for n, m in enumerate((256, 7690, 512), start=1)
        )
        assert self.of("m=[256, 7690, 512] | n=[1024] | k=[4096]", rows=of_list).is_complete

    def test_other_ranges_say_nothing(self):
        assert self.of("auto-search (SMs=132)").is_complete


class TestGridOfTheFastFinder:
    """Its grids are as those of version 2: nothing is scouted, nothing confirmed."""

    ROWS = "".join(
        samples.three_row(number, mean, shape, max(mean, 300.5 if number > 1 else 0)) + " |  685W 1905MHz\n"
        for number, mean, shape in samples.ROWS
    )
    END = "\n\nTried 3" + samples.V2G.split("\nTried 3")[1]
    NOTES = samples.STAGED_NOTES.format(4, "grid")

    def head(self, arguments=samples.RANGES):
        warm_up = "telemetry: nvml (power/clock sampling on)\nWarming up (adaptive: until throughput plateaus) ...\n"
        return samples.head(arguments, bullet="- ", notes=self.NOTES) + warm_up

    def test_is_complete(self):
        run = run_of(self.head() + self.ROWS + self.END)
        assert run.version == "v3-dev"
        assert run.is_complete, run.remarks
        assert {row.stage for row in (*run.rows, *run.best.values())} == {""}
        assert "scouts" not in remarks(run)
        assert run.rows[0].clock_mhz == 1905

    def test_without_its_head(self):
        assert run_of(self.ROWS + self.END).is_complete

    def test_without_its_rows(self):
        assert run_of(self.head() + self.END).is_complete

    def test_interrupted(self):
        run = run_of(self.head("--m_range 0 1025 256 --n 1024 --k 4096") + self.ROWS + self.END)
        assert "interrupted: 3 of the 4 shapes" in remarks(run)

    def test_a_search_of_it_that_was_interrupted_has_scouts(self):
        tagged = re.sub(r" \|  ", r" |    wave  ", self.ROWS)
        text = self.head("--search auto").replace("mode: grid", "mode: auto") + "[auto] SMs=132\n" + tagged + self.END
        assert "interrupted before the confirms" in remarks(run_of(text))


class TestHeads:
    def test_of_a_fork_that_tells_the_power_limit(self):
        device = f"{samples.CUDA}\n- Power limit: 700.00 W\n- Serial number: 1320"
        run = run_of(samples.v2(header=samples.head(device=device, bullet="- ", notes=samples.NEW_NOTES)))
        assert run.device == "NVIDIA H100 80GB HBM3"
        assert run.device_properties["Power limit"] == "700.00 W"
        assert "1320" not in str(run)

    def test_of_a_run_without_rows_is_said_to_be_there(self):
        killed, run = parse(samples.BULLETS + samples.WARM_UP + samples.V2G)
        assert run == run_of(samples.V2G)
        assert (killed.rows, killed.best, killed.is_complete) == ((), {}, False)
        assert killed.device == "NVIDIA H100 80GB HBM3"
        assert "only its head" in remarks(killed)


def test_shapes_that_are_put_into_another_order_are_explained():
    said = "its second number is the reduction: 256x1024x4096 in the log is the shape 256x4096x1024 here"
    assert said in run_of(samples.V1B).remarks
    assert "second number" not in remarks(run_of(samples.V2G))


def test_what_is_read_is_told():
    told = []
    parse(samples.V2G * 19, told.append)
    assert 0.9 * len(samples.V2G) * 19 < sum(told) <= 1.1 * len(samples.V2G) * 19
