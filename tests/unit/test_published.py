"""Figures that other people published: what results/published may hold, how it is written and how it is read."""

import csv
import json
import re
from pathlib import Path

import pytest
from contribution_logs import write
from published import COLUMNS, INPUT_COLUMNS, REASONS, VENDORS, figure_of, figures_of, main, vendor_of, why_left_out
from published_notice import SOURCES

from mamf.contribution.published import FIGURES, NOTICE, PublishedFigure, read_published
from mamf.dtypes import DTYPES
from mamf.errors import UsageError

RESULTS = Path(__file__).resolve().parents[2] / "results"
PAGE = "https://github.com/stas00/ml-engineering/blob/abc/README.md"
UNLICENSED = {"accelerator", "vendor", "dtype", "tflops", "source"}
#: A note, statistic, accelerator or address of each kind that is left out.
LEFT_OUT = [
    ("notes", "mode isolated; operands hold one constant, so power is low and the clock high"),
    ("statistic", "instruction loop on zeros in registers (mmapeak), not a matmul"),
    ("notes", "IMPOSSIBLE (no synchronisation): the same figure for every dtype; do not use"),
    ("notes", "the page warns that this device caches and the figure is not exact"),
    ("notes", "overclocked: core 3045 MHz, memory 11043 MHz"),
    ("notes", "vboost 1; size order as the gist prints it"),
    ("notes", "a slow card or a low power limit: other cards of the name give 224 to 242"),
    ("notes", "contributed; replaced later by 792.1"),
    ("notes", "superseded in the table; PYTORCH_TUNABLEOP_ENABLED=1"),
    ("notes", "one GCD; the table has 147.0"),
    ("notes", "the same figure and shape as stas00/ml-engineering: copied, not a second measurement"),
    ("notes", "also in database.md"),
    ("notes", "no TF32 unit: same as fp32; laptop"),
    ("notes", "fp8 weights on the bf16 pipeline (W8A16): no native fp8"),
    ("notes", "fp16 accumulation; 2.57 GHz, 36 SM"),
    ("notes", "without hipBLASLt"),
    ("notes", "HSA_OVERRIDE_GFX_VERSION for gfx1100"),
    ("notes", "fp32 is far below other publications of this card (20 to 23)"),
    ("statistic", "arithmetic mean over 79 shapes, not a maximum"),
    ("statistic", "lowest of the range stated, cuBLAS"),
    ("accelerator", "not shown (A100 class)"),
    ("source", "a page without an address"),
]
KEPT = [
    *("", "laptop", "cloud or container", "fp32 accumulation; 2.57 GHz, 36 SM", "read off the table as rounded there"),
    "table first printed N and K swapped (N was the reduction); m,n,k here are with k the reduction",
    "issue 161 repeats it",
]


@pytest.fixture
def published():
    return read_published(RESULTS)


def given(**values):
    """A row of the tool's input."""
    row = dict.fromkeys(INPUT_COLUMNS, "")
    row |= {"accelerator": "NVIDIA H100 SXM", "torch_device_name": "NVIDIA H100 80GB HBM3", "dtype": "bfloat16"}
    row |= {"tflops": "794.5", "statistic": "mean", "m": "2048", "n": "1024", "k": "512", "torch": "2.7.0"}
    row |= {"software": "CUDA 12.6", "power_limit_w": "700", "date": "2025-07-07", "version_of_script": "v2"}
    return {**row, "source": PAGE, "license_of_source": "CC-BY-SA-4.0", **values}


def written(folder, *rows, header=COLUMNS):
    path = folder / FIGURES
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])
    return path


def cells(**values):
    row = {**dict.fromkeys(COLUMNS, ""), "accelerator": "A", "vendor": "AMD", "dtype": "int8", "tflops": "1.5"}
    return list({**row, "source": PAGE, **values}.values())


# -- the files of this repository --------------------------------------------------------------------------------------


def test_there_are_figures_of_many_accelerators_in_dtypes_that_mamf_knows(published):
    assert len(published) > 500
    assert {figure.dtype for figure in published} <= set(DTYPES)
    assert {figure.vendor for figure in published} <= set(VENDORS)


