"""Test ceilings: what confirms them, how a search finds them in virtual time, and the command ``mamf find``."""

import csv
import dataclasses
import json
import os
import re
import signal
import statistics
from collections import Counter

import library
import pytest
from bench_search import EDGES
from hypothesis import given
from hypothesis import strategies as st
from made_plans import search_plan
from made_rates import contributed
from refusals import assert_refused

import mamf
from mamf.ceilings.ceiling import MIN_CONFIRMING_ROUNDS, Ceiling, find_confirmed_ceiling
from mamf.engine.runner import RunSetup
from mamf.engine.search.grid import plan_search
from mamf.engine.search.strategy import GridSearchStrategy
from mamf.errors import DeviceError, IncomparableError, UnsupportedError, UsageError
from mamf.logs.records import make_ceiling_record, read_ceiling_record
from mamf.logs.run_log import read_run_log
from mamf.measurement import Conditions, Measurement
from mamf.operations.matmul.shapes import MatmulGrid, MatmulProblem, MatmulShape
from mamf.plugins import discovery
from mamf.report.ceilings import describe_ceiling_accuracy
from mamf.statistics import Interval, Repeatability, summarize_samples
from mamf.testing import Physics, SimulatedBackend, SimulatedMatmul

KERNEL = "simulated.mm"
PHYSICS = Physics()
BACKEND = ["--backend", "mamf.testing:SimulatedBackend"]
SIMULATED = [*BACKEND, "--kernel", "mamf.testing:SimulatedMatmul"]
SIZES = tuple(range(2560, 20481, 2560))
GRID = MatmulGrid(SIZES, SIZES, SIZES, most_flop=9.7e12)
A, B, C = (MatmulShape(4096, 4096, k) for k in (1024, 2048, 4096))


# -- ceilings --------------------------------------------------------------------------------------------------------


def make_row(shape, tflops, round_number, kernel=KERNEL, phase="confirm"):
    """Return a row in which every sample has the rate ``tflops``."""
    samples = (shape.flop / tflops / 1e12,) * 3
    return Measurement(
        shape, kernel, MatmulProblem(), "burst", "median", "ok", "", summarize_samples(samples), samples,
        launch_count=3, phase=phase, round_number=round_number,
    )  # fmt: skip


def make_rows(shape, figures, **fields):
    return [make_row(shape, tflops, round_number, **fields) for round_number, tflops in enumerate(figures, 1)]


@pytest.mark.parametrize("rounds", range(MIN_CONFIRMING_ROUNDS))
def test_nothing_is_confirmed_before_there_were_enough_rounds(rounds):
    assert find_confirmed_ceiling(make_rows(A, [700.0] * rounds), "card") is None


def test_a_candidate_that_dropped_out_neither_wins_nor_ties():
    ceiling = find_confirmed_ceiling([*make_rows(A, [700] * 9), *make_rows(B, [710, 690, 710])], "card")
    assert (ceiling.shape, ceiling.tied_candidates) == (A, ())


def test_candidates_that_the_rounds_cannot_tell_apart_are_tied():
    close_rates, lower_rates = [699, 702, 698, 701, 699, 701], [697] * 6
    ceiling = find_confirmed_ceiling(
        [*make_rows(A, [700] * 6), *make_rows(B, close_rates), *make_rows(C, lower_rates)], "card"
    )
    assert {ceiling.shape, *(shape for shape, _ in ceiling.tied_candidates)} == {A, B}


def test_a_candidate_that_is_faster_than_the_winner_in_confirming_rounds_is_tied():
    choosing_rows = [*make_rows(A, [701] * 6, phase="choose"), *make_rows(B, [700] * 6, phase="choose")]
    ceiling = find_confirmed_ceiling([*choosing_rows, *make_rows(A, [700] * 6), *make_rows(B, [702] * 6)], "card")
    assert (ceiling.shape, ceiling.tied_candidates) == (A, ((B, KERNEL),))


@given(st.lists(st.floats(0.9, 1.1), min_size=6, max_size=12))
def test_drift_that_all_candidates_share_in_a_round_does_not_hide_who_is_faster(drift):
    faster_rates, slower_rates = ([share * rate for share in drift] for rate in (700, 699))
    ceiling = find_confirmed_ceiling([*make_rows(A, faster_rates), *make_rows(B, slower_rates)], "card")
    assert (ceiling.shape, ceiling.tied_candidates) == (A, ())


@given(st.lists(st.lists(st.floats(1, 1000), min_size=3, max_size=9), min_size=1, max_size=3))
def test_the_interval_contains_the_rate_and_no_finalist_is_faster(rates_by_shape):
    rows = [row for shape, rates in zip((A, B, C), rates_by_shape, strict=False) for row in make_rows(shape, rates)]
    ceiling = find_confirmed_ceiling(rows, "card")
    max_round_count = max(map(len, rates_by_shape))
    assert ceiling.interval.low <= ceiling.tflops <= ceiling.interval.high
    assert ceiling.tflops == pytest.approx(
        max(statistics.median(rates) for rates in rates_by_shape if len(rates) >= max_round_count - 1)
    )


class SlowedMatmul(SimulatedMatmul):
    """A matmul that takes ``slowdown`` times as long, because another process uses the device."""

    slowdown = 1.0

    def make_launch_function(self, device, problem, shape):
        return lambda key: device.launch_compute(device.compute_matmul_cycles(shape) * self.slowdown, key)


