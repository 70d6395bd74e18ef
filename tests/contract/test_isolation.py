"""Test the check of a kernel by a fresh process that never imports the kernel.

In most tests, a thread takes the place of the fresh process, and also communicates over pipes.
"""

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mamf.engine import isolation
from mamf.engine.regimes import BurstRegime, StoppingRule
from mamf.engine.regimes.base import CheckedKernel
from mamf.engine.runner import Runner, Step, get_isolated_checker
from mamf.kernel import Verdict
from mamf.operations import isolated
from mamf.operations.attention.operation import AttentionProblem, AttentionShape
from mamf.operations.attention.torch_kernels import SdpaMath
from mamf.operations.isolated import Channel, ChannelError
from mamf.operations.matmul.scaled_formats import DequantizedMatmul, ScaledMm
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.operations.matmul.torch_kernels import IntMm, TorchMm
from mamf.plugins.discovery import make_kernel, make_operation, open_backend

SHAPE = MatmulShape(96, 80, 64)


class Own(TorchMm):
    """An honest matmul kernel, which the tests load by path."""

    name = "own"


class OwnInt(IntMm):
    name = "own-int"


class OwnScaled(ScaledMm):
    name = "own-scaled"


class OwnDequantized(DequantizedMatmul):
    name = "own-dequantized"


class OwnAttention(SdpaMath):
    name = "own-attention"


class Passing(Own):
    """A matmul that writes zeros, and replaces the verification in the process that measures it."""

    name = "passing"

    def bind_operands(self, problem, a, b, c):
        CheckedKernel._record_verdict = lambda self, verdict, index: None
        return c.zero_, 1.0


class Judging(Own):
    """A matmul that computes nothing, and replaces its verification by one that accepts every result."""

    name = "judging"

    def prepare(self, *arguments):
        ready = super().prepare(*arguments)
        launches = [lambda: time.sleep(1e-5) for _ in ready.launches]  # an empty launch would be implausibly fast
        return replace(
            ready, launches=launches, verify=lambda index, result: Verdict(0.0, 1.0), verify_whole_output=None
        )


class Ending(Own):
    name = "ending"

    def bind_operands(self, problem, a, b, c):
        def launch():
            if Ending.raised:
                raise Ending.raised
            torch.mm(a, b, out=c)

        return launch, 1.0

    raised = None


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """Start threads in place of checking processes. Return the list of started threads."""
    monkeypatch.setattr(CheckedKernel, "_record_verdict", CheckedKernel._record_verdict)
    monkeypatch.setattr(isolated, "_TRIAL_TARGET_SECONDS", 1e-3)
    started, opened = [], []

    def pair():
        reading, writing = os.pipe()
        opened.extend((os.fdopen(reading, "rb"), os.fdopen(writing, "wb")))
        return opened[-2:]

    def start():
        (asked, ask), (answered, answer) = pair(), pair()
        thread = threading.Thread(target=isolated.answer_check_requests, args=(Channel(asked, answer),), daemon=True)
        thread.start()
        started.append(thread)
        return SimpleNamespace(stdin=ask, stdout=answered, kill=ask.close)

    monkeypatch.setattr(isolation, "_start_checking_process", start)
    yield started
    for stream in opened[1::2]:
        stream.close()
    for thread in started:
        thread.join()


def row_of(kernel, problem=None, shape=SHAPE, everything=None, backend=None):
    cpu = backend or open_backend("cpu")
    get_isolated_checker(cpu).checks_all_kernels = everything
    regime, rule = BurstRegime(cpu), StoppingRule(max_seconds=0.0)
    step = Step(kernel, problem or MatmulProblem("float32", "float32"), shape, regime, rule)

    def steps():
        yield step

    (row,) = Runner(cpu).measure_steps(steps())
    return row


def by_path(kind, of="matmul"):
    return make_kernel(make_operation(of), f"{__name__}:{kind.__name__}")


@pytest.mark.parametrize("kind", [Passing, Judging])
def test_a_kernel_that_replaces_the_check_passes_it_but_not_that_of_another_process(process, kind):
    row = row_of(by_path(kind))
    assert row.status == "wrong_result"
    assert row.reason.startswith("a check in a fresh process failed: relative error ")
    assert row_of(by_path(kind), everything=False).ok


HONEST = [(Own, "float32"), (Own, "bfloat16"), (OwnInt, "int8"), (OwnScaled, "fp8"), (OwnDequantized, "fp8_rowwise")]


@pytest.mark.parametrize(("kind", "dtype"), HONEST)
def test_an_honest_kernel_by_path_passes(process, kind, dtype):
    problem = make_operation("matmul").make_problem(open_backend("cpu"), {"dtype": dtype})
    row = row_of(by_path(kind), problem)
    if row.status == "unsupported":
        pytest.skip(row.reason)
    assert (row.status, row.remarks) == ("ok", ())
    assert len(process) == 1


@pytest.mark.parametrize("direction", ["fwd", "fwd+bwd"])
def test_attention_passes_in_every_direction(process, direction):
    problem = AttentionProblem("float32", direction=direction)
    row = row_of(by_path(OwnAttention, "attention"), problem, AttentionShape.parse("b1h2q64k64d32c"))
    assert (row.status, row.remarks) == ("ok", ())
    assert len(process) == 1