def test_a_row_without_a_license_holds_only_the_figure_and_where_it_is_from(published):
    unlicensed = [figure for figure in published if not figure.license]
    assert unlicensed
    assert {name for figure in unlicensed for name, value in vars(figure).items() if value} == UNLICENSED


def test_each_licensed_source_stands_in_the_notice(published):
    notice = (RESULTS / NOTICE).read_text(encoding="utf-8")
    licensed = {re.match(r"https://[^/]+/[^/]+/[^/]+", figure[0])[0]: figure[1] for figure in licensed_pages(published)}
    assert licensed
    for address, license in licensed.items():
        assert f"{address}. {license}, " in notice
    assert f"holds {len(published)} matmul figures" in notice
    for source in SOURCES:
        assert source.author in notice


def licensed_pages(published):
    return {(figure.source, figure.license) for figure in published if figure.license}


def test_no_row_is_of_a_kind_that_is_left_out(published):
    """Notes are not kept; the sources whose rows were all left out must not be there."""
    for figure in published:
        row = {"notes": "", "statistic": figure.statistic, "accelerator": figure.accelerator, "source": figure.source}
        assert why_left_out(row) is None
        assert "xzwgit/gpu-flops-bench" not in figure.source  # operands hold one constant
        assert (figure.accelerator, figure.dtype) != ("Ascend 910B2", "float16")  # the device caches
        assert figure.tflops < 10_000  # unsynchronized


def test_each_row_is_there_once_and_in_order(published):
    names = [(figure.vendor.casefold(), figure.accelerator.casefold(), figure.dtype) for figure in published]
    assert names == sorted(names)
    assert len(set(published)) == len(published)


# -- the tool that writes them -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("column", "text"), LEFT_OUT)
def test_a_note_that_rules_a_comparison_out_leaves_the_row_out(column, text):
    assert why_left_out(given(**{column: text}))


def test_each_reason_has_an_example():
    assert {why_left_out(given(**{column: text})) for column, text in LEFT_OUT} == {each.text for each in REASONS}


@pytest.mark.parametrize("note", KEPT)
def test_other_notes_do_not(note):
    assert why_left_out(given(notes=note)) is None


@pytest.mark.parametrize("license", ["none found", "not stated", "not checked", "no licence stated for the thread", ""])
def test_without_a_license_only_figure_and_address_are_kept(license):
    figure = figure_of(given(license_of_source=license))
    assert {name for name, value in figure.items() if value} == UNLICENSED


def test_with_a_license_the_conditions_are_kept():
    figure = figure_of(given(notes="PYTORCH_TUNABLEOP_ENABLED=1; 750 W cap", version_of_script="v2 (later than x)"))
    assert figure["software"] == "torch 2.7.0, CUDA 12.6, PYTORCH_TUNABLEOP_ENABLED=1"
    assert (figure["version"], figure["power_limit_watts"]) == ("v2", "700")
    assert all(figure[name] for name in COLUMNS)


def test_remarks_behind_an_address_go_and_half_a_card_is_named():
    figure = figure_of(given(accelerator="AMD MI250X", source=f"{PAGE} (seen elsewhere)", notes="one GCD (said so)"))
    assert (figure["source"], figure["accelerator"]) == (PAGE, "AMD MI250X (one GCD)")


def test_a_license_whose_author_is_not_named_stops_the_tool():
    with pytest.raises(SystemExit, match=r"SOURCES in tools/published_notice\.py"):
        figure_of(given(source="https://example.org/x", license_of_source="MIT"))


def test_the_order_of_the_input_does_not_matter_and_equal_rows_are_one():
    rows = [given(tflops=tflops, accelerator=name) for tflops in ("9", "10") for name in ("NVIDIA b", "NVIDIA A")]
    assert figures_of(rows) == figures_of([*rows[::-1], rows[0]])
    assert [(each["accelerator"], each["tflops"]) for each in figures_of(rows)] == [
        *(("NVIDIA A", "10"), ("NVIDIA A", "9"), ("NVIDIA b", "10"), ("NVIDIA b", "9")),
    ]