@pytest.mark.parametrize(
    ("phase", "slowdown_before", "slowdown_after", "is_known"),
    [
        ("burst: measuring the fastest again", 1.0, 1.3, False),
        ("burst: measuring the fastest again", 1.0, 1.03, True),
        ("burst: comparing the fastest shapes and kernels", 3.0, 1.0, True),
    ],
)
def test_a_ceiling_that_was_confirmed_on_a_busy_device_has_an_unknown_interval(
    phase, slowdown_before, slowdown_after, is_known
):
    kernel = SlowedMatmul()
    kernel.slowdown = slowdown_before
    find = make_default_find(kernels=[kernel])

    def report_phase(text):
        kernel.slowdown = slowdown_after if text == phase else kernel.slowdown

    find.report_phase = report_phase
    rows = run_find(find)
    ceiling = find.ceilings["burst"]
    assert ceiling.interval.is_known == is_known
    header = {"device": {"name": "card", "compute_units": None}}
    assert (
        any(
            "something probably slowed the device during the others" in line
            for line in describe_ceiling_accuracy(ceiling, rows, header)
        )
        != is_known
    )
    assert write_and_read_ceiling(ceiling).interval.is_known == is_known


def make_ceiling(regime):
    subject = {"device": "card", "problem": MatmulProblem(), "regime": regime, "kernel": KERNEL, "shape": A}
    rate_fields = {"rate": 800.0, "interval": Interval(792.0, 808.0, 0.96), "round_count": 9, "gain_over_default": 0.05}
    tied_candidates = ((B, KERNEL), (A, "lib[3]"))
    return Ceiling(
        **subject,
        **rate_fields,
        tied_candidates=tied_candidates,
        conditions=Conditions(watts=640.0),
        repeatability=Repeatability(0.002),
    )


def test_utilization_is_a_share_within_one_regime():
    ceiling = make_ceiling("burst")
    assert ceiling.compute_utilization(flop=400e12, seconds=1.0, regime="burst") == pytest.approx(0.5)
    assert ceiling.compute_utilization(flop=400e12, seconds=2.0, regime="burst") == pytest.approx(0.25)
    with pytest.raises(
        IncomparableError, match="regime sustained cannot be compared with a ceiling in the regime burst"
    ):
        ceiling.compute_utilization(flop=400e12, seconds=1.0, regime="sustained")


HEADER = {"device": {"name": "card", "uuid_hash": None}, "plan": {"problem": dataclasses.asdict(MatmulProblem())}}


def write_and_read_ceiling(ceiling):
    return read_ceiling_record(json.loads(json.dumps(make_ceiling_record(ceiling))), HEADER)


@pytest.mark.parametrize("regime", ["burst", "sustained"])
def test_a_ceiling_is_read_from_a_log_as_it_was_written(regime):
    assert write_and_read_ceiling(make_ceiling(regime)) == make_ceiling(regime)


@pytest.mark.parametrize(
    ("regime", "run_share", "launch_seconds"), [("burst", 0.0016, 1.2e-7), ("sustained", 0.0012, 3.2e-7)]
)
def test_the_interval_of_an_old_ceiling_is_widened_by_the_differences_of_runs(regime, run_share, launch_seconds):
    old = dataclasses.replace(make_ceiling(regime), interval=Interval(799.2, 800.8, 0.95), repeatability=None)
    read = write_and_read_ceiling(old)
    assert (read.rate, read.interval.coverage, read.repeatability.run) == (800.0, 0.95, run_share)
    # The interval of one more run: the variance of two runs, each with the standard error of the rounds.
    run_variance = run_share**2 + (launch_seconds / read.seconds) ** 2 + (0.001 / 1.96) ** 2
    assert read.interval.half_width / 800.0 == pytest.approx(1.96 * (2 * run_variance) ** 0.5, rel=0.01)


# -- searching -------------------------------------------------------------------------------------------------------


class Find(RunSetup):
    """A search in virtual time that keeps the rows that it yields."""

    def yield_results(self):
        self.strategy = GridSearchStrategy(self)
        for row in self.strategy.yield_results():
            self.rows.append(row)
            yield row

    @property
    def ceilings(self):
        return {regime: ceiling for (_, regime), ceiling in self.confirmed_ceilings.items()}


def make_find(plan, kernels, backend, previous_rows=()):
    return Find(plan, backend, list(zip(plan.kernels, kernels, strict=True)), list(previous_rows))


def make_default_find(backend=None, kernels=None, previous_rows=(), seed=0, **fields):
    """Return a search that, by default, is limited only by its counts and not by its budget."""
    kernels = kernels or [SimulatedMatmul()]
    names = tuple(kernel.name for kernel in kernels)
    defaults = {"regimes": ("burst",), "budget_seconds": 600.0, "scouts": 24, "refinements": 36}
    plan = search_plan(MatmulProblem(seed=seed), names, GRID, **defaults | fields)
    return make_find(plan, kernels, backend or SimulatedBackend(seed=seed), previous_rows)


def run_find(find):
    return list(find.yield_results())


def compute_highest_tflops(physics=PHYSICS, longest_k=SIZES[-1]):
    """Return the highest TFLOPS of the simulated device: the rate of a shape with full waves and the longest K."""
    flop_per_cycle = physics.compute_units * physics.flop_per_cycle_per_unit * physics.matmul_peak_share
    return flop_per_cycle * physics.boost_clock_hz * longest_k / (longest_k + 200) / 1e12


def select_confirming_rows(rows, regime):
    return [row for row in rows if row.phase == "confirm" and row.regime == regime]


def select_final_rows(rows, regime):
    """Return the rows of the choosing and the confirming rounds."""
    return [row for row in rows if row.phase in ("choose", "confirm") and row.regime == regime]


