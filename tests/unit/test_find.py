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
from mamf.statistics import Interval, summarize_samples
from mamf.testing import Physics, SimulatedBackend, SimulatedMatmul

KERNEL = "simulated.mm"
PHYSICS = Physics()
BACKEND = ["--backend", "mamf.testing:SimulatedBackend"]
SIMULATED = [*BACKEND, "--kernel", "mamf.testing:SimulatedMatmul"]
SIZES = tuple(range(2560, 20481, 2560))
GRID = MatmulGrid(SIZES, SIZES, SIZES, most_flop=9.7e12)
A, B, C = (MatmulShape(4096, 4096, k) for k in (1024, 2048, 4096))


# -- ceilings --------------------------------------------------------------------------------------------------------


def row_of(shape, tflops, number, kernel=KERNEL, regime="burst", phase="confirm", **conditions):
    """Return a row in which every sample has the rate ``tflops``."""
    samples = (shape.flop / tflops / 1e12,) * 3
    return Measurement(
        shape, kernel, MatmulProblem(), regime, "median", "ok", "", summarize_samples(samples), samples,
        launch_count=3, phase=phase, round_number=number, conditions=Conditions(**conditions),
    )  # fmt: skip


def rows_of(shape, figures, **fields):
    return [row_of(shape, tflops, number, **fields) for number, tflops in enumerate(figures, 1)]


@pytest.mark.parametrize("rounds", range(MIN_CONFIRMING_ROUNDS))
def test_nothing_is_confirmed_before_there_were_enough_rounds(rounds):
    assert find_confirmed_ceiling(rows_of(A, [700.0] * rounds), "card") is None


def test_a_candidate_that_dropped_out_neither_wins_nor_ties():
    ceiling = find_confirmed_ceiling([*rows_of(A, [700] * 9), *rows_of(B, [710, 690, 710])], "card")
    assert (ceiling.shape, ceiling.tied_candidates) == (A, ())


def test_ties_are_what_the_rounds_cannot_tell_apart():
    close, beaten = [699, 702, 698, 701, 699, 701], [697] * 6
    ceiling = find_confirmed_ceiling([*rows_of(A, [700] * 6), *rows_of(B, close), *rows_of(C, beaten)], "card")
    assert {ceiling.shape, *(shape for shape, _ in ceiling.tied_candidates)} == {A, B}


def test_what_is_faster_than_the_winner_in_fresh_rounds_is_told_beside_it():
    chosen = [*rows_of(A, [701] * 6, phase="choose"), *rows_of(B, [700] * 6, phase="choose")]
    ceiling = find_confirmed_ceiling([*chosen, *rows_of(A, [700] * 6), *rows_of(B, [702] * 6)], "card")
    assert (ceiling.shape, ceiling.tied_candidates) == (A, ((B, KERNEL),))


@given(st.lists(st.floats(0.9, 1.1), min_size=6, max_size=12))
def test_drift_that_all_candidates_share_in_a_round_does_not_hide_who_is_faster(drift):
    faster, slower = ([share * figure for share in drift] for figure in (700, 699))
    ceiling = find_confirmed_ceiling([*rows_of(A, faster), *rows_of(B, slower)], "card")
    assert (ceiling.shape, ceiling.tied_candidates) == (A, ())


@given(st.lists(st.lists(st.floats(1, 1000), min_size=3, max_size=9), min_size=1, max_size=3))
def test_the_interval_holds_the_figure_and_no_finalist_is_higher(rounds):
    rows = [row for shape, figures in zip((A, B, C), rounds, strict=False) for row in rows_of(shape, figures)]
    ceiling = find_confirmed_ceiling(rows, "card")
    most = max(map(len, rounds))
    assert ceiling.interval.low <= ceiling.tflops <= ceiling.interval.high
    assert ceiling.tflops == pytest.approx(
        max(statistics.median(figures) for figures in rounds if len(figures) >= most - 1)
    )


