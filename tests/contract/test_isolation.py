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


class HonestMm(TorchMm):
    """An honest matmul kernel, which the tests load by path."""

    name = "honest"


class HonestIntMm(IntMm):
    name = "honest-int"


class HonestScaledMm(ScaledMm):
    name = "honest-scaled"


class HonestDequantizedMatmul(DequantizedMatmul):
    name = "honest-dequantized"


class HonestAttention(SdpaMath):
    name = "honest-attention"


class ReplacesRecording(HonestMm):
    """A matmul that writes zeros, and replaces the verification in the process that measures it."""

    name = "replaces-recording"

    def bind_operands(self, problem, a, b, c):
        CheckedKernel._record_verdict = lambda self, verdict, index: None
        return c.zero_, 1.0


class ReplacesVerification(HonestMm):
    """A matmul that computes nothing, and replaces its verification by one that accepts every result."""

    name = "replaces-verification"

    def prepare(self, *arguments):
        prepared = super().prepare(*arguments)
        launches = [lambda: time.sleep(1e-5) for _ in prepared.launches]  # an empty launch would be implausibly fast
        return replace(
            prepared, launches=launches, verify=lambda index, result: Verdict(0.0, 1.0), verify_whole_output=None
        )


class Raising(HonestMm):
    name = "raising"

    def bind_operands(self, problem, a, b, c):
        def launch():
            if Raising.error:
                raise Raising.error
            torch.mm(a, b, out=c)

        return launch, 1.0

    error = None


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """Start threads in place of checking processes. Return the list of started threads."""
    monkeypatch.setattr(CheckedKernel, "_record_verdict", CheckedKernel._record_verdict)
    monkeypatch.setattr(isolated, "_TRIAL_TARGET_SECONDS", 1e-3)
    threads, streams = [], []

    def open_pipe():
        reading, writing = os.pipe()
        streams.extend((os.fdopen(reading, "rb"), os.fdopen(writing, "wb")))
        return streams[-2:]

    def start():
        (request_reader, request_writer), (answer_reader, answer_writer) = open_pipe(), open_pipe()
        thread = threading.Thread(
            target=isolated.answer_check_requests, args=(Channel(request_reader, answer_writer),), daemon=True
        )
        thread.start()
        threads.append(thread)
        return SimpleNamespace(stdin=request_writer, stdout=answer_reader, kill=request_writer.close)

    monkeypatch.setattr(isolation, "_start_checking_process", start)
    yield threads
    # Close this process's ends of the pipes first, so that the threads end before their own ends are closed.
    for stream in (*streams[1::4], *streams[2::4]):
        stream.close()
    for thread in threads:
        thread.join()
    for stream in (*streams[::4], *streams[3::4]):
        stream.close()


def measure_one_row(kernel, problem=None, shape=SHAPE, checks_all_kernels=None, backend=None):
    cpu = backend or open_backend("cpu")
    get_isolated_checker(cpu).checks_all_kernels = checks_all_kernels
    regime, rule = BurstRegime(cpu), StoppingRule(max_seconds=0.0)
    step = Step(kernel, problem or MatmulProblem("float32", "float32"), shape, regime, rule)

    def yield_step():
        yield step

    (row,) = Runner(cpu).measure_steps(yield_step())
    return row


def load_by_path(kernel_class, operation="matmul"):
    return make_kernel(make_operation(operation), f"{__name__}:{kernel_class.__name__}")


@pytest.mark.parametrize("kernel_class", [ReplacesRecording, ReplacesVerification])
def test_a_kernel_that_replaces_the_check_in_its_process_fails_that_in_a_fresh_process(process, kernel_class):
    row = measure_one_row(load_by_path(kernel_class))
    assert row.status == "wrong_result"
    assert row.reason.startswith("a check in a fresh process failed: relative error ")
    assert measure_one_row(load_by_path(kernel_class), checks_all_kernels=False).ok


HONEST_CASES = [
    (HonestMm, "float32"),
    (HonestMm, "bfloat16"),
    (HonestIntMm, "int8"),
    (HonestScaledMm, "fp8"),
    (HonestDequantizedMatmul, "fp8_rowwise"),
]


@pytest.mark.parametrize(("kernel_class", "dtype"), HONEST_CASES)
def test_an_honest_kernel_by_path_passes(process, kernel_class, dtype):
    problem = make_operation("matmul").make_problem(open_backend("cpu"), {"dtype": dtype})
    row = measure_one_row(load_by_path(kernel_class), problem)
    if row.status == "unsupported":
        pytest.skip(row.reason)
    assert (row.status, row.remarks) == ("ok", ())
    assert len(process) == 1


