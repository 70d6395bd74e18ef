"""Figures above every other card of a model are accepted, and stand apart until a second card confirms them."""

import json
import shutil
from pathlib import Path

import pytest
from attacks import forging
from contribution_logs import RESULTS, write

from mamf.contribution import rules
from mamf.contribution.collection import collect
from mamf.contribution.confirming import Claim, by_key, shortened, why_unconfirmed
from mamf.contribution.placing import contributed_csv
from mamf.contribution.tables import results_page

KEY = ("find", "card", "bfloat16", "burst")


def claim_of(figure, card="a", place="a.jsonl", half_width=2.0, is_bounded=True, **fields):
    defaults = {"key": KEY, "label": "bfloat16, burst"} | fields
    return Claim(
        card=card, place=Path(place), figure=figure, high=figure + half_width, is_bounded=is_bounded, **defaults
    )


def reason_for(claim, *others):
    return why_unconfirmed(claim, by_key([claim, *others]))


# -- the rule ----------------------------------------------------------------------------------------------------------


def test_the_first_log_of_a_model_is_bounded_by_its_datasheet():
    assert reason_for(claim_of(850)) is None
    assert "no verified datasheet" in reason_for(claim_of(850, is_bounded=False))


@pytest.mark.parametrize(("figure", "is_confirmed"), [(830, True), (832, True), (832.1, False), (870, False)])
def test_another_card_confirms_what_its_interval_reaches(figure, is_confirmed):
    other = claim_of(830, card="b", place="b.jsonl")
    assert (reason_for(claim_of(figure), other) is None) is is_confirmed
    assert (reason_for(claim_of(figure, is_bounded=False), other) is None) is is_confirmed


def test_a_second_card_confirms_whatever_the_order():
    first, second, slow = claim_of(870), claim_of(869, "b", "b.jsonl"), claim_of(830, "c", "c.jsonl")
    assert reason_for(first, slow) == "bfloat16, burst: 870 is above the 832 of c.jsonl"
    for others in ((slow, second), (second, slow)):
        assert reason_for(first, *others) is None


def test_a_card_does_not_confirm_itself():
    again, slow = claim_of(870, place="again.jsonl"), claim_of(830, "c", "c.jsonl")
    assert reason_for(claim_of(870), again, slow)
    assert "no verified datasheet" in reason_for(claim_of(870, is_bounded=False), again)
    unknown = claim_of(870, card=None, place="again.jsonl")
    assert reason_for(claim_of(870), unknown, slow), "a card without a hash may be the same card"
    assert reason_for(claim_of(870, card=None, is_bounded=False), unknown)


@pytest.mark.parametrize(("figure", "is_confirmed"), [(860, True), (900, False)])
def test_the_only_card_of_a_model_is_bounded_by_its_own_logs_too(figure, is_confirmed):
    assert (reason_for(claim_of(figure), claim_of(850, place="before.jsonl")) is None) is is_confirmed


def test_a_sweep_confirms_no_find_and_a_find_confirms_a_sweep():
    sweep = claim_of(830, "b", "sweep.jsonl", key=("sweep",))
    find = claim_of(860, other_keys=(("sweep",),))
    assert reason_for(find, sweep) is None
    assert reason_for(sweep, find) is None
    assert reason_for(claim_of(880, "b", "sweep.jsonl", key=("sweep",)), find)


def test_several_reasons_are_a_line():
    assert [shortened(reasons) for reasons in ([], ["x"], ["x", "y", "z"])] == ["", "x", "x (and 2 more)"]


# -- logs of results/, 5 % faster --------------------------------------------------------------------------------------

H200, H100 = RESULTS / "nvidia-h200", RESULTS / "nvidia-h100-80gb-hbm3"
LEADER = H200 / "find-bfloat16-burst-sustained-20261122-023019.jsonl"


def faster(path, times, torch="2.99.0", card=None):
    """The records of a log as newer software would have left them: every sample shorter, every figure that follows from
    them anew.
    """
    records = forging.read(path)
    records[0]["environment"]["packages"]["torch"] = torch
    records[0]["device"]["uuid_hash"] = card or records[0]["device"]["uuid_hash"]
    forging.scale(records, times)
    return forging.recompute(path, records)


@pytest.mark.parametrize(
    "path",
    [
        LEADER,
        H100 / "find-bfloat16-burst-sustained-20261122-154617.jsonl",
        H100 / "sweep-torch-mm-bfloat16-burst-20261121-040923.jsonl",
        H200 / "find-int8-burst-20261121-212828.jsonl",
    ],
    ids=lambda path: path.stem,
)
def test_a_log_5_percent_faster_through_newer_software_is_accepted_as_unconfirmed(path, tmp_path):
    assert not rules.review(write(tmp_path / path.name, faster(path, 1.0))).is_rejected()
    found = rules.review(write(tmp_path / path.name, faster(path, 1.05)))
    assert [finding for finding in found.findings if not finding.is_warning] == []
    assert "is above the" in found.unconfirmed


@pytest.mark.parametrize(
    ("path", "times"),
    [
        (LEADER, 1.3),
        (H100 / "find-bfloat16-burst-sustained-20261121-065802.jsonl", 1.05),  # 99.5 % of the peak at the clock read
    ],
)
def test_a_log_faster_than_physics_is_refused(tmp_path, path, times):
    found = rules.review(write(tmp_path / path.name, faster(path, times)))
    assert "implausible" in {finding.rule for finding in found.findings if not finding.is_warning}
    assert found.unconfirmed == ""


@pytest.fixture
def folder(tmp_path):
    """A results folder with finds of the H200 on several cards."""
    root = tmp_path / "results"
    shutil.copytree(H200, root / "nvidia-h200", ignore=lambda _, names: [n for n in names if not is_kept(n)])
    (root / "README.md").touch()
    return root


def is_kept(name):
    return name in (LEADER.name, "find-bfloat16-burst-sustained-20261122-000557.jsonl")


def page_of(root):
    held = collect(root, sorted(root.rglob("*.jsonl")))
    ranked, _, apart = results_page(held).partition("## Unconfirmed")
    return ranked, apart, contributed_csv(held.ceilings)


def test_an_unconfirmed_figure_stands_apart_until_a_second_card_confirms_it(folder, run):
    name = "find-bfloat16-burst-sustained-20261122-233019.jsonl"
    records = faster(LEADER, 1.05)
    records[0]["started"] = records[0]["started"].replace("T02:30:19", "T23:30:19")
    for record in records:
        if "time" in record:
            record["time"] = record["time"].replace("T02:", "T23:")
    new = write(folder / "nvidia-h200" / name, records)
    reviews = {each.path: each for each in rules.review_results(folder, sorted(folder.rglob("*.jsonl")))}
    assert not any(each.is_rejected() for each in reviews.values())
    assert reviews[new].unconfirmed.startswith("bfloat16, burst: 913.9")
    code, out, _ = run("results", "check", str(folder))
    assert code == 0
    assert f"{new}: unconfirmed: bfloat16, burst: 913.9" in out
    assert "with unconfirmed figures" in out.splitlines()[-1]
    listed = json.loads(run("results", "check", str(folder), "--format", "json")[1])["logs"]
    assert [each["accepted"] for each in listed if each["unconfirmed"] and each["path"] == str(new)] == [True]

    ranked, apart, ceilings = page_of(folder)
    assert name not in ranked and name in apart and name not in ceilings

    second = faster(LEADER, 1.0495, card="0123456789ab")
    write(new.with_stem(f"{new.stem}-2"), second)
    ranked, apart, ceilings = page_of(folder)
    assert name in ranked and name not in apart and name in ceilings