class Shared(SimulatedMatmul):
    """A matmul that takes ``times`` times as long, because another process uses the device."""

    times = 1.0

    def make_launch_function(self, device, problem, shape):
        return lambda key: device.launch_compute(device.compute_matmul_cycles(shape) * self.times, key)


@pytest.mark.parametrize(
    ("phase", "before", "after", "is_known"),
    [
        ("burst: measuring the fastest again", 1.0, 1.3, False),
        ("burst: measuring the fastest again", 1.0, 1.03, True),
        ("burst: comparing the fastest shapes and kernels", 3.0, 1.0, True),
    ],
)
def test_a_ceiling_that_was_confirmed_on_a_busy_device_has_an_unknown_interval(phase, before, after, is_known):
    kernel = Shared()
    kernel.times = before
    find = find_of(kernels=[kernel])

    def report_phase(text):
        kernel.times = after if text == phase else kernel.times

    find.report_phase = report_phase
    rows = found(find)
    ceiling = find.ceilings["burst"]
    assert ceiling.interval.is_known == is_known
    header = {"device": {"name": "card", "compute_units": None}}
    assert (
        any(
            "something probably slowed the device later" in line
            for line in describe_ceiling_accuracy(ceiling, rows, header)
        )
        != is_known
    )
    assert logged(ceiling).interval.is_known == is_known


def ceiling_of(regime, tflops=800.0, watts=640.0):
    interval, conditions = Interval(tflops * 0.99, tflops * 1.01, 0.96), Conditions(watts=watts)
    tied_candidates = ((B, KERNEL), (A, "lib[3]"))
    figure = {"rate": tflops, "interval": interval, "round_count": 9, "gain_over_default": 0.05}
    of = {"device": "card", "problem": MatmulProblem(), "regime": regime, "kernel": KERNEL, "shape": A}
    return Ceiling(**of, **figure, tied_candidates=tied_candidates, conditions=conditions)


def test_utilization_is_a_share_within_one_regime():
    ceiling = ceiling_of("burst")
    assert ceiling.compute_utilization(flop=400e12, seconds=1.0, regime="burst") == pytest.approx(0.5)
    assert ceiling.compute_utilization(flop=400e12, seconds=2.0, regime="burst") == pytest.approx(0.25)
    with pytest.raises(
        IncomparableError, match="regime sustained cannot be compared with a ceiling in the regime burst"
    ):
        ceiling.compute_utilization(flop=400e12, seconds=1.0, regime="sustained")


HEADER = {"device": {"name": "card", "uuid_hash": None}, "plan": {"problem": dataclasses.asdict(MatmulProblem())}}


def logged(ceiling):
    return read_ceiling_record(json.loads(json.dumps(make_ceiling_record(ceiling))), HEADER)


@pytest.mark.parametrize("regime", ["burst", "sustained"])
def test_a_ceiling_survives_the_log(regime):
    assert logged(ceiling_of(regime)) == ceiling_of(regime)


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


def find_with(plan, kernels, backend, held=()):
    return Find(plan, backend, list(zip(plan.kernels, kernels, strict=True)), list(held))


def find_of(backend=None, kernels=None, held=(), seed=0, **fields):
    """Return a search that, by default, is limited only by its counts and not by its budget."""
    kernels = kernels or [SimulatedMatmul()]
    names = tuple(kernel.name for kernel in kernels)
    defaults = {"regimes": ("burst",), "budget_seconds": 600.0, "scouts": 24, "refinements": 36}
    plan = search_plan(MatmulProblem(seed=seed), names, GRID, **defaults | fields)
    return find_with(plan, kernels, backend or SimulatedBackend(seed=seed), held)


def found(find):
    return list(find.yield_results())


def highest(physics=PHYSICS, longest_k=SIZES[-1]):
    """Return the highest TFLOPS of the simulated device: the rate of a shape with full waves and the longest K."""
    flop_per_cycle = physics.compute_units * physics.flop_per_cycle_per_unit * physics.matmul_peak_share
    return flop_per_cycle * physics.boost_clock_hz * longest_k / (longest_k + 200) / 1e12


