"""Check the results folder: all logs follow the rules and are in the right place, and the tables are up to date."""

from pathlib import Path

import pytest

from mamf.contribution import review as reviews
from mamf.contribution.collection import check_submitters, read_collection
from mamf.contribution.tables import make_contributed_csv, make_results_pages
from mamf.logs.compared_rows import list_compared_rows
from mamf.logs.run_log import read_run_log
from mamf.peaks import CONTRIBUTED_FILE_NAME

RESULTS = Path(__file__).resolve().parents[2] / "results"
LOGS = sorted(RESULTS.rglob("*.jsonl"))

pytestmark = pytest.mark.docs


def errors(findings):
    return [finding for finding in findings if not finding.is_warning]


def test_there_are_results():
    assert LOGS


def test_each_result_is_accepted_at_its_place_and_there_once():
    found = {each.path: errors(each.findings) for each in reviews.review_results(RESULTS, LOGS)}
    assert found == {path: [] for path in LOGS}


@pytest.fixture(scope="module")
def collected():
    """Return the collection of all logs and, by the path of each find log, its ceilings and what ``mamf compare`` uses.

    Both are collected at once, so that each log is read only once.
    """
    compared = {}

    def read(path):
        log = read_run_log(path)
        if path.name.startswith("find-"):
            compared[path] = (
                log.ceilings,
                {each.pairing_fields["regime"]: each for each in list_compared_rows(log, as_ceilings=True)},
            )
        return log

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mamf.contribution.collection.read_run_log", read)
        return read_collection(RESULTS, LOGS), compared


def test_the_table_and_what_travels_with_the_package_are_fresh(collected):
    held, _ = collected
    for path, page in make_results_pages(held).items():
        assert (RESULTS / path).read_text(encoding="utf-8") == page, f"{path} is out of date: run 'mamf results table'"
    ceilings = (RESULTS.parent / "mamf" / CONTRIBUTED_FILE_NAME).read_text(encoding="utf-8")
    assert ceilings == make_contributed_csv(held), f"{CONTRIBUTED_FILE_NAME} is out of date: run 'mamf results table'"


def test_each_log_has_a_submitter_once():
    assert check_submitters(RESULTS, [path.relative_to(RESULTS) for path in LOGS]) == []


def test_what_is_compared_of_a_find_is_what_its_log_says(collected):
    _, compared = collected
    assert len(compared) == sum(path.name.startswith("find-") for path in LOGS) > 100
    for path, (ceilings, figures) in compared.items():
        for regime, ceiling in ceilings.items():
            assert figures[regime].rate == pytest.approx(ceiling.tflops, rel=1e-5, abs=1e-3), path
            assert figures[regime].shape == str(ceiling.shape), path
