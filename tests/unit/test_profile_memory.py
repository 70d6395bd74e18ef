"""Test ``mamf profile --memory``: what the peak memory consists of, and the memory snapshot on a CUDA device."""

from pathlib import Path
from types import SimpleNamespace

import torch
from test_profile_command import SHORTLY, TINY, profiled, script

from mamf.cli import main
from mamf.profiling.log import read_profile_or_none
from mamf.profiling.watches import MemoryWatch

__all__ = ["script"]

ADAMW = TINY.replace("SGD", "AdamW").replace("torch.zeros(2, 2)", "torch.zeros(16, 16)")
MATRIX = 16 * 16 * 4


def test_the_memory_of_the_optimizers_is_reported_by_kind(script, tmp_path, capsys):
    log, file = tmp_path / "step.jsonl", tmp_path / "memory.pickle"
    arguments = ["--memory", str(file), "--output", str(log)]
    profile = profiled(capsys, *arguments, script(ADAMW))
    # The state of AdamW is two moments per parameter and a step count of 4 bytes.
    expected_bytes = {
        "parameters": MATRIX,
        "gradients": MATRIX,
        "optimizer state": 2 * MATRIX + 4,
        "the rest": None,
        "peak": None,
    }
    assert {row["part"]: row["bytes"] for row in profile["memory"]} == expected_bytes
    assert not file.exists()
    assert {row.name: row.nbytes for row in read_profile_or_none(log)[1].memory} == expected_bytes
    assert main([*SHORTLY, "--memory", str(file), script(TINY)]) == 0
    assert (
        capsys.readouterr().err.count("there is no memory snapshot, because torch keeps the history of allocations on")
        == 1
    )
    assert main(["show", str(log)]) == 0
    out = capsys.readouterr().out
    assert "optimizer state" in out and "the CPU does not report its peak memory" in " ".join(out.split())
    assert main(["show", str(log), "--ceiling", str(log)]) == 2
    assert "give --ceiling to 'mamf profile' instead" in " ".join(capsys.readouterr().err.split())


def make_history_entry(action, address, size, microseconds):
    return {"action": action, "addr": address, "size": size, "time_us": microseconds}


#: A history of allocations as torch keeps it. Address 9 was allocated before the history began. The allocation of
#: address 3 reaches the peak.
HISTORY = [
    make_history_entry("alloc", 1, 100, 10),
    make_history_entry("free_requested", 9, 50, 11),
    make_history_entry("segment_alloc", 1, 10_000, 12),
    make_history_entry("alloc", 2, 30, 15),
    make_history_entry("free_requested", 2, 30, 16),
    make_history_entry("alloc", 2, 20, 17),
    make_history_entry("alloc", 3, 400, 30),
    make_history_entry("free_requested", 1, 100, 40),
    make_history_entry("alloc", 4, 50, 50),
    make_history_entry("free_requested", 4, 50, 60),
]


class FakeCuda:
    """A fake torch.cuda that reports ``peak`` bytes and records calls.

    ``snapshot_error``: an error that a snapshot raises.
    """

    def __init__(self, monkeypatch, peak=10 * MATRIX, snapshot_error=None):
        self.calls, self.snapshot_error = [], snapshot_error
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: self.calls.append("reset"))
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", self.dump)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [HISTORY]})
        monkeypatch.setattr("mamf.profiling.running.wait_for_device", lambda: None)

    def record(self, enabled="all", max_entries=0):
        self.calls.append(f"history {enabled}")

    def dump(self, path):
        if self.snapshot_error:
            raise self.snapshot_error
        Path(path).write_text("a snapshot")


def make_tensor(nbytes, device="cuda:0", **attributes):
    return SimpleNamespace(device=device, numel=lambda: nbytes // 4, element_size=lambda: 4, **attributes)


def test_a_snapshot_covers_the_profiled_steps_and_its_parts_add_up_to_the_peak(tmp_path, monkeypatch):
    cuda, file = FakeCuda(monkeypatch, peak=1000), tmp_path / "memory.pickle"
    weight = make_tensor(80, grad=make_tensor(40))
    state = {"weight": {"exp_avg": make_tensor(160), "step": make_tensor(4, "cpu"), "count": 3}}
    optimizer = SimpleNamespace(param_groups=[{"params": [weight]}, {"params": [weight]}], state=state)
    watch = MemoryWatch(file)
    watch.record_optimizer_step(
        SimpleNamespace(param_groups=[{"params": [make_tensor(4, grad=None)]}], state={})
    )  # a warm-up step, before the watch starts
    watch.start()
    watch.record_optimizer_step(optimizer)
    watch.record_optimizer_step(optimizer)
    watch.module_spans += [(14_000, 18_000, "layers.0.mlp: Mlp"), (9_000, 18_000, "layers.0: Block")]
    watch.finish()
    watch.finish()
    assert cuda.calls == ["reset", "history all", "history None"]
    assert file.read_text() == "a snapshot"
    assert [(row.name, row.nbytes) for row in watch.rows] == [
        ("parameters", 80),
        ("gradients", 40),
        ("optimizer state", 160),
        ("the rest", 720),
        ("peak", 1000),
        ("in no module", 400),
        ("in layers.*: Block", 100),
        ("in layers.*.mlp: Mlp", 20),
    ]
    assert watch.remark == ""


def test_a_full_disk_does_not_end_the_script(script, tmp_path, capsys, monkeypatch):
    FakeCuda(monkeypatch, snapshot_error=OSError(28, "No space left on device"))
    code = main([*SHORTLY, "--memory", str(tmp_path / "memory.pickle"), script(f"{TINY}\nraise SystemExit(5)")])
    assert code == 5
    assert "mamf could not take a memory snapshot: " in capsys.readouterr().err