@pytest.mark.parametrize("seed", range(3))
def test_the_burst_ceiling_is_within_half_a_percent_of_the_best_there_is(seed):
    find = make_default_find(seed=seed, scouts=48, refinements=72)
    run_find(find)
    ceiling = find.ceilings["burst"]
    assert 0.995 * compute_highest_tflops() <= ceiling.tflops <= 1.002 * compute_highest_tflops()
    assert ceiling.interval.coverage >= 0.95
    assert (ceiling.device, ceiling.kernel, ceiling.gain_over_default) == ("Simulated H100", KERNEL, None)


@pytest.fixture(scope="module")
def thorough(few_shapes):
    """Return a complete search for both ceilings, and its rows."""
    find = make_default_find(regimes=("burst", "sustained"))
    return find, run_find(find)


def test_the_sustained_ceiling_is_that_of_the_power_limit(thorough):
    find, rows = thorough
    ceiling = find.ceilings["sustained"]
    assert ceiling.tflops == pytest.approx(
        compute_highest_tflops() * PHYSICS.capped_clock_hz / PHYSICS.boost_clock_hz, rel=0.005
    )
    assert ceiling.joules_per_tflop == pytest.approx(PHYSICS.power_limit_watts / ceiling.tflops, rel=0.01)
    assert "power cap" in ceiling.conditions.throttle_reasons
    assert next(row.phase for row in rows if row.regime == "sustained") == "visit"


@pytest.mark.parametrize("regime", ["burst", "sustained"])
def test_rows_that_chose_a_candidate_never_confirm_it(thorough, regime):
    find, rows = thorough
    info = find.backend.info
    ceiling = find.ceilings[regime]
    assert ceiling == find_confirmed_ceiling(select_final_rows(rows, regime), info.name, info.uuid_hash, KERNEL)
    winner_rows = [row for row in select_confirming_rows(rows, regime) if row.shape == ceiling.shape]
    assert ceiling.tflops == pytest.approx(statistics.median(row.best_rate for row in winner_rows), rel=2e-3)
    assert ceiling.round_count == len(winner_rows)


@pytest.mark.parametrize("regime", ["burst", "sustained"])
def test_rounds_are_interleaved_and_none_repeats_a_candidate(thorough, regime):
    rows = select_confirming_rows(thorough[1], regime)
    numbers = [row.round_number for row in rows]
    assert numbers == sorted(numbers)
    assert max(Counter((row.round_number, row.shape, row.kernel) for row in rows).values()) == 1
    orders = {
        tuple(row.shape for row in rows if row.round_number == number) for number in range(1, MIN_CONFIRMING_ROUNDS + 1)
    }
    assert len({frozenset(order) for order in orders}) == 1
    assert regime == "sustained" or len(orders) > 1, "the order of candidates must change between rounds"


def test_a_find_repeats_exactly_in_virtual_time(thorough):
    assert run_find(make_default_find(regimes=("burst", "sustained"))) == thorough[1]


class ClockAdvance:
    """A hook that advances the clock when a phase begins.

    The new time is ``seconds_left`` seconds before the budget is used up.
    """

    def __init__(self, find, phase, seconds_left):
        self.find, self.phase, self.seconds_left = find, phase, seconds_left
        find.report_phase = self

    def __call__(self, text):
        backend = self.find.backend
        if text == self.phase:
            backend.host_time = max(backend.host_time, self.find.plan.budget_seconds - self.seconds_left)


@pytest.mark.parametrize("seconds_left", [0.0, 0.25, 0.5])
def test_a_budget_that_ends_within_the_first_round_confirms_nothing(seconds_left):
    find = make_default_find()
    ClockAdvance(find, "burst: measuring the fastest again", seconds_left)
    rows = run_find(find)
    assert find.ceilings == {}
    assert find.strategy.skipped_step_count
    assert {"scout", "refine"} <= {row.phase for row in rows}


# -- resuming a search -----------------------------------------------------------------------------------------------


def test_resuming_a_complete_find_launches_nothing_and_finds_the_same(thorough):
    resumed = make_default_find(regimes=("burst", "sustained"), previous_rows=thorough[1])
    assert run_find(resumed) == []
    assert resumed.backend.launch_count == 0
    assert resumed.ceilings == thorough[0].ceilings


@pytest.mark.parametrize("missing_row_count", [1, 10, 24])
def test_resuming_a_find_that_its_budget_ended_repeats_no_measurement(missing_row_count):
    limited = {"budget_seconds": 8.0, "scouts": 96, "refinements": 132}
    rows = run_find(make_default_find(**limited))
    previous_rows = rows[:-missing_row_count]
    new_rows = run_find(make_default_find(previous_rows=previous_rows, **limited))
    assert not {make_key(row) for row in previous_rows} & {make_key(row) for row in new_rows}
    assert "scout" not in {row.phase for row in new_rows}
    assert len(new_rows) <= missing_row_count + 60, (
        "the resumed search measured more than the missing rows and the final rounds"
    )


