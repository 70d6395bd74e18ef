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
LEADER = "find-bfloat16-burst-sustained-20261122-023019.jsonl"
OTHER = "find-bfloat16-burst-sustained-20261122-000557.jsonl"


@pytest.fixture
def submit(tmp_path):
    """Return a function that copies a log of results/ into a new results folder and names ``account`` as its submitter.
    ``times``: the factor by which to make the log faster.
    """
    root = tmp_path / "results"
    (root / FOLDER).mkdir(parents=True)
    (root / "README.md").touch()
    (root / "maintainers.txt").write_text("# who may be trusted\nMaintainer\n")

    def submitted(name, account, times=1.0):
        if times == 1.0:
            shutil.copy(RESULTS / FOLDER / name, root / FOLDER)
        else:
            records = forgeries.read(RESULTS / FOLDER / name)
            forgeries.scale(records, times)
            forgeries.write(root / FOLDER / name, forgeries.recompute(root / FOLDER / name, records))
        if account:
            with (root / "submitters.txt").open("a") as file:
                file.write(f"{FOLDER}/{name} {account}\n")
        return root

    return submitted


def pages_of(root):
    """Return four texts: the main page, the ranked and the unconfirmed part of the only device's page, and the content
    of contributed.csv.
    """
    collection = read_collection(root, sorted(root.rglob("*.jsonl")))
    pages = make_results_pages(collection)
    ranked, _, apart = pages[Path(FOLDER, "README.md")].partition("## Unconfirmed")
    return pages[Path("README.md")], ranked, apart, make_contributed_csv(collection)


def is_ranked(root, name):
    _, ranked, apart, packaged = pages_of(root)
    found = {name in page for page in (ranked, packaged)}
    assert len(found) == 1 and found != {name in apart}
    return found == {True}


def test_what_a_maintainer_measured_is_confirmed(submit):
    root = submit(LEADER, "maintainer")
    assert is_ranked(root, LEADER)
    assert "| **870.4** / " in pages_of(root)[0]


@pytest.mark.parametrize(
    ("second", "times", "is_confirmed"),
    [("joe", 1.0, True), ("Jane", 1.0, False), (None, 1.0, False), ("joe", 0.9, False), ("maintainer", 0.9, False)],
)
def test_a_second_submitter_confirms_within_the_spread_of_cards(submit, second, times, is_confirmed):
    root = submit(LEADER, "jane")
    submit(OTHER, second, times)
    assert is_ranked(root, LEADER) is is_confirmed


def test_the_cards_in_logs_are_not_believed(submit):
    """Check that one account cannot confirm its own rate by inventing another card's hash in a second log."""
    root = submit(LEADER, "jane", 1.13)
    submit(OTHER, "jane", 1.13)
    path = root / FOLDER / OTHER
    path.write_text(path.read_text().replace('"uuid_hash": "', '"uuid_hash": "f00d'))
    assert not is_ranked(root, LEADER) and not is_ranked(root, OTHER)


def test_an_attention_row_that_nobody_else_measured_is_unconfirmed(submit):
    name = "attention-bfloat16-fwd-bwd-burst-20261122-221518.jsonl"
    root = submit(name, "jane")
    _, ranked, apart, _ = pages_of(root)
    assert name not in ranked and name in apart


def test_a_log_without_a_submitter_is_a_warning_and_a_name_without_a_log_an_error(submit, run):
    root = submit(LEADER, None)
    code, out, _ = run("results", "check", str(root), "--format", "json")
    (finding,) = [each for log in json.loads(out)["logs"] for each in log["findings"] if each["rule"] == "submitter"]
    assert (code, finding["level"]) == (0, "warning")
    (root / "submitters.txt").write_text(f"{FOLDER}/{LEADER} jane\n{FOLDER}/{LEADER} joe\n{FOLDER}/none.jsonl joe\n")
    last = review_results(root, sorted(root.rglob("*.jsonl")))[-1]
    assert last.path == root / "submitters.txt" and last.is_rejected()
    assert len(last.findings) == 2
