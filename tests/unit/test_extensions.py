"""Test that mamf is easy to extend: a column needs one line, a format or a check one function, and a kind of run one
class.
"""

import json
from pathlib import Path

import pytest

from mamf.contribution import review
from mamf.contribution.rules import Finding
from mamf.kinds import registry
from mamf.kinds.kind import ReportOptions, RunKind
from mamf.logs.run_log import read_run_log
from mamf.operations.unknown import get_operation
from mamf.report import formats
from mamf.report.document import Answer, Document

LOG = Path(__file__).parents[2] / "results/nvidia-h200/sweep-torch-mm-bfloat16-burst-20261122-165501.jsonl"


def make_document(log, **options):
    return registry.get_kind(log.plan).make_document(log, ReportOptions(**options))


def test_a_new_column_is_one_line(monkeypatch):
    matmul = get_operation("matmul")
    make_columns = matmul.make_columns
    monkeypatch.setattr(
        matmul, "make_columns", lambda row, info=None: {**make_columns(row, info), "depth": row.shape.k}
    )
    log = read_run_log(LOG)
    rows = json.loads(formats.format_json(make_document(log)))["measurements"]
    assert {row["depth"] for row in rows if row["status"] == "ok"} == {4096}
    assert "depth" in formats.format_for_terminal(make_document(log, max_rows=1)).split()


def test_a_new_format_is_one_function(run, monkeypatch):
    def render(document: Document, width: int | None = None) -> str:
        return "".join(f"{line}\n" for block in document.blocks if isinstance(block, Answer) for line in block.texts)

    monkeypatch.setitem(formats.FORMATTERS, "markdown", render)
    code, out, _ = run("show", str(LOG), "--format", "markdown")
    assert (code, out.startswith("best burst")) == (0, True)


def test_a_new_check_is_one_function(monkeypatch):
    def reject_torch_mm(evidence):
        if evidence.header["kernel"] == "torch.mm":
            yield Finding("no-torch-mm", "another kernel is wanted", 1)

    assert not review.review_log(LOG).is_rejected()
    monkeypatch.setattr(review, "RULES", (*review.RULES, reject_torch_mm))
    assert [finding.rule for finding in review.review_log(LOG).findings if not finding.is_warning] == ["no-torch-mm"]


class Soak(RunKind):
    """A kind of run that a third party adds."""

    name, noun_phrase = "soak", "a soak"

    def make_document(self, log, view):
        return Document("soak", [Answer([f"{len(log.measurements)} visits"])])


@pytest.fixture
def soak_log(tmp_path):
    """Return the path of a log of the kind ``soak``, made from the log of a sweep."""
    header, *other_lines = LOG.read_text().splitlines()
    header = json.loads(header)
    header["plan"] |= {"command": "soak", "options": {}}
    path = tmp_path / "soak.jsonl"
    path.write_text("\n".join([json.dumps(header), *other_lines]) + "\n")
    return path


def test_a_new_kind_of_run_is_one_class(run, monkeypatch, soak_log):
    monkeypatch.setitem(registry.RUN_KINDS, "soak", Soak())
    log = read_run_log(soak_log)
    assert log.plan.kind == "soak"
    assert run("show", str(soak_log))[1] == f"{len(log.measurements)} visits\n"
    code, _, err = run("sweep", "--resume", str(soak_log), "--backend", "mamf.testing:SimulatedBackend")
    assert (code, "is the log of a soak of matmul: resume it with 'mamf soak --resume" in err) == (2, True)
    assert run("plot", str(soak_log), "--output", "soak.svg")[0] == 0


def test_a_kind_that_this_mamf_does_not_know_is_shown_as_rows(run, soak_log):
    code, out, _ = run("show", str(soak_log), "--top", "1")
    assert (code, "best burst" in out) == (0, True)