@pytest.mark.parametrize("complete_rounds", [[], [1], [1, 2], [1, 2, 3]], ids=str)
def test_a_resumed_round_takes_its_candidates_from_the_rows_and_not_from_the_clock(complete_rounds):
    """Check that a search that was interrupted within a round measures no candidate twice in this round.

    The budget allowed fewer candidates in the second round than in the first. The resumed search must learn from the
    rows which candidates these were: its own clock does not show how much time was left.
    """
    physics = dataclasses.replace(Physics(), compute_units=4, flop_per_cycle_per_unit=4096, memory_bytes=8 * 10**9)
    limited = {"budget_seconds": 110.0, "scouts": 8, "refinements": 8}
    rows = run_find(make_default_find(SimulatedBackend(physics=physics), **limited))
    row_count_by_round = Counter(row.round_number for row in rows if row.phase == "choose")
    assert row_count_by_round[1] > row_count_by_round[2] > 1
    complete_rows = [
        row
        for row in rows
        if row.phase in ("scout", "refine") or (row.phase == "choose" and row.round_number in complete_rounds)
    ]
    previous_rows = rows[: len(complete_rows) + 1]
    new_rows = run_find(make_default_find(SimulatedBackend(physics=physics), previous_rows=previous_rows, **limited))
    count_by_key = Counter(make_key(row) for row in [*previous_rows, *new_rows])
    assert count_by_key.most_common(1)[0][1] == 1


def make_key(row):
    return row.regime, row.phase, row.round_number, row.kernel, row.shape


# -- candidates ------------------------------------------------------------------------------------------------------


class Library(SimulatedMatmul):
    """A library with several algorithms.

    ``shares``: by algorithm, a factor. The algorithm takes as long as a matmul with K times this factor.
    ``broken``: the name of an algorithm that fails, or ``variants`` if the library fails to list its algorithms.
    """

    name = "library"
    shares = {"library[0]": 1.1, "library[1]": 0.95, "library[2]": 1.02}  # noqa: RUF012
    broken = ""

    def __init__(self, name="library"):
        self.name = name

    def list_variants(self, backend, problem, shape):
        if self.broken == "variants":
            raise RuntimeError("the heuristic failed")
        return [Library(name) for name in self.shares]

    def prepare(self, backend, problem, shape, pool, sets=1, rewrite=False):
        if self.broken == self.name:
            raise UnsupportedError("not for this shape")
        as_long = dataclasses.replace(shape, k=round(shape.k * self.shares.get(self.name, 1.1)))
        return super().prepare(backend, problem, as_long, pool, sets, rewrite)


def test_the_ceiling_uses_the_fastest_algorithm_of_a_second_kernel():
    find = make_default_find(kernels=[SimulatedMatmul(), Library()], regimes=("burst", "sustained"))
    rows = run_find(find)
    tried = {row.kernel for row in rows if row.phase == "algorithm"}
    assert tried == set(Library.shares)
    for ceiling in find.ceilings.values():
        assert ceiling.kernel == "library[1]"
    ceiling = find.ceilings["burst"]
    assert ceiling.gain_over_default == pytest.approx(1 / 0.95 - 1, abs=0.005)
    assert ceiling.tflops == pytest.approx(compute_highest_tflops() / 0.95, rel=0.01)


class SmallOutputKernel(SimulatedMatmul):
    """A kernel that is faster than the default where C is small, and slower where the default is fastest."""

    name = "small-output"

    def prepare(self, backend, problem, shape, pool, sets=1, rewrite=False):
        share = 0.93 if shape.m * shape.n < 8000**2 else 1.1
        as_long = dataclasses.replace(shape, k=round(shape.k * share))
        return super().prepare(backend, problem, as_long, pool, sets, rewrite)


def test_shapes_and_kernels_are_chosen_together():
    find = make_default_find(kernels=[SimulatedMatmul(), SmallOutputKernel()], regimes=("burst", "sustained"))
    rows = run_find(find)
    ceiling, default_rows = find.ceilings["burst"], [row for row in rows if row.ok and row.kernel == KERNEL]
    assert ceiling.kernel == "small-output"
    assert ceiling.shape.m * ceiling.shape.n < 8000**2
    assert ceiling.tflops > 1.01 * max(row.best_rate for row in default_rows)
    search_rows = [row for row in rows if row.phase in ("scout", "refine", "algorithm")]
    assert len(search_rows) <= find.plan.options.scouts + find.plan.options.refinements + 10
    assert {row.kernel for row in search_rows if row.phase == "scout"} == {KERNEL, "small-output"}
    # The rounds also measure the default kernel, on the shape of the ceiling and on its own fastest shape.
    assert ceiling.gain_over_default == pytest.approx(1 / 0.93 - 1, abs=0.01)
    best_default_shape = max(default_rows, key=lambda row: row.best_rate).shape
    assert (best_default_shape, KERNEL) in {(row.shape, row.kernel) for row in rows if row.phase == "choose"}


def test_the_report_compares_the_ceiling_with_the_default_kernel():
    fast_rows = [
        *make_rows(A, [800.0] * 3, kernel="triton[x]"),
        *make_rows(A, [790.0] * 3, kernel="triton[x]", phase="choose"),
    ]
    default_rows = [*make_rows(A, [600.0] * 3, phase="choose"), *make_rows(B, [640.0, 650.0, 660.0], phase="choose")]
    scout_rows = make_rows(C, [655.0], phase="scout")
    ceiling = find_confirmed_ceiling([*fast_rows, *default_rows], "card", default_kernel=KERNEL)
    header = {"device": {"name": "card", "compute_units": None}}
    lines = describe_ceiling_accuracy(ceiling, [*scout_rows, *default_rows, *fast_rows], header)
    assert any("triton[x] gains +31.7 % over the default kernel on this shape" in line for line in lines)
    assert f"    the default kernel, {KERNEL}, reaches at most 650.0 TFLOPS @ {B}" in lines
    faster_default_rows = [row for row in default_rows if row.shape != B] + make_rows(B, [801.0] * 3, phase="choose")
    lines = describe_ceiling_accuracy(ceiling, [*scout_rows, *faster_default_rows, *fast_rows], header)
    assert f"    the default kernel, {KERNEL}, is as fast @ {B}" in lines
    default_ceiling = find_confirmed_ceiling([*default_rows, *make_rows(B, [650.0] * 3)], "card", default_kernel=KERNEL)
    assert not any(
        "default" in line for line in describe_ceiling_accuracy(default_ceiling, [*scout_rows, *default_rows], header)
    )


