"""Products beside other work: what each loses while both run, against a device that slows them by planted shares."""

import math

import pytest
from two_queues import ASIDE, OWN, SimulatedPair, TwoQueues

from mamf.engine.strategies.overlap import Overlapping, overlapping
from mamf.operations.overlap.operation import OverlapProblem, OverlapShape

LARGE, DECODE = "8192x8192x8192", "16x8192x8192"


def rows_of(other, shape, device=None, pair=None, **options):
    problem = OverlapProblem(other, ranks=2)
    cells = [(problem, OverlapShape.parse(shape))]
    run = Overlapping(device or TwoQueues(), pair or SimulatedPair(), cells, 0.3, **options)
    return {(row.problem.timed, row.problem.alone): row for row in run.results()}


def kept(rows, timed):
    """The share of its rate that a work keeps, and half the width of its interval."""
    alone, together = rows[timed, True], rows[timed, False]
    share = together.best_rate / alone.best_rate
    return share, share * math.hypot(alone.relative_half_width, together.relative_half_width)


@pytest.mark.parametrize("shape", [f"{LARGE}+1GiB", f"{LARGE}+64MiB", f"{DECODE}+256MiB"])
@pytest.mark.parametrize("other", ["all_reduce", "to_host", "copy"])
def test_each_work_keeps_the_planted_share_of_its_rate(other, shape):
    rows = rows_of(other, shape)
    assert [row.status for row in rows.values()] == ["ok"] * 4
    for timed, planted in (("products", TwoQueues.kept[OWN]), ("other", TwoQueues.kept[ASIDE])):
        share, half_width = kept(rows, timed)
        assert abs(share - planted) <= half_width < 0.02


def test_a_host_that_is_late_gives_no_figure():
    rows = rows_of("copy", f"{LARGE}+1MiB")
    assert [row.status for row in rows.values()] == ["unsupported"] * 4
    assert "the host queues these launches too slowly" in rows["products", False].reason


def test_only_blocks_within_the_overlap_count():
    """The first work runs alone from 6 on, at twice the rate; a mean over all of it would be 1.4."""
    first, other = [0.0, 2.0, 4.0, 6.0, 7.0, 8.0], [1.0, 3.0, 6.5]
    assert overlapping([first, other], [1, 2]) == [2.0, 1.375]
    assert overlapping([[0.0, 1.0], [0.5, 3.0]], [1, 1]) is None
    assert overlapping([[0.0, 2.0, 4.0]], [4]) == [0.5]
