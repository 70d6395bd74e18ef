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
make_correct_launchers = collective_kernels.make_collective_launchers


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [("all_reduce", 2, 1.0), ("all_reduce", 8, 1.75), ("all_gather", 4, 0.75), ("reduce_scatter", 8, 0.875)],
)
def test_bus_bandwidth_follows_the_formulas_of_nccl_tests(collective, ranks, factor):
    work = CollectiveProblem(collective, ranks).compute_work(CollectiveShape(64 * MIB))
    assert work.amount == factor * 64 * MIB
    assert work.unit == "TB/s"
    assert f"n = {ranks}" in work.counting_convention


@pytest.mark.parametrize("collective", COLLECTIVE_NAMES)
def test_every_rank_has_an_equal_part_whatever_their_number(collective):
    kernel, problem, shape = SimulatedCollective(), CollectiveProblem(collective, 3), CollectiveShape(MIB)
    element_count = max(problem.count_buffer_elements(shape))
    assert (element_count, element_count % 3) == (MIB // 2 - 2, 0)
    assert problem.compute_work(shape).nbytes == (4 if collective == "all_reduce" else 2) * element_count // 3 * 2
    assert "3 equal parts" in kernel.explain_unsupported_shape(problem, CollectiveShape(5))
    assert kernel.explain_unsupported_shape(problem, CollectiveShape(6)) is None


def test_a_single_rank_and_an_unknown_collective_are_refused():
    with pytest.raises(UsageError):
        CollectiveProblem(ranks=1)
    with pytest.raises(UnknownNameError, match="did you mean 'all_reduce'"):
        CollectiveProblem("all_reduces")


def test_a_process_without_a_process_group_is_referred_to_mamf_overlap(run):
    assert TorchDistributed().explain_unavailability(open_backend("cpu")) is not None
    code, _, err = run("sweep", "--operation", "collective", "--backend", "cpu")
    assert code == 2
    assert "run 'mamf overlap'" in err


def verify_collective(kernel, collective):
    """Return the status of a row on this rank after the verification of a collective."""
    backend = open_backend("cpu")
    problem, shape = CollectiveProblem(collective, 2, "float32"), CollectiveShape(4096)
    checked_kernel = CheckedKernel(kernel.prepare(backend, problem, shape, backend.make_operand_pool("normal", 0)))
    try:
        checked_kernel.warm_up_and_verify(backend)
        checked_kernel.change_operands_and_poison_outputs()
        checked_kernel.launches[0]()
        checked_kernel.verify_last_outputs()
    except WrongResultError:
        return "wrong_result"
    return "ok"


def make_launchers_that_omit_the_last_elements(sent, received):
    correct = torch.empty_like(received)
    run_all_to_all = make_correct_launchers(sent, correct)["all_to_all"]

    def run_all_to_all_without_the_last_element_of_each_part():
        run_all_to_all()
        received.view(2, -1)[:, :-1] = correct.view(2, -1)[:, :-1]

    return {"all_to_all": run_all_to_all_without_the_last_element_of_each_part}


def make_launchers_that_one_rank_spoils(sent, received):
    run_all_gather = make_correct_launchers(sent, received)["all_gather"]

    def run_all_gather_and_spoil():
        run_all_gather()
        if torch.distributed.get_rank() == 1:
            received[5] += 1

    return {"all_gather": run_all_gather_and_spoil, "all_reduce": lambda: None}


def verify_on_rank(rank, store):
    """Return the status of each collective on one rank, and the status of three faulty ones.

    The faulty ones leave out the last element of each part, change one element on one rank, and do nothing.
    """
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(store), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    kernel = TorchDistributed()
    statuses = {collective: verify_collective(kernel, collective) for collective in COLLECTIVE_NAMES}
    collective_kernels.make_collective_launchers = make_launchers_that_omit_the_last_elements
    statuses["all but the last"] = verify_collective(kernel, "all_to_all")
    collective_kernels.make_collective_launchers = make_launchers_that_one_rank_spoils
    statuses["one rank spoils"] = verify_collective(kernel, "all_gather")
    statuses["does nothing"] = verify_collective(kernel, "all_reduce")
    return statuses


@pytest.fixture(scope="module")
def statuses_by_rank(tmp_path_factory):
    store = tmp_path_factory.mktemp("ranks") / "store"
    return forked(lambda rank: verify_on_rank(rank, store), [{}, {}])


def test_two_ranks_verify_every_collective(statuses_by_rank):
    for statuses in statuses_by_rank:
        assert {name: statuses[name] for name in COLLECTIVE_NAMES} == dict.fromkeys(COLLECTIVE_NAMES, "ok")


def test_a_wrong_result_on_one_rank_is_wrong_on_all_ranks(statuses_by_rank):
    for name in ("all but the last", "one rank spoils", "does nothing"):
        assert [statuses[name] for statuses in statuses_by_rank] == ["wrong_result"] * 2, name