@pytest.mark.parametrize("broken", ["variants", "library[1]"])
def test_a_library_that_fails_does_not_end_the_find(monkeypatch, broken):
    monkeypatch.setattr(Library, "broken", broken)
    find = make_default_find(kernels=[SimulatedMatmul(), Library()])
    rows = run_find(find)
    assert find.ceilings["burst"].kernel == KERNEL
    assert any(row.phase == "algorithm" and row.ok for row in rows)


FAULTS = ["wrong_result", RuntimeError("CUDA error")]


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_shapes_that_fail_neither_end_the_find_nor_win(backend, fault):
    class Faults(dict):
        def get(self, shape, default=None):
            return fault if shape.m % 5120 else default

    backend.faults = Faults()
    find = make_default_find(backend)
    rows = run_find(find)
    assert any(not row.ok for row in rows)
    assert find.ceilings["burst"].shape.m % 5120 == 0
    assert find.ceilings["burst"].tflops > 0.95 * compute_highest_tflops()


def test_a_candidate_that_begins_to_fail_is_not_confirmed(backend):
    find = make_default_find(backend, seed=1)
    confirmed_shapes = []
    for row in find.yield_results():
        if row.phase == "confirm" and row.shape not in confirmed_shapes:
            confirmed_shapes.append(row.shape)
            if len(confirmed_shapes) == 2:
                backend.faults[row.shape] = RuntimeError("CUDA error")
    assert len(confirmed_shapes) > 2
    assert find.ceilings["burst"].shape != confirmed_shapes[1]


def test_a_device_that_fails_before_the_first_shape_is_reported(backend, monkeypatch):
    monkeypatch.setattr(backend, "flush_cache", lambda size=None: 1 / 0)
    with pytest.raises(
        DeviceError, match="before the first shape in the regime burst: ZeroDivisionError: division by zero"
    ):
        run_find(make_default_find(backend))


SLOW = {"compute_units": 4, "flop_per_cycle_per_unit": 32, "memory_bytes": 8 * 10**9}


@pytest.mark.parametrize("changed", [{}, {"memory_bytes": 10**9}, SLOW], ids=["accelerator", "little memory", "slow"])
def test_the_grid_suits_memory_and_speed(changed):
    physics = dataclasses.replace(Physics(), **changed)
    backend, problem = SimulatedBackend(physics=physics), MatmulProblem()
    plan, kernels = plan_search(backend, problem, SIMULATED[-1:], regimes=("burst",), scouts=48)
    find = make_find(plan, kernels, backend)
    rows = run_find(find)
    assert all(row.ok for row in rows)
    assert find.ceilings["burst"].tflops >= 0.98 * compute_highest_tflops(physics, max(plan.options.grid.m))
    assert 3 * max(problem.count_bytes(row.shape) for row in rows) < physics.memory_bytes
    assert backend.now() < 60


# -- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def find(run):
    return lambda *arguments: run("find", *SIMULATED, *arguments)


@pytest.fixture
def whole(find, tmp_path):
    """Provide a complete log, ``run.jsonl``. Return the exit code and output of its run, and the bytes of the log."""
    if not WHOLE:
        code, out, _ = find("--output", "run.jsonl", "--budget", "10m")
        WHOLE.extend((code, out, (tmp_path / "run.jsonl").read_bytes()))
    (tmp_path / "run.jsonl").write_bytes(WHOLE[2])
    return WHOLE


WHOLE = []  # shared by all tests, because a find by the command line takes a second


def test_a_find_prints_both_ceilings_and_how_they_were_found(whole, tmp_path):
    code, out, _ = whole
    assert code == 0
    log = read_run_log(tmp_path / "run.jsonl")
    for regime, ceiling in log.ceilings.items():
        line = next(line for line in out.splitlines() if line.startswith(f"{regime} "))
        interval = f"{ceiling.interval.low:.1f} to {ceiling.interval.high:.1f}"
        assert line.split()[1:5] == [f"{ceiling.tflops:.1f}", *interval.split()]
        assert f"{ceiling.shape}  {KERNEL}" in line
        assert f"{ceiling.conditions.watts:.0f}" in line
        assert f"{100 * ceiling.tflops / 989:.1f}" in line
    assert f"{log.ceilings['sustained'].joules_per_tflop:.3f}" in out
    for text in (
        "throttled by power cap",
        "first measurements",
        "short measurements",
        "confirming measurements",
        "log: run.jsonl",
    ):
        assert text in out


@pytest.mark.parametrize(("options", "is_short"), [(["--budget", "8s"], True), (["--quick"], False)], ids=str)
def test_a_search_with_less_time_than_a_quick_one_says_that_its_ceilings_may_be_too_low(find, run, options, is_short):
    warning = "WARN search time: the search has only 8 s, so its ceilings may be too low"
    _, out, err = find("--regime", "burst", "sustained", *options, "--output", "short.jsonl")
    assert (warning in " ".join((out + err).split())) == is_short
    assert (warning in run("show", "short.jsonl")[1]) == is_short


