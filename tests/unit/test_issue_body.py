"""A log in the body of an issue: what 'submit --issue' prints is read back, and hostile bodies are one clear line."""

import base64
import lzma

import pytest
from contribution_logs import best, write
from hypothesis import given
from hypothesis import strategies as st
from issue_log import MOST_CHARACTERS, decode_issue, main

from mamf.contribution import submission
from mamf.contribution.evidence import records_of
from mamf.contribution.placing import place_of
from mamf.contribution.submission import encode_issue
from mamf.errors import RunLogError, UsageError

LOG = '{"record": "header"}\n'


def body_of(packed, opening="```mamf-log"):
    return f"### Output\n\n{opening}\n{base64.encodebytes(packed).decode()}```\n\n### Notes\n\nnone\n"


def test_a_log_comes_back_from_the_body_that_submit_prints(run, sweep_records, tmp_path):
    write(tmp_path / "run.jsonl", sweep_records)
    code, out, err = run("results", "submit", "run.jsonl", "--issue")
    assert code == 0
    assert "paste this into the form" in err
    assert f"results/{place_of(sweep_records[0]).as_posix()}" in out
    # As the web form sends it: between other fields, with the line ends of forms.
    (tmp_path / "body.md").write_bytes(
        f"### Output\n\n{out}\n### Notes\n\n_No response_".replace("\n", "\r\n").encode()
    )
    assert main([str(tmp_path / "body.md"), str(tmp_path / "again.jsonl")]) == 0
    assert [record for _, record in records_of(tmp_path / "again.jsonl")] == sweep_records
    (tmp_path / "results").mkdir()
    assert run("results", "submit", "again.jsonl")[0] == 0


def test_a_rejected_log_has_no_body(run, sweep_records, tmp_path, monkeypatch):
    monkeypatch.setitem(best(sweep_records)["tflops"], "median", 1e9)
    write(tmp_path / "run.jsonl", sweep_records)
    code, out, err = run("results", "submit", "run.jsonl", "--issue")
    assert (code, out) == (1, "")
    assert "row-mismatch" in err


def test_a_log_that_does_not_fit_is_for_a_pull_request(monkeypatch, tmp_path):
    monkeypatch.setattr(submission, "_MAX_LOG", 100)
    with pytest.raises(UsageError, match="open a pull request"):
        encode_issue(LOG.encode(), tmp_path)
    monkeypatch.setattr(submission, "MOST_BYTES", 10)
    with pytest.raises(UsageError, match="open a pull request"):
        encode_issue(LOG.encode(), tmp_path)


PACKED = lzma.compress(LOG.encode())
# A dictionary of 40 MiB.
WIDE = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 40 << 20}]
HOSTILE = {
    "no block": ("nothing here", "0 blocks"),
    "empty": ("", "0 blocks"),
    "another block": (body_of(PACKED, "```json"), "0 blocks"),
    "two blocks": (body_of(PACKED) + body_of(PACKED), "2 blocks"),
    "a path behind the opening": (body_of(PACKED, "```mamf-log ../../.github/workflows/ci.yml"), "0 blocks"),
    "no end": ("```mamf-log\nAAAA\n", "does not end"),
    "no base64": ("```mamf-log\n$(id)\n```\n", "cannot be unpacked"),
    "base64 with a wrong length": ("```mamf-log\nAAAAA\n```\n", "cannot be unpacked"),
    "letters beyond ASCII": ("```mamf-log\n\N{FULLWIDTH LATIN SMALL LETTER A}AAA\n```\n", "cannot be unpacked"),
    "nothing packed": ("```mamf-log\n```\n", "is cut"),
    "not packed": (body_of(LOG.encode()), "cannot be unpacked"),
    "cut": (body_of(PACKED[:-8]), "is cut"),
    "more behind the end": (body_of(PACKED + PACKED), "something after its end"),
    "a bomb": (body_of(lzma.compress(bytes(8 << 20))), "more than"),
    "a bomb of memory": (body_of(lzma.compress(b"x", filters=WIDE)), "cannot be unpacked"),
    "too long": ("a" * (MOST_CHARACTERS + 1), "65537 characters"),
}


@pytest.mark.parametrize(("body", "said"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_body_is_one_clear_line_and_writes_nothing(body, said, tmp_path, capsys):
    (tmp_path / "body.md").write_text(body, encoding="utf-8")
    assert main([str(tmp_path / "body.md"), str(tmp_path / "log.jsonl")]) == 1
    out = capsys.readouterr().out
    assert said in out
    assert out.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["body.md"]


def test_a_file_that_is_there_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "body.md").write_text(body_of(PACKED))
    (tmp_path / "log.jsonl").write_text("mine")
    assert main([str(tmp_path / "body.md"), str(tmp_path / "log.jsonl")]) == 1
    assert "is not overwritten" in capsys.readouterr().out
    assert (tmp_path / "log.jsonl").read_text() == "mine"


@given(st.text(max_size=300) | st.text("`mafl-og\n\r A=/+", max_size=300))
def test_any_body_is_a_log_or_an_error(body):
    try:
        assert isinstance(decode_issue(body), bytes)
    except RunLogError as error:
        assert "\n" not in str(error)