@pytest.mark.parametrize(
    ("name", "vendor"),
    [
        *(
            ("Nvidia 2070S", "NVIDIA"),
            ("Tesla V100", "NVIDIA"),
            ("Radeon RX 7900 XTX", "AMD"),
            ("MTT S70", "Moore Threads"),
        ),
        *(
            ("CPU (32 vCPU Intel(R) Xeon(R))", "Intel"),
            ("Ascend 910B2", "Huawei"),
            ("DCU K100_AI", "Hygon"),
            ("X1", "other"),
        ),
    ],
)
def test_the_vendor_is_read_from_the_name(name, vendor):
    assert vendor_of(name) == vendor


def test_the_tool_writes_what_the_reader_reads(tmp_path, monkeypatch, capsys):
    rows = [
        given(),
        given(license_of_source="none found"),
        given(notes="superseded in the table"),
        given(notes="laptop"),
    ]
    with (tmp_path / "in.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, INPUT_COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    monkeypatch.setattr("sys.argv", ["published.py", str(tmp_path / "in.csv"), "--output", str(tmp_path / "published")])
    assert main() == 0
    assert "    1 laptop" in capsys.readouterr().out
    assert [figure.license for figure in read_published(tmp_path)] == ["", "CC-BY-SA-4.0"]
    notice = (tmp_path / NOTICE).read_text(encoding="utf-8")
    assert "| 1 | the source replaced the figure |" in notice
    assert "Stas Bekman" in notice and "Permission is hereby granted" not in notice


# -- the reader --------------------------------------------------------------------------------------------------------


def test_a_folder_without_figures_has_none(tmp_path):
    assert read_published(tmp_path) == []


def test_numbers_are_numbers_and_empty_cells_are_none(tmp_path):
    written(tmp_path, cells(m="16", power_limit_watts="700.5", statistic='<b>"x"\x1b[2J'))
    (figure,) = read_published(tmp_path)
    assert isinstance(figure, PublishedFigure)
    assert (figure.tflops, figure.m, figure.n, figure.power_limit_watts) == (1.5, 16, None, 700.5)
    assert figure.statistic == '<b>"x"\x1b[2J'  # escaped where it is printed


@pytest.mark.parametrize(
    ("values", "message"),
    [
        *(({"tflops": text}, "not above 0") for text in ("", "nan", "inf", "-1", "0")),
        *(({"k": text}, "invalid literal|not above 0") for text in ("1.5", "0", "-4")),
        ({"power_limit_watts": "low"}, "could not convert"),
        *(
            ({"source": text}, "source: .* is not an http or https address")
            for text in (
                "",
                "javascript:alert(1)",
                "http://",
                "ftp://a/b",
                'https://a/"onclick',
                "https://a/ b",
                "//a/b",
            )
        ),
        ({"source": "https://a/\u202eb"}, r"source: 'https://a/\\u202eb' is not"),
        ({"accelerator": ""}, "a cell is missing"),
    ],
)
def test_a_malformed_row_is_an_error(tmp_path, values, message):
    path = written(tmp_path, cells(), cells(**values))
    with pytest.raises(UsageError, match=rf"^cannot read {re.escape(str(path))}: .*({message})"):
        read_published(tmp_path)


def test_other_columns_short_rows_and_open_quotes_are_errors(tmp_path):
    for header, row in ((COLUMNS[1:], cells()[1:]), (COLUMNS, cells()[1:]), (COLUMNS, [*cells(), ""])):
        written(tmp_path, row, header=list(header))
        with pytest.raises(UsageError, match="cannot read"):
            read_published(tmp_path)
    for data in (f'{",".join(COLUMNS)}\n"open'.encode(), b"\xff"):
        written(tmp_path).write_bytes(data)
        with pytest.raises(UsageError, match="cannot read"):
            read_published(tmp_path)


def test_the_check_of_results_accepts_the_files_and_no_others_beside_them(run, sweep_records):
    results = run.folder / "results"
    written(results, cells())
    for name in ("README.md", NOTICE, "published/more.csv"):
        (results / name).write_text("")
    (results / "simulated").mkdir()
    write(results / "simulated" / "a.jsonl", sweep_records)
    logs = json.loads(run("results", "check", "results", "--format", "json")[1])["logs"]
    assert [log["path"] for log in logs[1:]] == ["results/published/more.csv"]