def confirmations(rows, regime="burst"):
    return [row for row in rows if row.phase == "confirm" and row.regime == regime]


def final_rounds(rows, regime="burst"):
    """Return the rows of the choosing and the confirming rounds."""
    return [row for row in rows if row.phase in ("choose", "confirm") and row.regime == regime]


@pytest.mark.parametrize("seed", range(3))
def test_the_burst_ceiling_is_within_half_a_percent_of_the_best_there_is(seed):
    find = find_of(seed=seed, scouts=48, refinements=72)
    found(find)
    ceiling = find.ceilings["burst"]
    assert 0.995 * highest() <= ceiling.tflops <= 1.002 * highest()
    assert ceiling.interval.coverage >= 0.95
    assert (ceiling.device, ceiling.kernel, ceiling.gain_over_default) == ("Simulated H100", KERNEL, None)


@pytest.fixture(scope="module")
def both(few_shapes):
    """Return a complete search for both ceilings, and its rows."""
    find = find_of(regimes=("burst", "sustained"))
    return find, found(find)


def test_the_sustained_ceiling_is_that_of_the_power_limit(both):
    find, rows = both
    ceiling = find.ceilings["sustained"]
    assert ceiling.tflops == pytest.approx(highest() * PHYSICS.capped_clock_hz / PHYSICS.boost_clock_hz, rel=0.005)
    assert ceiling.joules_per_tflop == pytest.approx(PHYSICS.power_limit_watts / ceiling.tflops, rel=0.01)
    assert "power cap" in ceiling.conditions.throttle_reasons
    assert next(row.phase for row in rows if row.regime == "sustained") == "visit"


@pytest.mark.parametrize("regime", ["burst", "sustained"])
def test_what_chose_a_candidate_never_confirms_it(both, regime):
    find, rows = both
    info = find.backend.info
    ceiling = find.ceilings[regime]
    assert ceiling == find_confirmed_ceiling(final_rounds(rows, regime), info.name, info.uuid_hash, KERNEL)
    own = [row for row in confirmations(rows, regime) if row.shape == ceiling.shape]
    assert ceiling.tflops == pytest.approx(statistics.median(row.best_rate for row in own), rel=2e-3)
    assert ceiling.round_count == len(own)


@pytest.mark.parametrize("regime", ["burst", "sustained"])
def test_rounds_are_interleaved_and_none_repeats_a_candidate(both, regime):
    rows = confirmations(both[1], regime)
    numbers = [row.round_number for row in rows]
    assert numbers == sorted(numbers)
    assert max(Counter((row.round_number, row.shape, row.kernel) for row in rows).values()) == 1
    orders = {
        tuple(row.shape for row in rows if row.round_number == number) for number in range(1, MIN_CONFIRMING_ROUNDS + 1)
    }
    assert len({frozenset(order) for order in orders}) == 1
    assert regime == "sustained" or len(orders) > 1, "the order of candidates must change between rounds"


def test_a_find_repeats_exactly_in_virtual_time(both):
    assert found(find_of(regimes=("burst", "sustained"))) == both[1]


class Late:
    """A hook that advances the clock when a phase begins.

    The new time is ``left`` seconds before the moment when the share ``share`` of the budget is used up.
    """

    def __init__(self, find, phase, share, left):
        self.find, self.phase, self.share, self.left = find, phase, share, left
        find.report_phase = self

    def __call__(self, text):
        backend = self.find.backend
        if text == self.phase:
            backend.host_time = max(backend.host_time, self.share * self.find.plan.budget_seconds - self.left)


@pytest.mark.parametrize("left", [0.0, 0.25, 0.5])
def test_a_budget_that_ends_within_the_first_round_confirms_nothing(left):
    find = find_of()
    Late(find, "burst: measuring the fastest again", 1.0, left)
    rows = found(find)
    assert find.ceilings == {}
    assert find.strategy.skipped_step_count
    assert {"scout", "refine"} <= {row.phase for row in rows}


