"""Test collectives: sizes and bandwidth as nccl-tests defines them, and the verification of results on every rank."""

import pytest
import torch
import torch.distributed
from forked import forked

from mamf.engine.regimes.base import CheckedKernel, WrongResultError
from mamf.errors import UnknownNameError, UsageError
from mamf.operations import collective_kernels
from mamf.operations.collective import COLLECTIVE_NAMES, CollectiveProblem, CollectiveShape
from mamf.operations.collective_kernels import TorchDistributed
from mamf.plugins.discovery import open_backend
from mamf.testing.simulated_kernels import SimulatedCollective

MIB = 2**20
CALLS = collective_kernels.make_collective_launchers


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [("all_reduce", 2, 1.0), ("all_reduce", 8, 1.75), ("all_gather", 4, 0.75), ("reduce_scatter", 8, 0.875)],
)
def test_bus_bandwidth_is_by_the_formulas_of_nccl_tests(collective, ranks, factor):
    work = CollectiveProblem(collective, ranks).compute_work(CollectiveShape(64 * MIB))
    assert work.amount == factor * 64 * MIB
    assert work.unit == "TB/s"
    assert f"n = {ranks}" in work.counting_convention


@pytest.mark.parametrize("collective", COLLECTIVE_NAMES)
def test_every_rank_has_an_equal_part_whatever_their_number(collective):
    kernel, problem, shape = SimulatedCollective(), CollectiveProblem(collective, 3), CollectiveShape(MIB)
    most = max(problem.count_buffer_elements(shape))
    assert (most, most % 3) == (MIB // 2 - 2, 0)
    assert problem.compute_work(shape).nbytes == (4 if collective == "all_reduce" else 2) * most // 3 * 2
    assert "3 equal parts" in kernel.explain_unsupported_shape(problem, CollectiveShape(5))
    assert kernel.explain_unsupported_shape(problem, CollectiveShape(6)) is None


def test_what_means_nothing_is_refused():
    with pytest.raises(UsageError):
        CollectiveProblem(ranks=1)
    with pytest.raises(UnknownNameError, match="did you mean 'all_reduce'"):
        CollectiveProblem("all_reduces")


def test_a_process_that_is_no_rank_is_told_what_to_run(run):
    assert TorchDistributed().explain_unavailability(open_backend("cpu")) is not None
    code, _, told = run("sweep", "--operation", "collective", "--backend", "cpu")
    assert code == 2
    assert "run 'mamf overlap'" in told


def status(kernel, collective):
    """Return the status of a row on this rank after the verification of a collective."""
    backend = open_backend("cpu")
    problem, shape = CollectiveProblem(collective, 2, "float32"), CollectiveShape(4096)
    checked = CheckedKernel(kernel.prepare(backend, problem, shape, backend.make_operand_pool("normal", 0)))
    try:
        checked.warm_up_and_verify(backend)
        checked.change_operands_and_poison_outputs()
        checked.launches[0]()
        checked.verify_last_outputs()
    except WrongResultError:
        return "wrong_result"
    return "ok"


def all_but_the_last(sent, received):
    honest = CALLS(sent[:-2], received[:-2])
    return {**CALLS(sent, received), "all_to_all": honest["all_to_all"]}


def spoilt_by_one(sent, received):
    honest = CALLS(sent, received)["all_gather"]

    def call():
        honest()
        if torch.distributed.get_rank() == 1:
            received[5] += 1

    return {"all_gather": call, "all_reduce": lambda: None}


def of_rank(rank, store):
    """Return the status of each collective on one rank, and the status of three faulty ones.

    The faulty ones leave out the last elements, change one element on one rank, and do nothing.
    """
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(store), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    kernel = TorchDistributed()
    found = {collective: status(kernel, collective) for collective in COLLECTIVE_NAMES}
    collective_kernels.make_collective_launchers = all_but_the_last
    found["all but the last"] = status(kernel, "all_to_all")
    collective_kernels.make_collective_launchers = spoilt_by_one
    found["one rank spoils"] = status(kernel, "all_gather")
    found["does nothing"] = status(kernel, "all_reduce")
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    store = tmp_path_factory.mktemp("ranks") / "store"
    return forked(lambda rank: of_rank(rank, store), [{}, {}])


def test_two_ranks_verify_every_collective(two_ranks):
    for found in two_ranks:
        assert {name: found[name] for name in COLLECTIVE_NAMES} == dict.fromkeys(COLLECTIVE_NAMES, "ok")


def test_what_one_rank_finds_wrong_is_wrong_for_all(two_ranks):
    for name in ("all but the last", "one rank spoils", "does nothing"):
        assert [found[name] for found in two_ranks] == ["wrong_result"] * 2, name