@pytest.mark.parametrize("direction", ["fwd", "fwd+bwd"])
def test_attention_passes_in_every_direction(process, direction):
    problem = AttentionProblem("float32", direction=direction)
    row = measure_one_row(load_by_path(HonestAttention, "attention"), problem, AttentionShape.parse("b1h2q64k64d32c"))
    assert (row.status, row.remarks) == ("ok", ())
    assert len(process) == 1


def test_registered_kernels_are_checked_in_a_fresh_process_only_on_request(process):
    assert measure_one_row(TorchMm()).ok
    assert not process
    assert measure_one_row(TorchMm(), checks_all_kernels=True).ok
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
    row = measure_one_row(load_by_path(HonestMm))
    assert row.status == status
    assert "3 times the reported time" in (row.reason + "".join(row.remarks))


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RuntimeError("this ended"), "wrong_result", "RuntimeError: this ended"),
        (MemoryError("no room"), "ok", "a fresh process could not check this kernel: MemoryError: no room"),
    ],
)
def test_an_error_in_the_fresh_process_is_a_wrong_result_unless_memory_is_short(
    process, monkeypatch, error, status, message
):
    kernel, serve = load_by_path(Raising), isolated.serve_launches

    def serve_and_raise(*arguments):
        monkeypatch.setattr(Raising, "error", error)
        return serve(*arguments)

    monkeypatch.setattr(isolated, "serve_launches", serve_and_raise)
    row = measure_one_row(kernel)
    assert row.status == status
    assert "".join((row.reason, *row.remarks)).endswith(message)


def test_an_operation_whose_launches_return_no_tensors_is_not_checked_and_says_so(process):
    operation, cpu = make_operation("bandwidth"), open_backend("cpu")
    kernel = make_kernel(operation, "torch")
    problem = operation.make_problem(cpu, {"pattern": "copy"})
    row = measure_one_row(kernel, problem, operation.parse_shape("1MiB"), checks_all_kernels=True)
    assert row.remarks == (
        "a fresh process could not check this kernel: launches of bandwidth return no tensors to check",
    )
    assert not process


def test_a_malformed_message_is_an_error():
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as source, os.fdopen(writing, "wb") as sink:
        Channel(source, sink).send(b"abc", b"", one=1)
        assert Channel(source, sink).receive() == ({"one": 1}, [b"abc", b""])
        sink.write(b"no message\n")
        sink.flush()
        with pytest.raises(ChannelError):
            Channel(source, sink).receive()


def test_the_checking_process_ends_quietly_if_the_measuring_process_is_gone():
    (request_reader, request_writer), (answer_reader, answer_writer) = os.pipe(), os.pipe()
    operation = make_operation("matmul")
    problem = operation.make_problem_record(MatmulProblem("float32", "float32"))
    with (
        os.fdopen(request_reader, "rb") as requests,
        os.fdopen(request_writer, "wb") as request_sink,
        os.fdopen(answer_writer, "wb") as answer_sink,
    ):
        Channel(requests, request_sink).send(
            operation="matmul", problem=problem, shape=operation.make_shape_record(SHAPE), seconds=1.0
        )
        os.close(answer_reader)
        isolated.answer_check_requests(Channel(requests, answer_sink))


def test_an_interrupt_ends_the_checking_process(process, monkeypatch):
    def serve(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(isolated, "serve_launches", serve)
    cpu = open_backend("cpu")
    with pytest.raises(KeyboardInterrupt):
        measure_one_row(load_by_path(HonestMm), backend=cpu)
    process[0].join(timeout=10)
    assert not process[0].is_alive()
    assert get_isolated_checker(cpu)._checking_process is None


@pytest.mark.emulated
@pytest.mark.parametrize(("isolate", "code"), [([], 1), (["--no-isolate"], 0)])
def test_a_sweep_of_a_kernel_by_path_starts_a_process_that_finds_it_wrong(tmp_path, isolate, code):
    kernel = ["--kernel", "test_isolation:ReplacesRecording", *isolate]
    sweep = ["sweep", "--backend", "cpu", "--shapes", "256x256x256", *kernel]
    command = [sys.executable, "-m", "mamf", *sweep, "--output", str(tmp_path / "run.jsonl")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    sweep_process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert sweep_process.returncode == code, sweep_process.stderr
    output = sweep_process.stdout + sweep_process.stderr
    assert ("wrong_result: a check in a fresh process failed: relative error" in output) == bool(code)