# -- resuming a search -----------------------------------------------------------------------------------------------


def test_a_find_that_holds_everything_launches_nothing_and_finds_the_same(both):
    again = find_of(regimes=("burst", "sustained"), held=both[1])
    assert found(again) == []
    assert again.backend.launch_count == 0
    assert again.ceilings == both[0].ceilings


@pytest.mark.parametrize("lacking", [1, 10, 24])
def test_what_time_had_ended_is_not_searched_anew(lacking):
    limited = {"budget_seconds": 8.0, "scouts": 96, "refinements": 132}
    rows = found(find_of(**limited))
    held = rows[:-lacking]
    again = found(find_of(held=held, **limited))
    assert not {key_of(row) for row in held} & {key_of(row) for row in again}
    assert "scout" not in {row.phase for row in again}
    assert len(again) <= lacking + 60, "the resumed search measured more than the missing rows and the final rounds"


@pytest.mark.parametrize("held_rounds", [[], [1], [1, 2], [1, 2, 3]], ids=str)
def test_who_was_left_in_a_round_is_as_the_rows_say_and_not_the_clock(held_rounds):
    """Check that a search that was interrupted within a round measures no candidate twice in this round.

    The budget allowed fewer candidates in the second round than in the first. The resumed search must learn from the
    rows which candidates these were: its own clock does not show how much time was left.
    """
    physics = dataclasses.replace(Physics(), compute_units=4, flop_per_cycle_per_unit=4096, memory_bytes=8 * 10**9)
    limited = {"budget_seconds": 110.0, "scouts": 8, "refinements": 8}
    rows = found(find_of(SimulatedBackend(physics=physics), **limited))
    of_round = Counter(row.round_number for row in rows if row.phase == "choose")
    assert of_round[1] > of_round[2] > 1
    begun = [
        row
        for row in rows
        if row.phase in ("scout", "refine") or (row.phase == "choose" and row.round_number in held_rounds)
    ]
    held = rows[: len(begun) + 1]
    again = found(find_of(SimulatedBackend(physics=physics), held=held, **limited))
    keys = Counter(key_of(row) for row in [*held, *again])
    assert keys.most_common(1)[0][1] == 1


def key_of(row):
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


def test_the_fastest_algorithm_of_a_second_kernel_is_the_ceilings():
    find = find_of(kernels=[SimulatedMatmul(), Library()], regimes=("burst", "sustained"))
    rows = found(find)
    tried = {row.kernel for row in rows if row.phase == "algorithm"}
    assert tried == set(Library.shares)
    for ceiling in find.ceilings.values():
        assert ceiling.kernel == "library[1]"
    ceiling = find.ceilings["burst"]
    assert ceiling.gain_over_default == pytest.approx(1 / 0.95 - 1, abs=0.005)
    assert ceiling.tflops == pytest.approx(highest() / 0.95, rel=0.01)


class Elsewhere(SimulatedMatmul):
    """A kernel that is faster than the default where C is small, and slower where the default is fastest."""

    name = "elsewhere"

    def prepare(self, backend, problem, shape, pool, sets=1, rewrite=False):
        share = 0.93 if shape.m * shape.n < 8000**2 else 1.1
        as_long = dataclasses.replace(shape, k=round(shape.k * share))
        return super().prepare(backend, problem, as_long, pool, sets, rewrite)


def test_shapes_and_kernels_are_chosen_together():
    find = find_of(kernels=[SimulatedMatmul(), Elsewhere()], regimes=("burst", "sustained"))
    rows = found(find)
    ceiling, default = find.ceilings["burst"], [row for row in rows if row.ok and row.kernel == KERNEL]
    assert ceiling.kernel == "elsewhere"
    assert ceiling.shape.m * ceiling.shape.n < 8000**2
    assert ceiling.tflops > 1.01 * max(row.best_rate for row in default)
    sought = [row for row in rows if row.phase in ("scout", "refine", "algorithm")]
    assert len(sought) <= find.plan.options.scouts + find.plan.options.refinements + 10
    assert {row.kernel for row in sought if row.phase == "scout"} == {KERNEL, "elsewhere"}
    # The rounds also measure the default kernel, on the shape of the ceiling and on its own fastest shape.
    assert ceiling.gain_over_default == pytest.approx(1 / 0.93 - 1, abs=0.01)
    best_of_default = max(default, key=lambda row: row.best_rate).shape
    assert (best_of_default, KERNEL) in {(row.shape, row.kernel) for row in rows if row.phase == "choose"}


