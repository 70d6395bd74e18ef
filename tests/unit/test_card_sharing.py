"""Test how logs and reports mark a shared card. The mark is part of the device's name, so that no reader mistakes the
figures for those of a whole card.
"""

import copy
import json

import pytest
from contribution_logs import found, write

from mamf.backend import add_sharing_to_name, parse_sharing_ways
from mamf.contribution.collection import collect_rates
from mamf.contribution.review import review_log
from mamf.errors import IncomparableError
from mamf.logs.compare import compare_logs
from mamf.logs.run_log import read_run_log
from mamf.testing import SimulatedBackend

SIMULATED = "mamf.testing:SimulatedBackend", "mamf.testing:SimulatedMatmul"
SWEEP = ("sweep", "--backend", SIMULATED[0], "--kernel", SIMULATED[1], "--shapes", "2048x2048x2048")


def mark_as_shared_at_start(records):
    records[0]["device"]["name"] = add_sharing_to_name(records[0]["device"]["name"], ["MIG 3g.40gb"])


def mark_as_shared_at_end(records):
    records[-1]["shared_after"] = ["other processes"]


@pytest.fixture(params=[mark_as_shared_at_start, mark_as_shared_at_end])
def logs(request, sweep_records, tmp_path):
    """Return the paths of two logs: one of a whole card, and a copy that says that the card was shared."""
    records = copy.deepcopy(sweep_records)
    request.param(records)
    return write(tmp_path / "whole.jsonl", sweep_records), write(tmp_path / "shared.jsonl", records)


def test_a_review_rejects_a_log_of_a_shared_card_and_says_why(logs):
    whole, shared = logs
    assert found(whole) == set()
    assert found(shared) == {"shared-card"}
    (finding,) = [each for each in review_log(shared).findings if not each.is_warning]
    assert "measure again while nothing else uses the card" in finding.message


def test_no_table_ranks_a_shared_card(logs):
    whole_card_rates, shared_card_rates = (collect_rates(read_run_log(path), path) for path in logs)
    assert whole_card_rates
    assert not shared_card_rates


def test_a_comparison_with_a_whole_card_is_refused_or_says_so(logs):
    whole, shared = map(read_run_log, logs)
    with pytest.raises(IncomparableError, match=r"\(shared: "):
        compare_logs(whole, shared)
    assert "(shared: " in str(compare_logs(whole, shared, anyway=True).overridden_differences[0])


@pytest.mark.parametrize("format_option", ["--format=table", "--format=markdown"])
def test_a_report_says_that_the_card_is_shared_and_shows_no_share_of_a_peak(logs, format_option, run):
    for path, is_shared in zip(logs, (False, True), strict=True):
        _, out, _ = run("show", str(path), format_option)
        assert ("the card is shared (" in out) == is_shared
        assert ("dense bf16 peak" in out) != is_shared


def test_sharing_that_is_found_after_the_last_row_is_recorded_and_reported(run, tmp_path, monkeypatch):
    launch_counts = []
    monkeypatch.setattr(
        SimulatedBackend,
        "find_sharing_ways",
        lambda self: launch_counts.append(self.launch_count) or ("other processes",),
    )
    log = tmp_path / "log.jsonl"
    code, out, err = run(*SWEEP, "--output", str(log))
    assert code == 0
    # Unlike TorchBackend, SimulatedBackend does not call the method when it opens the device.
    (launch_count,) = launch_counts
    assert launch_count
    assert json.loads(log.read_text().splitlines()[-1])["shared_after"] == ["other processes"]
    for text in (out, err):
        assert "the card is shared (other processes)" in text
    assert parse_sharing_ways(read_run_log(log).header["device"]["name"]) == ("other processes",)


def test_a_device_that_cannot_find_its_sharing_does_not_end_the_run(run, tmp_path, monkeypatch):
    def fail(self):
        raise RuntimeError("device lost")

    monkeypatch.setattr(SimulatedBackend, "find_sharing_ways", fail)
    log = tmp_path / "log.jsonl"
    assert run(*SWEEP, "--output", str(log))[0] == 0
    assert "shared_after" not in json.loads(log.read_text().splitlines()[-1])
