"""Test the report pages: their content for each kind of log, and that a hostile log cannot add markup or scripts."""

import base64
import dataclasses
import hashlib
import html.parser
import io
import itertools
import json
import re
import sys
from pathlib import Path

import pytest

from mamf.cli import main
from mamf.errors import MamfWarning, RunLogError, UsageError
from mamf.kinds.registry import make_log_chart
from mamf.logs import run_log
from mamf.logs.recording import read_plan_record
from mamf.logs.run_log import read_run_log
from mamf.pages.log_content import make_run_log_content
from mamf.pages.report import make_report_page
from mamf.report.document import Answer, format_rate
from mamf.report.page import Page, Section, _load_template, render_page, sanitize_address

ROOT = Path(__file__).parents[2]
H200 = ROOT / "results" / "nvidia-h200"
FIND = H200 / "find-bfloat16-burst-sustained-20261123-004333.jsonl"
#: Logs of four kinds, each with a text that its page must contain.
TEXTS_BY_LOG = {
    FIND: "comparable searches on",
    H200 / "attention-bfloat16-fwd-bwd-burst-20261122-165645.jsonl": "of the ceiling (MAMFU)",
    H200 / "bandwidth-roofline-float32-burst-sustained-20261122-000415.jsonl": "TB/s",
    H200 / "sweep-torch-mm-bfloat16-burst-20261122-181526.jsonl": "best burst, bfloat16",
}


