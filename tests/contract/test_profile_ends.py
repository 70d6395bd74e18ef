"""Test ``mamf profile`` with processes that end early, optimizers that step in hooks, and two ranks.

Each script runs in a separate process. Run these tests with ``python -m pytest -m emulated``.
"""

import os
import signal
import subprocess
import sys

import pytest

from mamf.profiling.log import read_profile_or_none

pytestmark = pytest.mark.emulated

TRAINING = """
import os, signal, torch
weight = torch.nn.Parameter(torch.zeros(64, 64))
optimizer = torch.optim.SGD([weight])
def steps(count):
    for _ in range(count):
        (weight @ weight).sum().backward()
        optimizer.step()
"""
DISTRIBUTED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters())
for _ in range(8):
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
"""
HOOKS = """
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
optimizers = {parameter: torch.optim.SGD([parameter]) for parameter in model.parameters()}
def step(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(step)
for number in range(12):
    model(torch.ones(8, 64)).sum().backward()
    print("pass", number, flush=True)
"""


#: Code for the hook in HOOKS: the process sends SIGTERM to itself during the fifth backward pass.
TERMINATE = """
    if number == 4:
        import os, signal
        os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.fixture
def run(tmp_path):
    def start(text, *arguments, ranks=0):
        (tmp_path / "train.py").write_text(text)
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks else []
        command = [sys.executable, *torchrun, "-m", "mamf", "profile", "--warmup", "1", "--steps", "2", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MAMF_CACHE": str(tmp_path)}
        return subprocess.run([*command, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)

    return start


def test_a_process_that_calls_os_exit_still_writes_its_profile(run, tmp_path):
    process = run(f"{TRAINING}\nsteps(5)\nos._exit(7)", "--output", "step.jsonl", "--trace", "trace.json")
    assert process.returncode == 7
    assert ": 2 steps of" in process.stdout
    assert read_profile_or_none(tmp_path / "step.jsonl")[1].steps == 2
    assert (tmp_path / "trace.json").exists()


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (9, ": 2 steps of"),
        (4, ": 1 step of"),
        (2, "mamf: nothing was profiled: the script took 2 of 5 steps"),
    ],
)
def test_sigterm_reports_the_steps_until_then(run, tmp_path, count, message):
    process = run(f"{TRAINING}\nsteps({count})\nos.kill(os.getpid(), signal.SIGTERM)", "--output", "step.jsonl")
    assert process.returncode == -signal.SIGTERM
    assert message in process.stdout + process.stderr
    assert (tmp_path / "step.jsonl").exists() == (count > 2)


def test_sigterm_waits_for_the_end_of_a_backward_pass(run):
    process = run(HOOKS.replace("optimizers[parameter].zero_grad()", TERMINATE))
    assert process.returncode == -signal.SIGTERM
    assert ": 1 step of" in process.stdout


@pytest.mark.parametrize(("option", "passes"), [("--nvtx", 12), ("--stop", 4)])
def test_optimizers_that_step_within_backward_end_one_step(run, tmp_path, option, passes):
    process = run(HOOKS, option, "--output", "step.jsonl")
    assert process.returncode == 0, process.stderr
    assert sum(line.startswith("pass ") for line in process.stdout.splitlines()) == passes
    _, profile = read_profile_or_none(tmp_path / "step.jsonl")
    assert profile.steps == 2
    # The matmuls of a step: 4 in the forward pass, 4 for the gradients of the weights, and 3 for the gradients of the
    # inputs (the first layer needs none).
    assert profile.flop == profile.steps * (4 + 4 + 3) * 2 * 8 * 64 * 64


def test_all_ranks_are_profiled_and_stop_together(run, tmp_path):
    process = run(DISTRIBUTED, "--ranks", "all", "--stop", "--output", "ranks", ranks=2)
    assert process.returncode == 0, process.stderr
    assert "train.py on the CPU: 2 steps" in process.stdout
    assert sorted(path.name for path in (tmp_path / "ranks").iterdir()) == ["rank-0.jsonl", "rank-1.jsonl"]
    show_process = subprocess.run(
        [sys.executable, "-m", "mamf", "show", "ranks"], cwd=tmp_path, capture_output=True, text=True
    )
    assert "train.py on 2 ranks: 2 x the CPU" in show_process.stdout