@pytest.mark.parametrize(("budget", "is_short"), [("5s", True), ("30s", False)])
def test_the_time_of_a_resumed_search_includes_the_time_before(find, budget, is_short):
    find("--regime", "burst", "sustained", "--budget", "3s", "--output", "short.jsonl")
    _, _, err = find("--resume", "short.jsonl", "--budget", budget)
    assert ("the search has only 8.33 s" in " ".join(err.split())) == is_short


def test_the_report_repeats_remarks_about_the_measurements_that_confirm_a_ceiling(whole, tmp_path):
    log = read_run_log(tmp_path / "run.jsonl")
    ceiling = log.ceilings["sustained"]
    rows = [
        dataclasses.replace(row, remarks=("the device idled",))
        if row.phase == "confirm" and row.regime == "sustained"
        else row
        for row in log.measurements
    ]
    assert "the device idled" in describe_ceiling_accuracy(ceiling, rows, log.header)[-1]
    assert "the device idled" not in "".join(describe_ceiling_accuracy(ceiling, log.measurements, log.header))


def test_show_prints_what_the_find_printed(whole, run):
    code, out, _ = run("show", "run.jsonl")
    assert code == 0
    assert whole[1] == out + "log: run.jsonl\n"


@pytest.mark.parametrize("form", ["csv", "json", "markdown"])
def test_every_format_has_both_ceilings(whole, run, form, tmp_path):
    _, out, _ = run("show", "run.jsonl", "--format", form)
    log = read_run_log(tmp_path / "run.jsonl")
    if form == "csv":
        records = list(csv.DictReader(out.splitlines()))
    elif form == "json":
        records = json.loads(out)["ceilings"]
        assert len(json.loads(out)["measurements"]) == len(log.measurements)
    else:
        assert "**bfloat16**" in out and "| burst |" in out and "- burst (MAMF): " in out
        return
    for record, ceiling in zip(records, log.ceilings.values(), strict=True):
        assert (record["regime"], record["kernel"], int(record["k"])) == (
            ceiling.regime,
            ceiling.kernel,
            ceiling.shape.k,
        )
        assert float(record["rate_tflops"]) == ceiling.tflops
        assert float(record["share_of_peak"]) == pytest.approx(ceiling.tflops / 989.4, rel=1e-3)
        assert 0.9 * 0.795 < float(record["cycles_used"]) * SimulatedBackend.physics.true_clock_share < 0.795


def test_several_dtypes_are_searched_one_after_the_other_with_a_log_each(find, tmp_path):
    options = ["--regime", "burst", "--format", "json", "--budget", "20s"]
    code, out, err = find("--dtype", "bfloat16", "float16", "bfloat16", *options, "--output", "run.jsonl")
    assert code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-bfloat16.jsonl", "run-float16.jsonl"]
    assert out.count('"regime": "burst"') > 2
    assert err.count("log: run-") == 2
    for dtype in ("bfloat16", "float16"):
        assert mamf.load_ceiling(tmp_path / f"run-{dtype}.jsonl").problem.dtype == dtype


def test_a_dtype_that_cannot_be_searched_does_not_stop_the_others(find, tmp_path, monkeypatch):
    def refuse_float16(backend, problem, *arguments, **fields):
        if problem.dtype == "float16":
            raise UsageError("20 s are too few for a search in float16")
        return plan_search(backend, problem, *arguments, **fields)

    monkeypatch.setattr("mamf.engine.search.grid.plan_search", refuse_float16)
    options = ["--regime", "burst", "--budget", "10s", "--output", "run.jsonl"]
    code, _, err = find("--dtype", "float16", "bfloat16", *options)
    assert code == 2
    assert "mamf: 20 s are too few for a search in float16\n" in err
    assert [path.name for path in tmp_path.iterdir()] == ["run-bfloat16.jsonl"]
    assert find("--dtype", "float16", *options)[::2] == (2, "mamf: 20 s are too few for a search in float16\n")


def test_an_unknown_second_dtype_is_refused_before_the_first_is_measured(find, tmp_path):
    arguments = ["--dtype", "bfloat16", "bfloat61", "--regime", "burst", "--output", "run.jsonl"]
    assert_refused(find(*arguments), "did you mean 'bfloat16'")
    assert list(tmp_path.iterdir()) == []


def test_a_regime_that_the_budget_leaves_unconfirmed_is_named_so(find, tmp_path):
    code, out, _ = find("--budget", "22s", "--output", "run.jsonl")
    assert code == 0
    assert "burst (MAMF)" in out
    assert "sustained: not confirmed; best measurement so far: 7" in out
    assert "interrupted: the budget ended" in out
    assert set(read_run_log(tmp_path / "run.jsonl").ceilings) == {"burst"}


REFUSAL = "CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmulAlgoGetHeuristic"


@pytest.fixture
def refusing_library(monkeypatch):
    """Provide a library that has no algorithm for the problem, and says so in an error."""

    def refuse(*arguments, **options):
        raise RuntimeError(REFUSAL)

    monkeypatch.setattr(SimulatedMatmul, "prepare", refuse)
    monkeypatch.setattr(SimulatedMatmul, "is_refusal", lambda self, error: "NOT_SUPPORTED" in str(error))


@pytest.mark.parametrize("arguments", [[], ["--quick"], ["--regime", "burst"]], ids=" ".join)
def test_a_refusal_of_the_library_is_a_row_with_its_reason(refusing_library, find, tmp_path, arguments):
    code, out, _ = find("--output", "run.jsonl", *arguments)
    assert code == 1
    assert f"no ceiling can be found: unsupported, RuntimeError: {REFUSAL}" in out
    assert "choose another --dtype, or a kernel that 'mamf kernels' lists" in out
    assert "complete" not in out and "--resume" not in out
    log = read_run_log(tmp_path / "run.jsonl")
    assert [(row.status, row.phase) for row in log.measurements] == [("unsupported", "scout")]
    assert log.plan.kernels == ("mamf.testing:SimulatedMatmul",)


