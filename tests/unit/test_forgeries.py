"""Test that the review rejects forged logs whose samples were changed, even if all other figures were recomputed."""

import forgeries
import pytest
from contribution_logs import RESULTS

from mamf.contribution.review import review_log, review_results

FIND = RESULTS / "nvidia-h200" / "find-bfloat16-burst-sustained-20261122-181803.jsonl"
HONEST_LOGS = {
    "find": FIND,
    "attention": RESULTS / "nvidia-h200" / "attention-bfloat16-fwd-burst-20261122-165450.jsonl",
}


def write_forgery(path, forge, folder):
    records = forgeries.read(path)
    forge(records)
    return forgeries.write(folder / path.name, forgeries.recompute(path, records))


@pytest.mark.parametrize("path", HONEST_LOGS.values(), ids=HONEST_LOGS)
def test_logs_without_changed_samples_are_accepted(path, tmp_path):
    assert not review_log(write_forgery(path, lambda records: None, tmp_path)).is_rejected()


def lower_name(records):
    forgeries.scale(records, 1.2)
    records[0]["device"]["name"] = records[0]["device"]["name"].lower()


def hide_clocks(records):
    forgeries.scale(records, 1.1)
    for row in forgeries.rows_of(records)[::2]:
        row["clock_mhz"] = None


def claim_sparsity(records):
    forgeries.scale(records, 3)
    for row in forgeries.rows_of(records):
        if row["operation"] == "attention":
            row["details"]["sparsity"] = 0.75


FORGERIES = {
    "faster than physics": ("find", lambda records: forgeries.scale(records, 1.5)),
    "name in lower case": ("find", lower_name),
    "rows without a clock": ("find", hide_clocks),
    "sparsity": ("attention", claim_sparsity),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_a_log_with_impossible_figures_is_rejected(kind, tmp_path):
    log_name, forge = FORGERIES[kind]
    assert review_log(write_forgery(HONEST_LOGS[log_name], forge, tmp_path)).is_rejected()


def test_samples_of_another_log_are_noticed(tmp_path):
    root = tmp_path / "results"
    (root / "nvidia-h200").mkdir(parents=True)
    records, copied_records = forgeries.read(FIND), forgeries.read(FIND)
    copied_records[0]["started"] = copied_records[0]["started"].replace("T18:18:03", "T18:18:02")
    forgeries.scale(copied_records[: len(copied_records) // 2], 1.001)
    paths = [
        forgeries.write(root / "nvidia-h200" / FIND.name, records),
        forgeries.write(
            root / "nvidia-h200" / FIND.name.replace("181803", "181802"), forgeries.recompute(FIND, copied_records)
        ),
    ]
    review_of_copy = review_results(root, paths)[1]
    assert "duplicate" in {finding.rule for finding in review_of_copy.findings}