def test_the_report_says_what_the_default_gives():
    fast = [*rows_of(A, [800.0] * 3, kernel="triton[x]"), *rows_of(A, [790.0] * 3, kernel="triton[x]", phase="choose")]
    default = [*rows_of(A, [600.0] * 3, phase="choose"), *rows_of(B, [640.0, 650.0, 660.0], phase="choose")]
    scouts = rows_of(C, [655.0], phase="scout")
    ceiling = find_confirmed_ceiling([*fast, *default], "card", default_kernel=KERNEL)
    header = {"device": {"name": "card", "compute_units": None}}
    told = describe_ceiling_accuracy(ceiling, [*scouts, *default, *fast], header)
    assert any("triton[x] gains +31.7 % over the default kernel on this shape" in line for line in told)
    assert f"    the default kernel, {KERNEL}, reaches at most 650.0 TFLOPS @ {B}" in told
    faster = [row for row in default if row.shape != B] + rows_of(B, [801.0] * 3, phase="choose")
    told = describe_ceiling_accuracy(ceiling, [*scouts, *faster, *fast], header)
    assert f"    the default kernel, {KERNEL}, is as fast @ {B}" in told
    own = find_confirmed_ceiling([*default, *rows_of(B, [650.0] * 3)], "card", default_kernel=KERNEL)
    assert not any("default" in line for line in describe_ceiling_accuracy(own, [*scouts, *default], header))


@pytest.mark.parametrize(("broken", "left"), [("variants", KERNEL), ("library[1]", KERNEL)])
def test_a_library_that_fails_does_not_end_the_find(monkeypatch, broken, left):
    monkeypatch.setattr(Library, "broken", broken)
    find = find_of(kernels=[SimulatedMatmul(), Library()])
    rows = found(find)
    assert find.ceilings["burst"].kernel == left
    assert any(row.phase == "algorithm" and row.ok for row in rows)


FAULTS = ["wrong_result", RuntimeError("CUDA error")]


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_shapes_that_fail_neither_end_the_find_nor_win(backend, fault):
    class Faults(dict):
        def get(self, shape, default=None):
            return fault if shape.m % 5120 else default

    backend.faults = Faults()
    find = find_of(backend)
    rows = found(find)
    assert any(not row.ok for row in rows)
    assert find.ceilings["burst"].shape.m % 5120 == 0
    assert find.ceilings["burst"].tflops > 0.95 * highest()


def test_a_candidate_that_begins_to_fail_is_not_confirmed(backend):
    find = find_of(backend, seed=1)
    seen = []
    for row in find.yield_results():
        if row.phase == "confirm" and row.shape not in seen:
            seen.append(row.shape)
            if len(seen) == 2:
                backend.faults[row.shape] = RuntimeError("CUDA error")
    assert len(seen) > 2
    assert find.ceilings["burst"].shape != seen[1]


def test_a_device_that_fails_before_the_first_shape_is_said(backend, monkeypatch):
    monkeypatch.setattr(backend, "flush_cache", lambda size=None: 1 / 0)
    with pytest.raises(
        DeviceError, match="before the first shape in the regime burst: ZeroDivisionError: division by zero"
    ):
        found(find_of(backend))


SLOW = {"compute_units": 4, "flop_per_cycle_per_unit": 32, "memory_bytes": 8 * 10**9}


