"""Test that the review rejects forged logs whose samples were changed, even if all other figures were recomputed."""

import forgeries
import pytest
from contribution_logs import RESULTS

from mamf.contribution.review import review_log, review_results

FIND = RESULTS / "nvidia-h200" / "find-bfloat16-burst-sustained-20261122-181803.jsonl"
HONEST = {"find": FIND, "attention": RESULTS / "nvidia-h200" / "attention-bfloat16-fwd-burst-20261122-165450.jsonl"}


def forged(honest, forge, folder):
    records = forgeries.read(honest)
    forge(records)
    return forgeries.write(folder / honest.name, forgeries.recompute(honest, records))


@pytest.mark.parametrize("path", HONEST.values(), ids=HONEST)
def test_the_same_logs_are_accepted_as_they_are(path, tmp_path):
    assert not review_log(forged(path, lambda records: None, tmp_path)).is_rejected()


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


REFUSED = {
    "faster than physics": ("find", lambda records: forgeries.scale(records, 1.5)),
    "name in lower case": ("find", lower_name),
    "rows without a clock": ("find", hide_clocks),
    "sparsity": ("attention", claim_sparsity),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_impossible_is_refused(kind, tmp_path):
    group, forge = REFUSED[kind]
    assert review_log(forged(HONEST[group], forge, tmp_path)).is_rejected()


def test_samples_of_another_log_are_found(tmp_path):
    root = tmp_path / "results"
    (root / "nvidia-h200").mkdir(parents=True)
    records, other = forgeries.read(FIND), forgeries.read(FIND)
    other[0]["started"] = other[0]["started"].replace("T18:18:03", "T18:18:02")
    forgeries.scale(other[: len(other) // 2], 1.001)
    paths = [
        forgeries.write(root / "nvidia-h200" / FIND.name, records),
        forgeries.write(root / "nvidia-h200" / FIND.name.replace("181803", "181802"), forgeries.recompute(FIND, other)),
    ]
    found = review_results(root, paths)[1]
    assert "duplicate" in {finding.rule for finding in found.findings}
