"""Test the bandwidth operation: array sizes, the bytes and FLOP of a pass, and the limit and the peak of a device."""

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamf.backend import DeviceInfo
from mamf.dtypes import DTYPES
from mamf.engine.measure import measure_row
from mamf.engine.regimes import BurstRegime, StoppingRule
from mamf.operations.bandwidth.operation import ACCESS_PATTERNS, BandwidthProblem, BandwidthShape
from mamf.plugins.discovery import make_operation
from mamf.report.rows import describe_best_rows
from mamf.report.shares import ShareCalculator
from mamf.testing import Physics, SimulatedBackend, SimulatedBandwidth

MIB, GIB = 2**20, 2**30
ARRAYS_BY_PATTERN = {"copy": 2, "read": 1, "write": 1, "triad": 3}
H200 = DeviceInfo("cuda", 0, "NVIDIA H200", "nvidia", memory_bytes=141 * 10**9, cache_bytes=60 * MIB)


@pytest.fixture
def bandwidth():
    return make_operation("bandwidth")


def measure(backend, problem, shape, **options):
    regime = BurstRegime(backend)
    regime.prepare_device()
    pool = backend.make_operand_pool(problem.data, problem.seed)
    return measure_row(SimulatedBandwidth(), problem, shape, regime, pool, StoppingRule(max_seconds=0.1), **options)


# -- shapes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes", "canonical_text"),
    [
        ("256MiB", 256 * MIB, "256MiB"),
        ("1GiB", GIB, "1GiB"),
        ("4096KiB", 4 * MIB, "4MiB"),
        ("1000", 1000, "1000"),
        (" 1024MiB ", GIB, "1GiB"),
    ],
)
def test_sizes_are_read_in_powers_of_two(text, nbytes, canonical_text):
    shape = BandwidthShape.parse(text)
    assert (shape.nbytes, str(shape)) == (nbytes, canonical_text)


# -- problems ----------------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(ACCESS_PATTERNS),
    st.sampled_from(["float32", "float16", "bfloat16", "float64"]),
    st.integers(1, 2**40),
    st.integers(1, 100),
)
def test_work_is_the_bytes_that_all_passes_read_and_write(pattern, dtype, elements, passes):
    nbytes = elements * DTYPES[dtype].itemsize
    work = BandwidthProblem(pattern, dtype, warm=passes).compute_work(BandwidthShape(nbytes))
    assert work.nbytes == work.amount == ARRAYS_BY_PATTERN[pattern] * nbytes * passes
    assert work.flop == {"copy": 0, "read": 1, "write": 0, "triad": 2}[pattern] * elements * passes
    assert work.unit == "TB/s"
    assert ("passes" in work.counting_convention) == (passes > 1)


# -- the operation -----------------------------------------------------------------------------------------------------


def test_the_max_possible_rate_is_that_of_memory_unless_a_cache_may_serve_the_arrays(bandwidth):
    def find_max_rate(text, **fields):
        return bandwidth.find_max_possible_rate(H200, BandwidthProblem(**fields), BandwidthShape.parse(text))

    assert find_max_rate("16GiB") == pytest.approx(1.02 * 4.8e12, rel=0.01)
    assert find_max_rate("64MiB") == pytest.approx(1.02 * 4.8e12 * 128 / 68)
    assert find_max_rate("16MiB") is None
    assert find_max_rate("1GiB", warm=8) is None
    assert bandwidth.find_max_possible_rate(replace(H200, name="x"), BandwidthProblem(), BandwidthShape(GIB)) is None


def test_bandwidth_has_an_axis_a_peak_and_columns(bandwidth, backend):
    shape = BandwidthShape(256 * MIB)
    assert bandwidth.find_axis_position(shape) == shape.nbytes
    assert bandwidth.find_peak_rate(H200, BandwidthProblem()) == pytest.approx(4.8e12)
    row = measure(backend, BandwidthProblem("read", warm=2), shape)
    assert bandwidth.make_columns(row) == {"passes": 2}
    assert bandwidth.make_columns(row, backend.info)["of theoretical"] == f"{100 * row.best_rate / 3.35:.1f} %"
    assert "passes" not in bandwidth.make_columns(replace(row, problem=BandwidthProblem("read")))


# -- measured on the simulated device ----------------------------------------------------------------------------------


def test_a_rate_above_that_of_memory_is_implausible(bandwidth):
    backend = SimulatedBackend(physics=Physics(memory_bandwidth=6e12))
    problem, shape = BandwidthProblem(), BandwidthShape(GIB)
    limit = bandwidth.find_max_possible_rate(backend.info, problem, shape)
    row = measure(backend, problem, shape, max_possible_rate=limit)
    assert row.status == "implausible"
    assert "TB/s" in row.reason


def test_set_replaces_the_default_of_a_command_but_not_an_option(run):
    command = ["bandwidth", "--backend", "cpu", "--size", "1MiB", "--set", "pattern=triad", "--dry-run"]
    code, out, err = run(*command)
    assert (code, "shapes: 1, 1 row in burst" in out) == (0, True), err
    code, _, err = run(*command, "--pattern", "copy")
    assert (code, "pattern is set twice" in err) == (2, True)


def test_a_summary_has_one_unit():
    backend = SimulatedBackend()
    shapes = (BandwidthShape(GIB), BandwidthShape(2**16))
    rows = [measure(backend, BandwidthProblem(), shape) for shape in shapes]
    (best, *_, means) = describe_best_rows(rows, ShareCalculator({"device": asdict(backend.info)}))
    assert "TB/s" in best
    assert means.count("TB/s") == 2
    assert 1e-3 < rows[1].best_rate < 0.5 < 1 < rows[0].best_rate