@pytest.mark.parametrize("changed", [{}, {"memory_bytes": 10**9}, SLOW], ids=["accelerator", "little memory", "slow"])
def test_the_grid_suits_memory_and_speed(changed):
    physics = dataclasses.replace(Physics(), **changed)
    backend, problem = SimulatedBackend(physics=physics), MatmulProblem()
    plan, kernels = plan_search(backend, problem, SIMULATED[-1:], regimes=("burst",), scouts=48)
    find = find_with(plan, kernels, backend)
    rows = found(find)
    assert all(row.ok for row in rows)
    assert find.ceilings["burst"].tflops >= 0.98 * highest(physics, max(plan.options.grid.m))
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
def test_a_search_with_less_time_than_a_quick_one_says_that_its_ceilings_may_be_too_low(
    find, run, tmp_path, options, is_short
):
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
        told = list(csv.DictReader(out.splitlines()))
    elif form == "json":
        told = json.loads(out)["ceilings"]
        assert len(json.loads(out)["measurements"]) == len(log.measurements)
    else:
        assert "**bfloat16**" in out and "| burst |" in out and "- burst (MAMF): " in out
        return
    for line, ceiling in zip(told, log.ceilings.values(), strict=True):
        assert (line["regime"], line["kernel"], int(line["k"])) == (ceiling.regime, ceiling.kernel, ceiling.shape.k)
        assert float(line["rate_tflops"]) == ceiling.tflops
        assert float(line["share_of_peak"]) == pytest.approx(ceiling.tflops / 989.4, rel=1e-3)
        assert 0.9 * 0.795 < float(line["cycles_used"]) * SimulatedBackend.physics.true_clock_share < 0.795


def test_several_dtypes_are_found_one_after_the_other_a_log_each(find, tmp_path):
    options = ["--regime", "burst", "--format", "json", "--budget", "20s"]
    code, out, err = find("--dtype", "bfloat16", "float16", "bfloat16", *options, "--output", "run.jsonl")
    assert code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-bfloat16.jsonl", "run-float16.jsonl"]
    assert out.count('"regime": "burst"') > 2
    assert err.count("log: run-") == 2
    for dtype in ("bfloat16", "float16"):
        assert mamf.load_ceiling(tmp_path / f"run-{dtype}.jsonl").problem.dtype == dtype


def test_a_dtype_that_cannot_be_searched_costs_no_other(find, tmp_path, monkeypatch):
    def plan(backend, problem, *given, **fields):
        if problem.dtype == "float16":
            raise UsageError("20 s are too few for a search in float16")
        return plan_search(backend, problem, *given, **fields)

    monkeypatch.setattr("mamf.engine.search.grid.plan_search", plan)
    options = ["--regime", "burst", "--budget", "10s", "--output", "run.jsonl"]
    code, _, err = find("--dtype", "float16", "bfloat16", *options)
    assert code == 2
    assert "mamf: 20 s are too few for a search in float16\n" in err
    assert [path.name for path in tmp_path.iterdir()] == ["run-bfloat16.jsonl"]
    assert find("--dtype", "float16", *options)[::2] == (2, "mamf: 20 s are too few for a search in float16\n")


def test_a_wrong_second_dtype_is_said_before_the_first_is_measured(find, tmp_path):
    arguments = ["--dtype", "bfloat16", "bfloat61", "--regime", "burst", "--output", "run.jsonl"]
    assert_refused(find(*arguments), "did you mean 'bfloat16'")
    assert list(tmp_path.iterdir()) == []


def test_the_budget_ends_it_and_what_is_only_scouted_is_named_so(find, on_launch, tmp_path):
    code, out, _ = find("--budget", "22s", "--output", "run.jsonl")
    assert code == 0
    assert "burst (MAMF)" in out
    assert "sustained: not confirmed; best measurement so far: 7" in out
    assert "interrupted: the budget ended" in out
    assert set(read_run_log(tmp_path / "run.jsonl").ceilings) == {"burst"}


REFUSAL = "CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmulAlgoGetHeuristic"


@pytest.fixture
def refusing(monkeypatch):
    """Provide a library that has no algorithm for the problem, and says so in an error."""

    def refused(*asked, **options):
        raise RuntimeError(REFUSAL)

    monkeypatch.setattr(SimulatedMatmul, "prepare", refused)
    monkeypatch.setattr(SimulatedMatmul, "is_refusal", lambda self, error: "NOT_SUPPORTED" in str(error))


@pytest.mark.parametrize("arguments", [[], ["--quick"], ["--regime", "burst"]], ids=" ".join)
def test_what_the_library_refuses_is_a_row_with_its_reason(refusing, find, tmp_path, arguments):
    code, out, _ = find("--output", "run.jsonl", *arguments)
    assert code == 1
    assert f"no ceiling can be found: unsupported, RuntimeError: {REFUSAL}" in out
    assert "choose another --dtype, or a kernel that 'mamf kernels' lists" in out
    assert "complete" not in out and "--resume" not in out
    log = read_run_log(tmp_path / "run.jsonl")
    assert [(row.status, row.phase) for row in log.measurements] == [("unsupported", "scout")]
    assert log.plan.kernels == ("mamf.testing:SimulatedMatmul",)


# -- interruption and resuming ---------------------------------------------------------------------------------------


def interrupt_at(count):
    return lambda launches: os.kill(os.getpid(), signal.SIGINT) if launches == count else None


@pytest.mark.parametrize(("at", "is_confirmed"), [(300, False), (600, False), (3000, True)])
def test_ctrl_c_tells_what_is_confirmed_and_what_is_scouted(find, on_launch, tmp_path, at, is_confirmed):
    on_launch(interrupt_at(at))
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
    on_launch(interrupt_at(2))
    code, out, err = find("--output", "run.jsonl")
    assert (code, out) == (130, "")
    assert "before the first measurement" in err
    assert list(tmp_path.iterdir()) == []


def resume(run, *arguments):
    return run("find", *SIMULATED, "--resume", "run.jsonl", *arguments)


@pytest.mark.parametrize("share", [0.2, 0.8])
def test_a_killed_log_resumes_and_comes_to_the_same_ceilings(whole, run, registered, tmp_path, share):
    """Check a log that ends in the middle of a line, as after kill -9."""
    path = tmp_path / "run.jsonl"
    before = read_run_log(path)
    path.write_bytes(whole[2][: int(share * len(whole[2]))])
    kept = read_run_log(path).measurements
    code, out, _ = resume(run)
    assert code == 0
    assert "complete;" in out
    after = read_run_log(path)
    assert after.measurements[: len(kept)] == kept
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
    find = find_with(plan, kernels, backend)
    begun = backend.now()
    return find, found(find), backend.now() - begun


def test_a_quick_find_has_both_ceilings_within_its_budget(quick):
    find, _, seconds = quick
    assert set(find.ceilings) == {"burst", "sustained"}
    assert seconds <= find.plan.budget_seconds == 13.2
    assert not find.strategy.skipped_step_count
    assert all(ceiling.round_count >= 3 for ceiling in find.ceilings.values())


def test_a_quick_find_confirms_in_sustained_what_burst_has_chosen(quick):
    of_burst, of_sustained = (quick[0].ceilings[regime] for regime in ("burst", "sustained"))
    assert (of_burst.shape, of_burst.kernel) == (of_sustained.shape, of_sustained.kernel)


def test_a_quick_find_is_as_high_as_a_thorough_one(quick, both):
    # The thorough find has no K above 20480, so its ceilings are a little lower.
    for regime, thorough in both[0].ceilings.items():
        assert quick[0].ceilings[regime].tflops >= 0.994 * thorough.tflops


class Proposals(Library):
    """A library with algorithms that need no compilation. Which of them is fastest depends on the shape."""

    has_cheap_variants = True
    shares = {f"library[{rank}]": 1.0 for rank in range(6)}  # noqa: RUF012

    def list_variants(self, backend, problem, shape):
        return [Proposals(name) for name in self.shares]

    def prepare(self, backend, problem, shape, pool, sets=1, rewrite=False):
        is_best = self.name == ("library[5]" if shape.m * shape.n < 8000**2 else "library[1]")
        as_long = dataclasses.replace(shape, k=round(shape.k * (0.8 if is_best else 1.1)))
        return SimulatedMatmul.prepare(self, backend, problem, as_long, pool, sets, rewrite)