# -- interruption and resuming ---------------------------------------------------------------------------------------


def make_interrupt(count):
    return lambda launches: os.kill(os.getpid(), signal.SIGINT) if launches == count else None


@pytest.mark.parametrize(("launch_count", "is_confirmed"), [(300, False), (600, False), (3000, True)])
def test_ctrl_c_prints_which_ceilings_are_confirmed(find, on_launch, tmp_path, launch_count, is_confirmed):
    on_launch(make_interrupt(launch_count))
    code, out, _ = find("--dtype", "bfloat16", "float16", "--output", "run.jsonl")
    assert code == 130
    assert "interrupted: by the user" in out
    assert bool(re.search(r"; [12] ceilings? left: continue with --resume", out)) != is_confirmed
    # The interrupt also cancels the second dtype, so there is one log.
    (path,) = tmp_path.iterdir()
    log = read_run_log(path)
    assert log.measurements
    assert ("burst (MAMF)" in out) == ("burst" in log.ceilings) == is_confirmed
    assert ("burst, bfloat16: not confirmed; best measurement so far" in out) != is_confirmed
    assert log.summary["status"] == "interrupted"


def test_ctrl_c_before_the_first_measurement_leaves_nothing(find, on_launch, tmp_path):
    on_launch(make_interrupt(2))
    code, out, err = find("--output", "run.jsonl")
    assert (code, out) == (130, "")
    assert "before the first measurement" in err
    assert list(tmp_path.iterdir()) == []


def resume(run, *arguments):
    return run("find", *SIMULATED, "--resume", "run.jsonl", *arguments)


@pytest.mark.parametrize("share", [0.2, 0.8])
def test_resuming_a_killed_find_gives_the_same_ceilings(whole, run, registered, tmp_path, share):
    """Check a log that ends in the middle of a line, as after kill -9."""
    path = tmp_path / "run.jsonl"
    before = read_run_log(path)
    path.write_bytes(whole[2][: int(share * len(whole[2]))])
    remaining_rows = read_run_log(path).measurements
    code, out, _ = resume(run)
    assert code == 0
    assert "complete;" in out
    after = read_run_log(path)
    assert after.measurements[: len(remaining_rows)] == remaining_rows
    for regime, ceiling in before.ceilings.items():
        assert after.ceilings[regime].tflops == pytest.approx(ceiling.tflops, rel=0.005)
    assert abs(len(after.measurements) - len(before.measurements)) < 0.25 * len(before.measurements)


