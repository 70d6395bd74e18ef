"""The results folder: every log accepted by the rules, at its place, and the table of them fresh."""

from pathlib import Path

import pytest

from mamf.contribution.collection import collect
from mamf.contribution.rules import review_results
from mamf.contribution.tables import results_page

RESULTS = Path(__file__).resolve().parents[2] / "results"
LOGS = sorted(RESULTS.rglob("*.jsonl"))


@pytest.fixture(scope="module")
def reviews():
    return {found.path: found for found in review_results(RESULTS, LOGS)}


def test_there_are_results():
    assert LOGS


@pytest.mark.parametrize("path", LOGS, ids=lambda path: str(path.relative_to(RESULTS)))
def test_a_result_is_accepted(path, reviews):
    assert [finding for finding in reviews[path].findings if not finding.is_warning] == []


def test_the_table_is_fresh():
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert page == results_page(collect(RESULTS, LOGS)), "run 'mamf results table'"