def test_a_quick_find_uses_the_kernel_and_the_algorithm_that_are_best(few_shapes, monkeypatch):
    # The fastest of these kernels needs more cycles than the device has at its usual true clock, so hide that clock.
    monkeypatch.setattr(SimulatedBackend, "physics", dataclasses.replace(Physics(), true_clock_share=None))
    find = find_of(kernels=[SimulatedMatmul(), Library(), Proposals()], scouts=40, refinements=48, is_quick=True)
    rows = found(find)
    ceiling = find.ceilings["burst"]
    assert ceiling.kernel in ("library[5]", "library[1]")
    assert ceiling.tflops >= 0.99 * highest() / 0.8
    assert {row.kernel for row in rows if row.phase == "algorithm"} >= set(Proposals.shares)


@pytest.mark.parametrize(("share", "is_used"), [(0.999, False), (0.97, True)])
def test_a_quick_find_leaves_kernels_that_are_no_faster_than_the_default(few_shapes, monkeypatch, share, is_used):
    monkeypatch.setattr(Library, "shares", {"library[0]": share, "library[1]": 1.1, "library[2]": 0.5})
    find = find_of(kernels=[SimulatedMatmul(), Library()], is_quick=True)
    rows = found(find)
    after = [row.kernel for row in rows if row.phase in ("refine", "choose", "confirm")]
    assert ("library[0]" in after) == is_used
    # The library compiles its algorithms, so a quick search tries only the two most promising ones.
    assert {row.kernel for row in rows if row.phase == "algorithm"} == {"library[0]", "library[1]"}
    assert found(find_of(kernels=find.plan_kernels, is_quick=True, held=rows)) == []


@pytest.mark.parametrize(
    ("won", "names"),
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
def test_a_quick_find_compiles_no_kernel_that_lost_on_such_devices(monkeypatch, won, names):
    library.install(monkeypatch)
    for name in ("compiled", "library"):
        of = Library if name == "compiled" else Proposals
        made = type(name, (of,), {"is_default": False, "__init__": lambda self, name=name: setattr(self, "name", name)})
        monkeypatch.setitem(globals(), name.title(), made)
        monkeypatch.setitem(library.POINTS[discovery.MATMUL_KERNEL_GROUP], name, f"{__name__}:{name.title()}")
    backend = SimulatedBackend()
    info = backend.info
    rows = [
        contributed(info.name, info.compute_units, None, 1.0, regime=regime, kernel=kernel)
        for regime, kernel in won.items()
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
        seconds = shape.flop / self.chip.tflops(shape) / 1e12
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
        patch.setattr("mamf.engine.search.grid.choose_working_kernels", lambda *given: [kernel])
        plan, kernels = plan_search(backend, MatmulProblem(), regimes=("burst",), is_quick=True)
    find = find_with(plan, kernels, backend)
    found(find)
    assert chip.tflops(find.ceilings["burst"].shape) >= 0.998 * chip.tflops(best)


def test_shapes_that_won_before_are_measured_first_and_are_no_result():
    known = MatmulShape(16896, 2048, 20224)
    find = find_of(priors=(known,))
    rows = found(find)
    assert rows[0].shape == known
    assert find.ceilings["burst"].round_count >= 3


def test_a_prior_beyond_the_grid_is_left_out(monkeypatch):
    monkeypatch.setattr(
        "mamf.engine.search.grid.find_previously_fastest_shapes", lambda info, problem: [MatmulShape(64, 64, 10**6)]
    )
    plan, _ = plan_search(SimulatedBackend(), MatmulProblem(), SIMULATED[-1:])
    assert plan.options.priors == ()
