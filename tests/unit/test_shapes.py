"""Test which ranges of sizes ``parse_range`` accepts, and which sizes it returns."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamf.errors import UsageError
from mamf.operation import parse_range


@pytest.mark.parametrize("bounds", [(0, 10, -1), (0, 10, 0), (-256, 1024, 256), (512, 512, 256), (0, 256, 256)])
def test_a_range_that_makes_no_sense_is_refused(bounds):
    with pytest.raises(UsageError, match=f"range {bounds[0]} {bounds[1]} {bounds[2]}"):
        parse_range(*bounds)


@given(st.integers(0, 5000), st.integers(1, 20000), st.integers(1, 600))
def test_the_sizes_of_a_range_are_one_step_apart_and_below_the_stop(start, stop, step):
    try:
        sizes = parse_range(start, stop, step)
    except UsageError:
        assert (start or step) >= stop
        return
    assert all(0 < size < stop for size in sizes)
    assert all(later - earlier == step for earlier, later in itertools.pairwise(sizes))
