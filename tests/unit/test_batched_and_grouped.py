"""Test the work of plain, batched and grouped matmuls, and how grouped matmuls distribute tokens over experts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamf.operations.batched import BatchedProblem, BatchedShape
from mamf.operations.grouped import GroupedProblem, GroupedShape
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape

expert_counts = st.integers(1, 300)
routings = st.sampled_from(["balanced", "skewed"])


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "element_bytes"), [("bfloat16", "bfloat16", 2), ("float64", "float64", 8)]
)
def test_bytes_count_each_operand_and_the_result_once(dtype, out_dtype, element_bytes):
    work = MatmulProblem(dtype, out_dtype).compute_work(MatmulShape(1, 3, 5))
    assert work.nbytes == (5 + 15 + 3) * element_bytes
    assert MatmulProblem("int8", "int32").compute_work(MatmulShape(1, 3, 5)).nbytes == 5 + 15 + 3 * 4


def test_a_batch_has_the_work_of_its_matmuls():
    batch = BatchedProblem("bfloat16", "bfloat16").compute_work(BatchedShape(7, 2, 3, 5))
    assert batch.nbytes == 7 * 2 * (2 * 5 + 3 * 5 + 2 * 3)
    assert batch.flop == 7 * 2 * 2 * 3 * 5


# -- tokens per expert -------------------------------------------------------------------------------------------------


@given(expert_counts, st.integers(1, 100_000), routings, st.integers(0, 9))
def test_every_token_goes_to_one_expert(expert_count, tokens, routing, seed):
    token_counts = GroupedProblem(routing=routing, seed=seed).count_tokens_by_expert(
        GroupedShape(expert_count, tokens, 8, 8)
    )
    assert len(token_counts) == expert_count
    assert sum(token_counts) == tokens
    assert min(token_counts) >= 0


@given(expert_counts, st.integers(1, 100_000))
def test_balanced_experts_differ_by_a_token_at_most(expert_count, tokens):
    token_counts = GroupedProblem().count_tokens_by_expert(GroupedShape(expert_count, tokens, 8, 8))
    assert max(token_counts) - min(token_counts) <= 1


def test_skewed_experts_follow_zipfs_law_and_the_seed():
    shape = GroupedShape(4, 25, 8, 8)
    by_seed = [GroupedProblem(routing="skewed", seed=seed).count_tokens_by_expert(shape) for seed in range(3)]
    assert {tuple(sorted(token_counts, reverse=True)) for token_counts in by_seed} == {(12, 6, 4, 3)}
    assert len(set(by_seed)) == 3


def test_weights_of_experts_without_tokens_are_not_read():
    all_busy, two_idle = GroupedShape(4, 4, 16, 8), GroupedShape(6, 4, 16, 8)
    assert GroupedProblem().compute_work(all_busy) == GroupedProblem().compute_work(two_idle)
    assert GroupedProblem().compute_work(all_busy).nbytes == 2 * (4 * 8 + 4 * 16 * 8 + 4 * 16)
    assert GroupedProblem().compute_work(all_busy).flop == 2 * 4 * 16 * 8