def test_a_budget_given_when_resuming_counts(whole, run, registered, tmp_path):
    (tmp_path / "run.jsonl").write_bytes(whole[2][: len(whole[2]) // 10])
    code, out, _ = resume(run, "--budget", "24s")
    assert code == 0
    assert 24 <= float(re.search(r"measurements in ([\d.]+) s", out)[1]) < 1.2 * 24  # the last visit may end after it


# -- quick searches --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quick():
    backend = SimulatedBackend()
    with pytest.MonkeyPatch.context() as patch:  # a fine grid, as usual: a coarse one has few small shapes
        patch.setattr("mamf.engine.search.grid._SIZES_PER_DIMENSION", 20)
        patch.setattr("mamf.engine.search.grid._MAX_GRID_STEP", 1024)
        plan, kernels = plan_search(backend, MatmulProblem(), SIMULATED[-1:], is_quick=True)
    find = make_find(plan, kernels, backend)
    start = backend.now()
    return find, run_find(find), backend.now() - start


def test_a_quick_find_has_both_ceilings_within_its_budget(quick):
    find, _, seconds = quick
    assert set(find.ceilings) == {"burst", "sustained"}
    assert seconds <= find.plan.budget_seconds == 13.2
    assert not find.strategy.skipped_step_count
    assert all(ceiling.round_count >= 3 for ceiling in find.ceilings.values())


def test_a_quick_find_confirms_in_sustained_what_burst_has_chosen(quick):
    burst, sustained = (quick[0].ceilings[regime] for regime in ("burst", "sustained"))
    assert (burst.shape, burst.kernel) == (sustained.shape, sustained.kernel)


def test_a_quick_find_is_as_high_as_a_thorough_one(quick, thorough):
    # The thorough find has no K above 20480, so its ceilings are a little lower.
    for regime, ceiling in thorough[0].ceilings.items():
        assert quick[0].ceilings[regime].tflops >= 0.994 * ceiling.tflops


class CheapLibrary(Library):
    """A library with algorithms that need no compilation. Which of them is fastest depends on the shape."""

    has_cheap_variants = True
    shares = {f"library[{rank}]": 1.0 for rank in range(6)}  # noqa: RUF012

    def list_variants(self, backend, problem, shape):
        return [CheapLibrary(name) for name in self.shares]

    def prepare(self, backend, problem, shape, pool, sets=1, rewrite=False):
        is_best = self.name == ("library[5]" if shape.m * shape.n < 8000**2 else "library[1]")
        as_long = dataclasses.replace(shape, k=round(shape.k * (0.8 if is_best else 1.1)))
        return SimulatedMatmul.prepare(self, backend, problem, as_long, pool, sets, rewrite)


def test_a_quick_find_uses_the_kernel_and_the_algorithm_that_are_best(few_shapes, monkeypatch):
    # The fastest of these kernels needs more cycles than the device has at its usual true clock, so hide that clock.
    monkeypatch.setattr(SimulatedBackend, "physics", dataclasses.replace(Physics(), true_clock_share=None))
    find = make_default_find(
        kernels=[SimulatedMatmul(), Library(), CheapLibrary()], scouts=40, refinements=48, is_quick=True
    )
    rows = run_find(find)
    ceiling = find.ceilings["burst"]
    assert ceiling.kernel in ("library[5]", "library[1]")
    assert ceiling.tflops >= 0.99 * compute_highest_tflops() / 0.8
    assert {row.kernel for row in rows if row.phase == "algorithm"} >= set(CheapLibrary.shares)


@pytest.mark.parametrize(("share", "is_used"), [(0.999, False), (0.97, True)])
def test_a_quick_find_drops_kernels_that_are_no_faster_than_the_default(few_shapes, monkeypatch, share, is_used):
    monkeypatch.setattr(Library, "shares", {"library[0]": share, "library[1]": 1.1, "library[2]": 0.5})
    find = make_default_find(kernels=[SimulatedMatmul(), Library()], is_quick=True)
    rows = run_find(find)
    kernels_after_scouting = [row.kernel for row in rows if row.phase in ("refine", "choose", "confirm")]
    assert ("library[0]" in kernels_after_scouting) == is_used
    # The library compiles its algorithms, so a quick search tries only the two most promising ones.
    assert {row.kernel for row in rows if row.phase == "algorithm"} == {"library[0]", "library[1]"}
    assert run_find(make_default_find(kernels=find.plan_kernels, is_quick=True, previous_rows=rows)) == []


@pytest.mark.parametrize(
    ("winner_by_regime", "names"),
    [
        ({}, [KERNEL, "compiled", "library"]),
        ({"burst": "library[5]"}, [KERNEL, "library"]),
        ({"burst": KERNEL}, [KERNEL, "library"]),
        ({"burst": "compiled[x]"}, [KERNEL, "compiled", "library"]),
        ({"burst": "not.installed"}, [KERNEL, "compiled", "library"]),
        ({"sustained": "library"}, [KERNEL, "compiled", "library"]),
    ],
    ids=str,
)
def test_a_quick_find_compiles_no_kernel_that_lost_on_such_devices(monkeypatch, winner_by_regime, names):
    library.install(monkeypatch)
    for name in ("compiled", "library"):
        base = Library if name == "compiled" else CheapLibrary
        kernel_class = type(
            name, (base,), {"is_default": False, "__init__": lambda self, name=name: setattr(self, "name", name)}
        )
        monkeypatch.setitem(globals(), name.title(), kernel_class)
        monkeypatch.setitem(library.POINTS[discovery.MATMUL_KERNEL_GROUP], name, f"{__name__}:{name.title()}")
    backend = SimulatedBackend()
    info = backend.info
    rows = [
        contributed(info.name, info.compute_units, None, 1.0, regime=regime, kernel=kernel)
        for regime, kernel in winner_by_regime.items()
    ]
    monkeypatch.setattr("mamf.peaks.read_contributed_rates", lambda: rows)
    plan, kernels = plan_search(backend, MatmulProblem(), is_quick=True)
    assert [kernel.name for kernel in kernels] == list(plan.kernels) == names
    _, kernels = plan_search(backend, MatmulProblem())
    assert [kernel.name for kernel in kernels] == [KERNEL, "compiled", "library"]


class ChipKernel(SimulatedMatmul):
    """A matmul with the speed of a chip of tools/bench_search.py."""

    def __init__(self, chip):
        self.chip = chip

    def make_launch_function(self, device, problem, shape):
        seconds = shape.flop / self.chip.compute_tflops(shape) / 1e12
        return lambda key: device.launch_compute(seconds * device.device_physics.boost_clock_hz, key)


@pytest.mark.parametrize(
    ("name", "best"),
    [("best at long K", MatmulShape(2816, 1536, 40960)), ("best at short K", MatmulShape(9472, 18944, 1536))],
)
def test_the_best_is_found_at_the_edges_of_the_grid_too(name, best):
    chip = EDGES[name]
    physics = dataclasses.replace(PHYSICS, compute_units=chip.compute_units)
    kernel, backend = ChipKernel(chip), SimulatedBackend(physics=physics)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mamf.engine.search.grid._SIZES_PER_DIMENSION", 20)
        patch.setattr("mamf.engine.search.grid._MAX_GRID_STEP", 1024)
        patch.setattr("mamf.engine.search.grid.choose_working_kernels", lambda *arguments: [kernel])
        plan, kernels = plan_search(backend, MatmulProblem(), regimes=("burst",), is_quick=True)
    find = make_find(plan, kernels, backend)
    run_find(find)
    assert chip.compute_tflops(find.ceilings["burst"].shape) >= 0.998 * chip.compute_tflops(best)


def test_previously_fastest_shapes_are_measured_first_and_the_ceiling_is_still_confirmed():
    prior = MatmulShape(16896, 2048, 20224)
    find = make_default_find(priors=(prior,))
    rows = run_find(find)
    assert rows[0].shape == prior
    assert find.ceilings["burst"].round_count >= 3


def test_a_prior_beyond_the_grid_is_left_out(monkeypatch):
    monkeypatch.setattr(
        "mamf.engine.search.grid.find_previously_fastest_shapes", lambda info, problem: [MatmulShape(64, 64, 10**6)]
    )
    plan, _ = plan_search(SimulatedBackend(), MatmulProblem(), SIMULATED[-1:])
    assert plan.options.priors == ()
