"""Simulate a machine for tests of the Python API and of the examples in its documentation."""

from __future__ import annotations

import shutil
from dataclasses import replace
from importlib.metadata import EntryPoint

from finder_log_samples import V2G

import mamf
from mamf.backend import CheckResult
from mamf.engine.search import grid
from mamf.engine.search.strategy import GridSearchStrategy
from mamf.operations.matmul.shapes import MatmulGrid
from mamf.plugins import discovery
from mamf.testing import SimulatedMatmul

POINTS = {
    discovery.BACKEND_GROUP: {"simulated": "mamf.testing:SimulatedBackend"},
    discovery.MATMUL_KERNEL_GROUP: {"simulated.mm": "mamf.testing:SimulatedMatmul"},
    "mamf.attention_kernels": {"simulated-attention": "mamf.testing:SimulatedAttention"},
    "mamf.bandwidth_kernels": {"simulated-bandwidth": "mamf.testing:SimulatedBandwidth"},
}


def short(original_plan_search, sizes=(4096, 8192), scouts=6):
    """Return a ``plan_search`` whose plans have few shapes."""

    def plan_search(*arguments, **options):
        plan, kernels = original_plan_search(*arguments, **options)
        return replace(
            plan, options=replace(plan.options, grid=MatmulGrid(sizes, sizes, sizes), scouts=scouts, refinements=0)
        ), kernels

    return plan_search


def install(monkeypatch):
    """Make the simulated accelerator the only accelerator of this machine, and make searches short."""
    find_installed_entry_points = discovery.find_entry_points

    def find_entry_points(group):
        if group not in POINTS:
            return find_installed_entry_points(group=group)
        return [EntryPoint(name, value, group) for name, value in POINTS[group].items()]

    monkeypatch.setattr(discovery, "find_entry_points", find_entry_points)
    monkeypatch.setattr(SimulatedMatmul, "is_default", True)
    monkeypatch.setattr(GridSearchStrategy, "max_distant_shapes", 1)
    monkeypatch.setattr("mamf.api.measuring.plan_search", short(grid.plan_search))
    monkeypatch.setattr("mamf.machine.environment.check_host_load", lambda: CheckResult("host load", "ok", "idle"))


def write_logs(folder):
    """Write the logs that the examples in the documentation read."""
    list(mamf.sweep(["4096x4096x4096", "8192x8192x8192"], log=folder / "sweep.jsonl"))
    for name in ("before", "after"):
        shutil.copy(folder / "sweep.jsonl", folder / f"{name}.jsonl")
    mamf.find("bfloat16", log=folder / "find.jsonl")
    list(mamf.attention(["b1h16q4096k4096d128"], log=folder / "attention.jsonl"))
    list(mamf.bandwidth(["1GiB"], log=folder / "bandwidth.jsonl"))
    (folder / "finder.txt").write_text(V2G)
