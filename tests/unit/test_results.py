"""The results folder: every log accepted by the rules, at its place, and the table of them fresh."""

from pathlib import Path

from mamf.ceilings.contributed import FILE
from mamf.contribution import rules
from mamf.contribution.collection import collect
from mamf.contribution.placing import contributed_csv
from mamf.contribution.tables import results_page

RESULTS = Path(__file__).resolve().parents[2] / "results"
LOGS = sorted(RESULTS.rglob("*.jsonl"))


def errors(findings):
    return [finding for finding in findings if not finding.is_warning]


def test_there_are_results():
    assert LOGS


def test_each_result_is_accepted_at_its_place_and_there_once():
    found = {each.path: errors(each.findings) for each in rules.review_results(RESULTS, LOGS)}
    assert found == {path: [] for path in LOGS}


def test_the_table_and_what_travels_with_the_package_are_fresh():
    held = collect(RESULTS, LOGS)
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert page == results_page(held), "run 'mamf results table'"
    ceilings = (RESULTS.parent / "mamf" / FILE).read_text(encoding="utf-8")
    assert ceilings == contributed_csv(held.ceilings), "run 'mamf results table'"