class MarkupParser(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.stack, self.errors = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in ("meta", "br", "input"):
            self.stack.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        if not self.stack or self.stack.pop() != tag:
            self.errors.append(tag)


@pytest.mark.parametrize(("ceiling_factor", "is_credible"), [(1.0, True), (0.2, False)])
def test_a_share_that_no_card_can_reach_is_not_in_large_type(ceiling_factor, is_credible):
    log = read_run_log(H200 / "attention-bfloat16-fwd-bwd-burst-20261122-221110.jsonl")
    log.matmul_ceilings = {
        key: dataclasses.replace(ceiling, rate=ceiling_factor * ceiling.rate)
        for key, ceiling in log.matmul_ceilings.items()
    }
    content = make_run_log_content(log)
    answer_texts = [text for block in content.document.blocks if isinstance(block, Answer) for text in block.texts]
    for texts in ([note for figure in content.headline_figures for note in figure.notes], answer_texts):
        assert any("% of the ceiling (MAMFU)" in text for text in texts) == is_credible
        assert any("so the ceiling is too low" in text for text in texts) != is_credible
    assert any("so the ceiling is too low" in note for note in make_log_chart(log).notes) != is_credible
    fact_notes = [note for fact in content.headline_facts for note in fact.notes]
    assert any(note == "share of 848.3 TFLOPS" for note in fact_notes) == is_credible


def test_a_ceiling_is_not_too_low_because_a_measurement_of_its_search_was_faster():
    (path,) = (ROOT / "results" / "amd-epyc").glob("find-*.jsonl")
    log = read_run_log(path)
    ceiling = max(each.tflops for each in log.matmul_ceilings.values())
    assert max(row.best_rate for row in log.measurements if row.ok) > 1.1 * ceiling
    assert not any("so the ceiling is too low" in note for note in make_log_chart(log).notes)


def yield_logs_of_every_kind():
    yield from TEXTS_BY_LOG.items()
    for pattern in ("model-bfloat16-burst", "matmul-explain", "collective", "grouped", "mamf-finder-v4", "batched"):
        yield next(iter(sorted(H200.glob(f"{pattern}*.jsonl")))), ""


@pytest.mark.parametrize(("path", "text"), list(yield_logs_of_every_kind()), ids=lambda each: getattr(each, "stem", ""))
def test_every_kind_of_log_has_a_page_of_well_formed_markup(path, text):
    page = render_page(make_report_page([path]))
    assert text in page
    parser = MarkupParser(page)
    assert not parser.errors
    assert not parser.stack
    assert len(page) < 700_000
    assert "http://" not in page.replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    "name", ["bandwidth-find-float32-burst-sustained-20261121-203429", "find-bfloat16-burst-sustained-20261124-105123"]
)
def test_the_figures_of_an_interrupted_search_are_those_of_its_report(tmp_path, name):
    path = tmp_path / "interrupted.jsonl"
    lines = (H200 / f"{name}.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join(itertools.takewhile(lambda line: '"phase": "confirm"' not in line, lines)))
    content = make_run_log_content(read_run_log(path))
    answer = " ".join(text for block in content.document.blocks if isinstance(block, Answer) for text in block.texts)
    assert len(content.headline_figures) == (4 if name.startswith("bandwidth") else 1)
    for figure in content.headline_figures:
        assert f": {format_rate(figure.point.value, figure.unit)} " in answer


def test_two_logs_are_compared_and_others_stand_side_by_side(tmp_path):
    finds = sorted(H200.glob("find-int8-burst-sustained-20261123-00*.jsonl"))[:2]
    two_log_page = make_report_page(finds)
    assert two_log_page.verdict.startswith("2 rows: ")
    assert [section.is_open for section in two_log_page.sections] == [True, True, False, False]
    three_log_page = make_report_page([finds[0], FIND, FIND])
    assert "the logs are from different cards or machines" not in three_log_page.intro_lines
    other_card_page = make_report_page([FIND, H200 / "attention-bfloat16-fwd-bwd-burst-20261122-221110.jsonl"])
    assert "the logs are from different cards or machines" in other_card_page.intro_lines
    assert (
        "the logs are from different cards or machines" in make_report_page([ROOT / "results" / "amd-epyc"]).intro_lines
    )
    assert [section.heading for section in three_log_page.sections][:1] == ["Side by side"]
    assert "cannot be compared: " in render_page(make_report_page([FIND, finds[0]]))
    h100_log = H200.parent / "nvidia-h100-80gb-hbm3" / "find-bfloat16-burst-sustained-20261121-070105.jsonl"
    devices = [fact.label.partition(": ")[0] for fact in make_report_page([h100_log, FIND]).facts]
    assert devices == ["NVIDIA H100 80GB HBM3"] * 2 + ["NVIDIA H200"] * 2
    rows = make_report_page([*finds, FIND]).sections[0].parts[0].rows
    assert len({row.name for row in rows}) == 3


def test_a_large_page_begins_with_contents_and_closed_pictures():
    page = make_report_page([H200 / "attention-bfloat16-fwd-bwd-burst-20261122-221110.jsonl"])
    assert [section.is_open for section in page.sections] == [False, True, False, True]
    headings = ("Pictures", "Figures", "Conditions", "Reproduce it")
    assert all(f'<a href="#part-{i}">{name}</a>' in render_page(page) for i, name in enumerate(headings, start=1))
    assert [fact.unit for fact in page.facts] == ["%", "%"]
    assert 'aria-label="Contents"' not in render_page(make_report_page([FIND]))


def test_a_find_and_attention_begin_with_the_ceiling_and_the_share_of_it():
    page = make_report_page([FIND, H200 / "attention-bfloat16-fwd-bwd-burst-20261122-221110.jsonl"])
    assert [(fact.label.partition(",")[0], fact.unit) for fact in page.facts][1:3] == [
        ("sustained ceiling", "TFLOPS"),
        ("MAMFU of the best attention", "%"),
    ]
    assert (page.verdict, "side by side" in page.title) == ("", False)


def test_without_matplotlib_the_command_warns_once(run, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run("report", str(FIND), "-o", "page.html")
    assert code == 0 and err.count("the page has no pictures, because drawing needs matplotlib") == 1


def test_a_page_whose_name_does_not_end_with_html_is_refused(run):
    code, out, err = run("report", str(FIND), "-o", "page.pdf")
    assert (code, out, err) == (2, "", "mamf: cannot write page.pdf: its name must end with .html or .htm\n")
    assert not (run.folder / "page.pdf").exists()


def test_a_page_of_many_logs_begins_with_the_highest_ceiling_of_each_dtype_and_regime():
    logs = [*sorted(H200.glob("attention-*.jsonl"))[:5], *sorted(H200.glob("find-bfloat16-*.jsonl"))[:8]]
    page = make_report_page(logs)
    labels = [fact.label for fact in page.facts]
    assert labels[:2] == ["burst ceiling, bfloat16", "sustained ceiling, bfloat16"]
    assert len(set(labels)) == len(labels) <= 6
    rates = [log.ceilings["burst"].rate for log in map(read_run_log, logs) if "burst" in log.ceilings]
    first_fact = page.facts[0]
    assert len(rates) > 1 and float(first_fact.value) == pytest.approx(max(rates), abs=0.1)
    assert first_fact.notes[-1] in [f"NVIDIA H200, {log.name}" for log in logs]
    assert page.intro_lines[-1].startswith("the highest rate or share of each kind")
    assert not any(section.is_open for section in page.sections if section.parts)


def test_a_page_says_how_many_figures_it_does_not_show_at_the_top():
    eight_ceilings = H200 / "bandwidth-find-float32-burst-sustained-20261121-203429.jsonl"
    page = make_report_page([eight_ceilings])
    assert (len(page.facts), "the first 6 of 8 figures (the tables below have all of them):" in page.intro_lines) == (
        6,
        True,
    )
    assert page.facts[0].label == "burst ceiling, float32, copy"
    page_of_two = make_report_page([eight_ceilings, FIND])
    assert (
        page_of_two.intro_lines[-1]
        == "the highest rate or share of each kind, one of each log first (6 of 10 figures; the logs below have all of "
        "them):"
    )
    assert {note.rpartition(", ")[2] for fact in page_of_two.facts[:2] for note in fact.notes[-1:]} == {
        eight_ceilings.name,
        FIND.name,
    }
    chart = page_of_two.sections[0].parts[0]
    assert "sustained ceiling, float32, triad" in [row.group for row in chart.rows]
    assert not any("figures" in line for line in make_report_page([FIND]).intro_lines)


def test_a_list_of_closed_sections_needs_no_contents():
    closed_sections = [Section(f"log {number}", [Answer(["x"])], is_open=False) for number in range(20)]
    assert 'aria-label="Contents"' not in render_page(Page("t", sections=closed_sections))
    assert 'aria-label="Contents"' in render_page(
        Page("t", sections=[Section("open", [Answer(["x"])]), *closed_sections])
    )


def test_decode_begins_with_the_share_of_the_bandwidth_that_limits_it():
    (log, *_) = sorted((H200.parent / "nvidia-h100-80gb-hbm3").glob("decode-*.jsonl"), reverse=True)
    (fact, *_) = make_report_page([log]).facts
    assert (fact.label, fact.unit) == ("MBU of the best decode, burst, bfloat16", "%")


def test_a_log_of_mamf_finder_is_shown_next_to_a_new_one():
    old_log, new_log = H200 / "mamf-finder-v2g-bfloat16-20261122-022832.jsonl", FIND
    page = render_page(make_report_page([old_log, new_log, old_log]))
    assert "mamf-finder, best mean" in page
    assert "with their 95 % repeat intervals" not in page
    assert "burst ceiling, bfloat16" in page
    old_log_page = render_page(make_report_page([old_log]))
    assert "as printed by mamf-finder, without samples or checks" in old_log_page
    assert "mamf-finder.py" in old_log_page


def test_a_log_is_parsed_few_times_however_many_rows_it_has(monkeypatch):
    parsed_plans = []
    monkeypatch.setattr(run_log, "read_plan_record", lambda plan: parsed_plans.append(plan) or read_plan_record(plan))
    make_report_page([H200 / "sweep-torch-mm-bfloat16-burst-20261122-181526.jsonl"])
    assert 0 < len(parsed_plans) < 40


@pytest.mark.parametrize(
    ("path", "reason"),
    [("notes.md", "notes.md, line 1: the line is not a JSON object"), ("empty", "empty has no logs")],
)
def test_inputs_are_checked_before_an_existing_page(run, path, reason):
    Path("notes.md").write_text("# notes\n")
    Path("empty").mkdir()
    Path("report.html").touch()
    code, _, err = run("report", path)
    assert code == 2
    assert reason in err
    assert "report.html" not in err


def test_a_folder_without_logs_is_refused(tmp_path):
    with pytest.raises(UsageError, match="has no logs"):
        make_report_page([tmp_path])


def test_a_folder_with_an_unreadable_log_has_a_page_of_the_other_logs(tmp_path):
    (tmp_path / "killed.jsonl").touch()
    with pytest.raises(RunLogError, match=r"killed\.jsonl has no complete line"):
        make_report_page([tmp_path])
    (tmp_path / FIND.name).write_bytes(FIND.read_bytes())
    with pytest.warns(MamfWarning, match=r"leaves out a log: .*killed\.jsonl") as recorded_warnings:
        assert make_report_page([tmp_path]).title == make_report_page([FIND]).title
    assert len(recorded_warnings) == 1


@pytest.mark.parametrize(("name", "has_command"), [("float32-burst-20261122-000620", False), ("", True)])
def test_a_page_shows_a_command_only_if_a_shell_can_run_it(name, has_command):
    page = make_report_page([H200 / f"bandwidth-{name}.jsonl" if name else FIND])
    assert any(section.heading == "Reproduce it" and section.parts for section in page.sections) == has_command


HOSTILE = "</style></script><script>window.pwned=1</script><img src=x onerror=pwned()>\"'\x1b[31m\u202e{{7*7}}"


def write_hostile_log(folder):
    lines = FIND.read_text().splitlines()
    header = json.loads(lines[0])
    header["device"]["name"] = HOSTILE
    header["command"] = header["environment"]["os"] = HOSTILE
    header["findings"] = [HOSTILE, f"WARN {HOSTILE}"]
    rows = [json.loads(line) for line in lines[1:]]
    for row in rows:
        if row["record"] in ("measurement", "ceiling"):
            row["kernel"] = HOSTILE
            row["throttle_reasons"] = [HOSTILE]
    path = folder / "hostile.jsonl"
    path.write_text("\n".join(map(json.dumps, [header, *rows])) + "\n")
    return path


def test_a_hostile_log_stays_text(tmp_path):
    page = render_page(make_report_page([write_hostile_log(tmp_path)]))
    parser = MarkupParser(page)
    assert not parser.errors
    assert parser.tags.count("script") == 1
    assert "img" not in parser.tags
    assert not [name for name, _ in parser.attributes if name.startswith("on") or name == "style"]
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "{{7*7}}" in page


def test_the_policy_of_a_page_allows_only_its_script_and_style():
    page = render_page(Page("t", sections=[Section("h", [])]))
    policy = html.unescape(re.search('Content-Security-Policy" content="([^"]*)"', page)[1])
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for kind in ("style", "script"):
        text = re.search(f"<{kind}>(.*?)</{kind}>", page, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


@pytest.mark.parametrize(
    ("address", "is_safe"),
    [
        ("https://example.org/a?b=c:d", True),
        ("devices/nvidia-h200.html", True),
        ("../a:b.html", True),
        ("javascript:alert(1)", False),
        ("JavaScript:alert(1)", False),
        ("data:text/html,x", False),
    ],
)
def test_only_addresses_that_run_nothing_are_kept(address, is_safe):
    assert sanitize_address(address) == (address if is_safe else "")


def test_the_command_writes_one_file_and_replaces_none(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(FIND), "-o", "page.html"]) == 0
    assert capsys.readouterr().out.startswith("report: page.html (")
    assert main(["report", str(FIND), "-o", "page.html"]) == 2
    assert "page.html exists" in capsys.readouterr().err
    assert main(["report", str(FIND), "-o", "page.html", "--overwrite"]) == 0
    capsys.readouterr()
    assert main(["report", "missing.jsonl", "-o", "page.html"]) == 2
    assert "cannot read missing.jsonl" in capsys.readouterr().err


def test_a_terminal_shows_how_many_sections_are_drawn(tmp_path, monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", stderr)
    assert main(["report", str(FIND), "-o", str(tmp_path / "page.html")]) == 0
    assert "drawing:   0%" in stderr.getvalue()
    assert stderr.getvalue().endswith("\r")  # mamf clears the progress line at the end


def test_old_and_new_are_compared_without_a_verdict(capsys):
    old_log = H200 / "mamf-finder-v2g-bfloat16-20261122-022832.jsonl"
    new_log = H200 / "sweep-torch-mm-bfloat16-classic-20261122-181549.jsonl"
    assert main(["compare", str(old_log), str(new_log), "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 79
    first_row = rows[0]
    assert first_row["ratio"] == pytest.approx(first_row["b_tflops"] / first_row["a_tflops"])
    assert main(["compare", str(old_log), str(new_log)]) == 0
    assert "no verdict" in capsys.readouterr().out
    assert main(["compare", str(old_log), str(new_log), "--top", "3"]) == 0
    assert "76 more rows (--top all shows all)" in capsys.readouterr().out
    attention_log = next(iter(sorted(H200.glob("attention-*.jsonl"))))
    assert main(["compare", str(old_log), str(attention_log)]) == 2
    assert "has no matmuls" in capsys.readouterr().err
    assert main(["compare", str(old_log), str(old_log), "--against", str(new_log), str(new_log)]) == 2
    assert "one other log" in capsys.readouterr().err


def test_headlines_of_old_and_new_are_compared_with_each_other(capsys):
    old_log = H200 / "mamf-finder-v4-bfloat16-20261121-003514.jsonl"
    assert main(["compare", str(old_log), str(FIND), "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    ceilings = read_run_log(FIND).ceilings
    assert [(row["figure"], row["a_tflops"]) for row in rows] == [("MAMF", 802.3), ("MSMF", 697.7)]
    assert [row["b_tflops"] for row in rows] == [ceilings["burst"].rate, ceilings["sustained"].rate]


def test_without_jinja2_one_line_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    _load_template.cache_clear()
    for command in (
        ["peak", "--name", "B200", "--format", "html"],
        ["show", str(FIND), "--format", "html"],
        ["report", str(FIND)],
    ):
        assert main(command) == 2
        out, err = capsys.readouterr()
        assert (out, err) == ("", "mamf: pages need jinja2: pip install jinja2\n")
    assert not list(tmp_path.iterdir())


def test_a_run_whose_page_cannot_be_written_keeps_its_log_and_says_where(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    _load_template.cache_clear()
    device = ["--backend", "mamf.testing:SimulatedBackend", "--kernel", "mamf.testing:SimulatedMatmul"]
    log = tmp_path / "log.jsonl"
    assert main(["sweep", *device, "--shapes", "512x512x512", "--format", "html", "--output", str(log)]) == 2
    assert f"log: {log}" in capsys.readouterr().err
    assert read_run_log(log).tier == "complete"


def test_a_page_of_several_logs_begins_with_a_failed_verification():
    page = make_report_page([FIND, ROOT / "docs" / "verify-h200.jsonl"])
    failure = "verify FAILED: 1 of 213 problems wrong"
    assert page.verdict.startswith(f"verify-h200.jsonl: {failure}") and page.verdict_color == "bad"
    html = render_page(page)
    assert html.count(failure) >= 3  # at the top, in the table of logs, and in the report of the verification
    assert make_report_page([FIND, H200 / "find-float16-burst-sustained-20261124-193838.jsonl"]).verdict_color == ""
