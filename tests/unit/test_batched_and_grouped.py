"""Test the minimum bytes that a matmul moves, and how grouped matmuls distribute tokens over experts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamf.operations.grouped import GroupedProblem, GroupedShape
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape

experts = st.integers(1, 300)
routings = st.sampled_from(["balanced", "skewed"])


@pytest.mark.parametrize(("dtype", "out_dtype", "size"), [("bfloat16", "bfloat16", 2), ("float64", "float64", 8)])
def test_bytes_are_those_of_operands_and_result_and_no_others(dtype, out_dtype, size):
    work = MatmulProblem(dtype, out_dtype).compute_work(MatmulShape(1, 3, 5))
    assert work.nbytes == (5 + 15 + 3) * size
    assert MatmulProblem("int8", "int32").compute_work(MatmulShape(1, 3, 5)).nbytes == 5 + 15 + 3 * 4


# -- tokens per expert -------------------------------------------------------------------------------------------------


@given(experts, st.integers(1, 100_000), routings, st.integers(0, 9))
def test_every_token_falls_to_one_expert(count, tokens, routing, seed):
    given_out = GroupedProblem(routing=routing, seed=seed).count_tokens_by_expert(GroupedShape(count, tokens, 8, 8))
    assert len(given_out) == count
    assert sum(given_out) == tokens
    assert min(given_out) >= 0


@given(experts, st.integers(1, 100_000))
def test_balanced_experts_differ_by_a_token_at_most(count, tokens):
    given_out = GroupedProblem().count_tokens_by_expert(GroupedShape(count, tokens, 8, 8))
    assert max(given_out) - min(given_out) <= 1


def test_skewed_experts_follow_zipfs_law_and_the_seed():
    shape = GroupedShape(4, 25, 8, 8)
    by_seed = [GroupedProblem(routing="skewed", seed=seed).count_tokens_by_expert(shape) for seed in range(3)]
    assert {tuple(sorted(each, reverse=True)) for each in by_seed} == {(12, 6, 4, 3)}
    assert len(set(by_seed)) == 3


def test_weights_of_experts_without_tokens_are_not_read():
    busy, idle = GroupedShape(4, 4, 16, 8), GroupedShape(6, 4, 16, 8)
    assert GroupedProblem().compute_work(busy) == GroupedProblem().compute_work(idle)
    assert GroupedProblem().compute_work(busy).nbytes == 2 * (4 * 8 + 4 * 16 * 8 + 4 * 16)
    assert GroupedProblem().compute_work(busy).flop == 2 * 4 * 16 * 8
