"""Test the standard deviation and the interval of the median."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamf.statistics import (
    compute_median_interval,
    compute_standard_deviation,
)

samples = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=60)


@given(samples)
def test_the_interval_contains_the_median_and_stays_within_the_samples(values):
    interval = compute_median_interval(values)
    assert min(values) <= interval.low <= statistics.median(values) <= interval.high <= max(values)
    assert 0 <= interval.coverage <= 1


@given(samples)
def test_a_standard_deviation_in_floats_is_the_exact_one(values):
    exact = statistics.stdev(values) if len(values) > 1 else 0.0
    assert compute_standard_deviation(values) == pytest.approx(exact, rel=1e-9, abs=1e-12)


# The rank of the sample at the lower end of a two-sided 95 % interval of the median, from table J.11 of Hahn & Meeker,
# Statistical Intervals, 2017.
@pytest.mark.parametrize(("count", "rank"), [(6, 1), (8, 1), (9, 2), (12, 3), (20, 6), (50, 18), (100, 40)])
def test_the_interval_takes_the_tabulated_order_statistics(count, rank):
    interval = compute_median_interval(range(1, count + 1))
    assert (interval.low, interval.high) == (rank, count + 1 - rank)
    assert interval.coverage >= 0.95


@pytest.mark.parametrize(("count", "coverage"), [(1, 0.0), (2, 0.5), (3, 0.75), (5, 0.9375)])
def test_too_few_samples_give_their_range_and_say_what_it_covers(count, coverage):
    interval = compute_median_interval(range(count))
    assert (interval.low, interval.high, interval.coverage) == (0, count - 1, coverage)


def test_the_interval_covers_the_true_median_as_often_as_it_says():
    random_source = random.Random(1)
    covered_count = 0
    for _ in range(2000):
        interval = compute_median_interval([random_source.lognormvariate(0, 1) for _ in range(20)])
        covered_count += interval.low <= 1.0 <= interval.high
    assert 0.94 <= covered_count / 2000 <= 0.98  # the theory says 95.9 %


@pytest.mark.parametrize("count", [9_999, 10_000, 10_001, 12_345])
def test_ranks_of_many_samples_are_those_of_the_binomial_distribution(count):
    interval = compute_median_interval(range(count))
    assert 1.94 < (count - 1 - 2 * interval.low) / math.sqrt(count) < 2.0
    binomial_sum, term = 0, 1
    for number in range(interval.low + 1):
        binomial_sum += term
        term = term * (count - number) // (number + 1)
    assert interval.coverage == pytest.approx(1 - 2 * binomial_sum / 2**count, abs=1e-5)
    assert interval.coverage >= 0.95


def test_a_million_equal_samples_have_an_interval():
    interval = compute_median_interval([1e-3] * 10**6)
    assert (interval.low, interval.high) == (1e-3, 1e-3)
    assert interval.coverage == pytest.approx(0.95, abs=1e-3)
