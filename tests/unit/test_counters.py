"""Test how mamf reads the output of ncu, and how it finds what limits a kernel. The data in data/ncu.csv were recorded
by ncu 2025.3 on an H200.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.profiling.counters import ncu
from mamf.profiling.counters.ncu import (
    DRAM_BYTES_READ,
    L2_HIT_PERCENT,
    NCU_METRICS,
    TENSOR_PIPE_PERCENT,
    DeviceKernelCounters,
    LaunchCounters,
    find_kernel_bound,
    find_launch_bound,
    make_launch_counters,
    shorten_kernel_name,
)

DATA = Path(__file__).parent / "data"
NCU_OUTPUT = (DATA / "ncu.csv").read_text()
KERNELS = ncu.parse_kernel_counters(NCU_OUTPUT)
#: The recorded kernels: torch.mm, the forward passes of flash and cuDNN attention, the five kernels of the backward
#: pass of flash attention, an addition by Triton, and three launches of a small matmul.
MM, FLASH, CUDNN, *BACKWARD, ADD, SMALL, SMALL_AGAIN, SMALL_ONCE_MORE = KERNELS
SHAPE = MatmulShape(4096, 4096, 4096)


def make_launch(*kernels):
    return LaunchCounters("torch.mm", MatmulProblem(), SHAPE, kernels, (sum(each.cycles for each in kernels),))


# -- output of ncu ---------------------------------------------------------------------------------------------------


def test_figures_are_read_from_output_that_contains_messages():
    assert len(KERNELS) == 12
    assert (MM.name, MM.grid, MM.block) == (
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT",
        "(2, 66, 1)",
        "(384, 1, 1)",
    )
    assert (MM.cycles, MM.seconds, MM.metrics[TENSOR_PIPE_PERCENT]) == (285342.0, pytest.approx(175.168e-6), 90.30)
    assert MM.dram_bytes == 149_646_080 + 28_192_512
    assert MM.occupancy_limiters == ("registers", "shared memory")
    assert not [name for each in KERNELS for name in NCU_METRICS if each.metrics[name] is None]
    assert ncu.parse_kernel_counters(NCU_OUTPUT.replace('"285,342"', '"n/a"'))[0].cycles is None


def test_output_of_the_program_is_not_read_as_figures():
    output = (
        f'torch.mm 4096\n{{"preparing_seconds": 1.5}}\n"quoted", and more\n{NCU_OUTPUT}"ID"\n"1","2"\n==ERROR== x\n'
    )
    assert ncu.parse_kernel_counters(output) == KERNELS
    assert (
        ncu.parse_kernel_counters("")
        == ncu.parse_kernel_counters("no csv\n")
        == ncu.parse_kernel_counters('"a"\n')
        == []
    )
    assert ncu.parse_kernel_counters(NCU_OUTPUT[: len(NCU_OUTPUT) // 2])[:4] == KERNELS[:4]


def test_a_failure_of_ncu_is_explained():
    crash_output = "==ERROR== The application returned an error code (11).\n"
    assert (
        ncu.explain_ncu_failure(crash_output, "mamf: it broke\n")
        == "mamf: it broke / The application returned an error code (11)."
    )
    assert ncu.explain_ncu_failure("", "") == "ncu counted no kernel and printed no reason"


# -- launches and their sums -----------------------------------------------------------------------------------------


def group_launches(kernels, count):
    return make_launch_counters("torch.mm", MatmulProblem(), SHAPE, kernels, count)


def test_launches_of_the_same_kernels_are_separated_and_their_median_is_taken():
    counters = group_launches([SMALL, SMALL_AGAIN, SMALL_ONCE_MORE], 3)
    assert counters.cycles_by_launch == (6680, 6460, 6740)
    assert (counters.summed_counters.cycles, counters.summed_counters.metrics[L2_HIT_PERCENT]) == (6680, 59.75)
    assert [each.name for each in group_launches([*BACKWARD, *BACKWARD], 2).device_kernels] == [
        each.name for each in BACKWARD
    ]


@pytest.mark.parametrize(("kernels", "count"), [([MM, FLASH], 2), ([MM, MM, MM], 2), ([], 1), ([MM], 2)])
def test_launches_that_ran_different_kernels_have_no_counters(kernels, count):
    counters = group_launches(kernels, count)
    assert not counters.has_counters
    assert "did not all run the same kernels" in counters.missing_reason


def test_counters_of_a_launch_are_the_sum_of_its_kernels():
    total = make_launch(*BACKWARD).summed_counters
    assert total.name == "5 kernels"
    assert total.cycles == sum(each.cycles for each in BACKWARD) == 1_442_759
    assert total.seconds == pytest.approx(794.784e-6)
    assert total.dram_bytes == 202_002_432 + 61_282_048
    assert TENSOR_PIPE_PERCENT not in total.metrics
    assert make_launch(MM).summed_counters is MM
    mm_without_dram_reads = replace(MM, metrics={**MM.metrics, DRAM_BYTES_READ: None})
    assert make_launch(MM, mm_without_dram_reads).summed_counters.dram_bytes is None


# -- limiters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "limiter", "evidence"),
    [
        (MM, "tensor pipe", "90.3 % of its peak"),
        (ADD, "memory", "89.1 % of its peak"),
        (
            FLASH,
            "latency",
            "at 37.7 %; occupancy: 11.5 % achieved, 12.5 % possible, limited by its registers and shared memory",
        ),
        (CUDNN, "latency", "the busiest is tensor pipe at 52.2 %; occupancy: 14.1 % achieved, 18.8 % possible"),
        (SMALL, "launch", "too little work: 0.06 waves, 8 blocks; no part of the device is near its peak; the busiest"),
        (BACKWARD[0], "other pipes", "61.9 % of its peak"),
        (BACKWARD[1], "latency", "the busiest is other pipes at 59.6 %; occupancy: 87.4 % achieved, 100 % possible"),
        (BACKWARD[2], "L2", "82.8 % of its peak"),
        (BACKWARD[3], "latency", "the busiest is L1 and shared memory at 54.3 %"),
    ],
    ids=lambda value: shorten_kernel_name(value.name) if isinstance(value, DeviceKernelCounters) else None,
)
def test_the_limiter_of_each_recorded_kernel_is_named(kernel, limiter, evidence):
    bound = find_kernel_bound(kernel)
    assert bound.limiter == limiter
    assert evidence in bound.evidence


def test_a_launch_is_bound_by_its_gaps_or_by_its_longest_kernel():
    backward = make_launch(*BACKWARD)
    bound = find_launch_bound(backward, interval_seconds=800e-6)
    assert bound.limiter == "latency"
    assert "in flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel (89 % of the launch's cycles)" in bound.evidence
    bound_with_gaps = find_launch_bound(backward, interval_seconds=2e-3)
    assert (bound_with_gaps.limiter, bound_with_gaps.evidence) == (
        "launch",
        "its 5 kernels run for only 40 % of the 2000 us between two launches",
    )
    assert find_launch_bound(make_launch(MM)).evidence == "90.3 % of its peak"
