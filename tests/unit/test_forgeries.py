"""Logs that were made up, with every figure computed anew: each kind of tools/attacks/forging.py, once."""

from random import Random

import pytest
from attacks import forging
from contribution_logs import RESULTS

from mamf.contribution.collection import collect
from mamf.contribution.rules import review, review_results
from mamf.contribution.tables import results_page

FIND = RESULTS / "nvidia-h200" / "find-bfloat16-burst-sustained-20261122-181803.jsonl"
HONEST = {
    "find": FIND,
    "bfloat16": FIND,
    "attention": RESULTS / "nvidia-h200" / "attention-bfloat16-fwd-burst-20261122-165450.jsonl",
    "cpu": RESULTS / "amd-epyc" / "find-float32-burst-sustained-20261122-010619.jsonl",
}


def forged(honest, forge, folder, seed=0):
    records = forging.read(honest)
    forge(Random(seed), records)
    return forging.write(folder / honest.name, forging.recompute(honest, records))


@pytest.mark.parametrize("path", HONEST.values(), ids=HONEST)
def test_the_same_logs_are_accepted_as_they_are(path, tmp_path):
    assert not review(forged(path, lambda random, records: None, tmp_path)).is_rejected()


@pytest.mark.parametrize("kind", forging.REFUSED)
def test_what_is_impossible_is_refused(kind, tmp_path):
    group, forge = forging.REFUSED[kind]
    found = review(forged(HONEST[group], forge, tmp_path))
    assert {finding.rule for finding in found.findings if not finding.is_warning}


@pytest.mark.parametrize("seed", range(3))
def test_what_is_possible_and_above_every_known_card_is_not_ranked(seed, tmp_path):
    found = review(forged(FIND, forging.possible, tmp_path, seed))
    assert found.is_rejected() or found.unconfirmed


def test_samples_of_another_log_are_found(tmp_path):
    root = tmp_path / "results"
    (root / "nvidia-h200").mkdir(parents=True)
    records, other = forging.read(FIND), forging.read(FIND)
    other[0]["started"] = other[0]["started"].replace("T18:18:03", "T18:18:02")
    forging.scale(other[: len(other) // 2], 1.001)
    paths = [
        forging.write(root / "nvidia-h200" / FIND.name, records),
        forging.write(root / "nvidia-h200" / FIND.name.replace("181803", "181802"), forging.recompute(FIND, other)),
    ]
    found = review_results(root, paths)[1]
    assert "duplicate" in {finding.rule for finding in found.findings}


def test_a_kernel_that_nobody_knows_is_called_third_party(tmp_path):
    root = tmp_path / "results"
    (root / "nvidia-h200").mkdir(parents=True)
    path = root / "nvidia-h200" / FIND.name
    path.write_text(FIND.read_text().replace("torch.mm", "fast.mm"))
    assert not review(path).is_rejected()
    page = results_page(collect(root, [path]))
    assert "fast.mm (third-party)" in page
    assert "third-party" not in results_page(collect(RESULTS, [FIND]))