def test_registered_kernels_are_checked_here_unless_asked(process):
    assert row_of(TorchMm()).ok
    assert not process
    assert row_of(TorchMm(), everything=True).ok
    assert len(process) == 1


def test_a_clock_that_runs_slowly_is_found(process, monkeypatch):
    """Use a virtual clock, by which the launches take three times as long as the row says."""
    ticks = iter(range(100))
    monkeypatch.setattr(isolated, "time", SimpleNamespace(perf_counter=lambda: 3.0 * next(ticks)))
    monkeypatch.setattr(isolated, "_TRIAL_TARGET_SECONDS", 1.0)
    sent: list[dict[str, int]] = []
    channel = SimpleNamespace(send=lambda **fields: sent.append(fields), receive=lambda: ({}, []))
    assert isolated._check_reported_time(channel, 0.01) == {
        "slow": "100 launches take 3 s by the clock of the checking process, 3 times the reported time"
    }
    assert sent == 3 * [{"launches": 100}]
    assert isolated._check_reported_time(channel, 1.5) == {}  # the device may run at half its burst clock
    assert sent[3:] == [{"launches": 1}]


@pytest.mark.parametrize(("is_busy", "status"), [(True, "ok"), (False, "wrong_result")])
def test_slow_launches_are_a_fault_only_on_an_idle_machine(process, monkeypatch, is_busy, status):
    monkeypatch.setattr(isolated, "serve_launches", lambda *arguments: {"slow": "3 times the reported time"})
    monkeypatch.setattr(isolation, "is_machine_busy", lambda backend: is_busy)
    row = row_of(by_path(Own))
    assert row.status == status
    assert "3 times the reported time" in (row.reason + "".join(row.remarks))


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (RuntimeError("this ended"), "wrong_result", "RuntimeError: this ended"),
        (MemoryError("no room"), "ok", "a fresh process could not check this kernel: MemoryError: no room"),
    ],
)
def test_what_a_launch_raises_there_refuses_it_unless_memory_is_short(process, monkeypatch, error, status, said):
    kernel, serve = by_path(Ending), isolated.serve_launches

    def ending(*arguments):
        monkeypatch.setattr(Ending, "raised", error)
        return serve(*arguments)

    monkeypatch.setattr(isolated, "serve_launches", ending)
    row = row_of(kernel)
    assert row.status == status
    assert "".join((row.reason, *row.remarks)).endswith(said)


def test_an_operation_whose_results_stay_on_the_device_says_so(process):
    of, cpu = make_operation("bandwidth"), open_backend("cpu")
    kernel = make_kernel(of, "torch")
    problem = of.make_problem(cpu, {"pattern": "copy"})
    row = row_of(kernel, problem, of.parse_shape("1MiB"), everything=True)
    assert row.remarks == (
        "a fresh process could not check this kernel: launches of bandwidth return no tensors to check",
    )
    assert not process


def test_a_cut_message_is_an_error():
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as source, os.fdopen(writing, "wb") as sink:
        Channel(source, sink).send(b"abc", b"", one=1)
        assert Channel(source, sink).receive() == ({"one": 1}, [b"abc", b""])
        sink.write(b"no message\n")
        sink.flush()
        with pytest.raises(ChannelError):
            Channel(source, sink).receive()


def test_the_process_that_checks_ends_quietly_if_the_other_process_is_gone():
    (asked, ask), (answered, answer) = os.pipe(), os.pipe()
    of = make_operation("matmul")
    problem = of.make_problem_record(MatmulProblem("float32", "float32"))
    with os.fdopen(asked, "rb") as source, os.fdopen(ask, "wb") as sink, os.fdopen(answer, "wb") as gone:
        Channel(source, sink).send(operation="matmul", problem=problem, shape=of.make_shape_record(SHAPE), seconds=1.0)
        os.close(answered)
        isolated.answer_check_requests(Channel(source, gone))


def test_an_interrupt_ends_the_process_that_checks(process, monkeypatch):
    def serve(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(isolated, "serve_launches", serve)
    cpu = open_backend("cpu")
    with pytest.raises(KeyboardInterrupt):
        row_of(by_path(Own), backend=cpu)
    process[0].join(timeout=10)
    assert not process[0].is_alive()
    assert get_isolated_checker(cpu)._checking_process is None


@pytest.mark.emulated
@pytest.mark.parametrize(("isolate", "code"), [([], 1), (["--no-isolate"], 0)])
def test_a_sweep_of_a_kernel_by_path_starts_a_process_that_finds_it_wrong(tmp_path, isolate, code):
    asked = ["sweep", "--backend", "cpu", "--kernel", "test_isolation:Passing", "--shapes", "256x256x256", *isolate]
    command = [sys.executable, "-m", "mamf", *asked, "--output", str(tmp_path / "run.jsonl")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert ran.returncode == code, ran.stderr
    assert ("wrong_result: a check in a fresh process failed: relative error" in ran.stderr + ran.stdout) == bool(code)
