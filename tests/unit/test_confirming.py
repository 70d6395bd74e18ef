"""Test which figures in results/ are confirmed: those from a maintainer, and those that two accounts submitted. The
pages list all other figures as unconfirmed.
"""

import json
import shutil
from pathlib import Path

import forgeries
import pytest
from contribution_logs import RESULTS

from mamf.contribution.collection import read_collection
from mamf.contribution.review import review_results
from mamf.contribution.tables import make_contributed_csv, make_results_pages

FOLDER = "nvidia-h200"
FIRST_LOG = "find-bfloat16-burst-sustained-20261122-023019.jsonl"
SECOND_LOG = "find-bfloat16-burst-sustained-20261122-000557.jsonl"


@pytest.fixture
def submit(tmp_path):
    """Return a function that copies a log of results/ into a new results folder and names ``account`` as its submitter.
    ``speedup``: the factor by which to make the log faster.
    """
    root = tmp_path / "results"
    (root / FOLDER).mkdir(parents=True)
    (root / "README.md").touch()
    (root / "maintainers.txt").write_text("# who may be trusted\nMaintainer\n")

    def submit_log(name, account, speedup=1.0):
        if speedup == 1.0:
            shutil.copy(RESULTS / FOLDER / name, root / FOLDER)
        else:
            records = forgeries.read(RESULTS / FOLDER / name)
            forgeries.scale(records, speedup)
            forgeries.write(root / FOLDER / name, forgeries.recompute(root / FOLDER / name, records))
        if account:
            with (root / "submitters.txt").open("a") as file:
                file.write(f"{FOLDER}/{name} {account}\n")
        return root

    return submit_log


def make_pages(root):
    """Return four texts: the main page, the ranked and the unconfirmed part of the only device's page, and the content
    of contributed.csv.
    """
    collection = read_collection(root, sorted(root.rglob("*.jsonl")))
    pages = make_results_pages(collection)
    ranked, _, unconfirmed = pages[Path(FOLDER, "README.md")].partition("## Unconfirmed")
    return pages[Path("README.md")], ranked, unconfirmed, make_contributed_csv(collection)


def is_ranked(root, name):
    _, ranked, unconfirmed, csv_text = make_pages(root)
    is_on_page, is_in_csv, is_unconfirmed = (name in text for text in (ranked, csv_text, unconfirmed))
    assert is_on_page == is_in_csv != is_unconfirmed
    return is_on_page


def test_a_rate_of_a_maintainer_is_confirmed(submit):
    root = submit(FIRST_LOG, "maintainer")
    assert is_ranked(root, FIRST_LOG)
    assert "| **870.4** / " in make_pages(root)[0]


@pytest.mark.parametrize(
    ("second_account", "speedup", "is_confirmed"),
    [("joe", 1.0, True), ("Jane", 1.0, False), (None, 1.0, False), ("joe", 0.9, False), ("maintainer", 0.9, False)],
)
def test_a_second_submitter_confirms_within_the_spread_of_cards(submit, second_account, speedup, is_confirmed):
    root = submit(FIRST_LOG, "jane")
    submit(SECOND_LOG, second_account, speedup)
    assert is_ranked(root, FIRST_LOG) is is_confirmed


def test_an_account_cannot_confirm_its_own_rate_with_an_invented_card(submit):
    """Check that one account cannot confirm its own rate by inventing another card's hash in a second log."""
    root = submit(FIRST_LOG, "jane", 1.13)
    submit(SECOND_LOG, "jane", 1.13)
    path = root / FOLDER / SECOND_LOG
    path.write_text(path.read_text().replace('"uuid_hash": "', '"uuid_hash": "f00d'))
    assert not is_ranked(root, FIRST_LOG) and not is_ranked(root, SECOND_LOG)


def test_an_attention_row_that_nobody_else_measured_is_unconfirmed(submit):
    name = "attention-bfloat16-fwd-bwd-burst-20261122-221518.jsonl"
    root = submit(name, "jane")
    _, ranked, unconfirmed, _ = make_pages(root)
    assert name not in ranked and name in unconfirmed


def test_a_log_without_a_submitter_is_a_warning_and_a_name_without_a_log_an_error(submit, run):
    root = submit(FIRST_LOG, None)
    code, out, _ = run("results", "check", str(root), "--format", "json")
    (finding,) = [each for log in json.loads(out)["logs"] for each in log["findings"] if each["rule"] == "submitter"]
    assert (code, finding["level"]) == (0, "warning")
    (root / "submitters.txt").write_text(
        f"{FOLDER}/{FIRST_LOG} jane\n{FOLDER}/{FIRST_LOG} joe\n{FOLDER}/none.jsonl joe\n"
    )
    submitters_review = review_results(root, sorted(root.rglob("*.jsonl")))[-1]
    assert submitters_review.path == root / "submitters.txt" and submitters_review.is_rejected()
    assert len(submitters_review.findings) == 2
