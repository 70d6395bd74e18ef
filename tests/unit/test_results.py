"""Check the results folder: all logs follow the rules and are in the right place, and the tables are up to date."""

import csv
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


def select_errors(findings):
    return [finding for finding in findings if not finding.is_warning]


def test_there_are_results():
    assert LOGS


def test_each_result_is_accepted_in_its_folder_and_not_duplicated():
    errors_by_path = {review.path: select_errors(review.findings) for review in reviews.review_results(RESULTS, LOGS)}
    assert errors_by_path == {path: [] for path in LOGS}


@pytest.fixture(scope="module")
def collection_and_compared_rows():
    """Return the collection of all logs and, by the path of each find log, its ceilings and what ``mamf compare`` uses.

    Both are collected at once, so that each log is read only once.
    """
    compared_rows = {}

    def read(path):
        log = read_run_log(path)
        if path.name.startswith("find-"):
            compared_rows[path] = (
                log.ceilings,
                {each.pairing_fields["regime"]: each for each in list_compared_rows(log, as_ceilings=True)},
            )
        return log

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mamf.contribution.collection.read_run_log", read)
        return read_collection(RESULTS, LOGS), compared_rows


def test_the_tables_and_the_packaged_ceilings_are_up_to_date(collection_and_compared_rows):
    collection, _ = collection_and_compared_rows
    for path, page in make_results_pages(collection).items():
        assert (RESULTS / path).read_text(encoding="utf-8") == page, f"{path} is out of date: run 'mamf results table'"
    ceilings = (RESULTS.parent / "mamf" / CONTRIBUTED_FILE_NAME).read_text(encoding="utf-8")
    assert ceilings == make_contributed_csv(collection), (
        f"{CONTRIBUTED_FILE_NAME} is out of date: run 'mamf results table'"
    )


def test_the_ranges_of_cards_compare_searches_that_tried_the_best_kernel():
    path = RESULTS.parent / "mamf" / CONTRIBUTED_FILE_NAME
    rows = [row for row in csv.DictReader(path.open(encoding="utf-8")) if int(row["cards"]) > 1]
    assert {row["dtype"] for row in rows} >= {"bfloat16", "int8"}
    # Without cublaslt, int8 matmuls reach only 60 % of the best rate.
    assert all(float(row["lowest"]) > 0.9 * float(row["tflops"]) for row in rows)


def test_each_log_has_exactly_one_submitter():
    assert check_submitters(RESULTS, [path.relative_to(RESULTS) for path in LOGS]) == []


def test_compared_rows_of_a_find_equal_the_ceilings_in_its_log(collection_and_compared_rows):
    _, compared_rows = collection_and_compared_rows
    assert len(compared_rows) == sum(path.name.startswith("find-") for path in LOGS) > 100
    for path, (ceilings, rows_by_regime) in compared_rows.items():
        for regime, ceiling in ceilings.items():
            assert rows_by_regime[regime].rate == pytest.approx(ceiling.tflops, rel=1e-5, abs=1e-3), path
            assert rows_by_regime[regime].shape == str(ceiling.shape), path
