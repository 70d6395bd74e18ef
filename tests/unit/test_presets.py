"""Test presets: the matmuls of the layers of known models, and runs whose rows name these layers."""

import csv
import io
import json
from functools import partial
from pathlib import Path

import pytest
from made_plans import kernels_plan, sweep_plan

from mamf.errors import UsageError
from mamf.logs.run_log import read_run_log
from mamf.operation import Preset as OperationPreset
from mamf.operations.grouped import EXPERT_LAYER_SIZES, GroupedKernel, GroupedOperation, GroupedShape
from mamf.operations.grouped import EXPERT_PRESETS as GROUPED_PRESETS
from mamf.operations.matmul.shapes import LAYOUT_BY_LAYER_PASS, MatmulProblem, MatmulShape
from mamf.testing.simulated_kernels import prepare_simulated_launches

MODULE = Path(__file__).stem
DEVICE = ["--backend", "mamf.testing:SimulatedBackend"]
SWEEP = ["sweep", *DEVICE, "--kernel", "mamf.testing:SimulatedMatmul"]
BRIEF = [*SWEEP, "--preset", "llama-8b", "--m", "64", "--time-limit", "0.01s"]


# -- layers and layouts ------------------------------------------------------------------------------------------------


def test_each_matmul_of_a_layer_reads_operands_in_their_stored_layout():
    """Check the layout of each matmul of a linear layer, whose x, W and dy are always stored by rows.

    The dimension over which a matmul sums decides whether it reads an operand as it is stored (n) or transposed (t).
    """
    stored = {"x": ("tokens", "inputs"), "W": ("outputs", "inputs"), "dy": ("tokens", "outputs")}
    operands = {
        "forward": ("x", "W", "inputs"),
        "grad-input": ("dy", "W", "outputs"),
        "grad-weight": ("dy", "x", "tokens"),
    }
    for layer_pass, (a, b, summed_dimension) in operands.items():
        as_multiplied = stored[a][1] == summed_dimension, stored[b][0] == summed_dimension
        assert LAYOUT_BY_LAYER_PASS[layer_pass] == "".join(
            "n" if is_as_multiplied else "t" for is_as_multiplied in as_multiplied
        )


def test_shapes_of_experts_count_each_token_once_per_active_expert():
    assert list(GROUPED_PRESETS["moe"].shapes.items())[:2] == [
        (GroupedShape(8, 16384, 28672, 4096), "mixtral-8x7b gate+up"),
        (GroupedShape(8, 16384, 4096, 14336), "mixtral-8x7b down"),
    ]
    assert all(len(preset.shapes) == 2 * len(EXPERT_LAYER_SIZES) for preset in GROUPED_PRESETS.values())


def test_each_shape_has_a_layer_or_none_has():
    shapes = (MatmulShape(1, 2, 3), MatmulShape(4, 5, 6))
    with pytest.raises(UsageError, match="1 layers for 2 shapes"):
        sweep_plan(shapes, MatmulProblem(), layers=("q",))
    with pytest.raises(UsageError, match="1 layers for 2 shapes"):
        kernels_plan("matmul", shapes, (MatmulProblem(),), ("torch.mm",), layers=("q",))


# -- runs --------------------------------------------------------------------------------------------------------------


def test_rows_name_their_layers_wherever_they_are_shown(run, tmp_path):
    code, out, _ = run(*BRIEF, "--output", "run.jsonl")
    assert code == 0
    assert "llama-8b gate+up" in out
    plan = read_run_log(tmp_path / "run.jsonl").plan
    assert dict(zip(plan.shapes, plan.layers, strict=True))[MatmulShape(64, 4096, 14336)] == "llama-8b down"
    assert run("show", "run.jsonl")[1].count("llama-8b") == 5
    rows = list(csv.DictReader(io.StringIO(run("show", "run.jsonl", "--format", "csv")[1])))
    assert {(row["n"], row["layer"]) for row in rows} >= {("28672", "llama-8b gate+up"), ("128256", "llama-8b logits")}
    document = json.loads(run("show", "run.jsonl", "--format", "json")[1])
    assert all(row["layer"] for row in document["measurements"])


class _SimulatedGroupedMatmul:
    """A kernel that reaches 80 % of the peak of a simulated device at its requested clock."""

    name = "simulated-grouped"

    def explain_unsupported_problem(self, backend, problem):
        return None

    def prepare(self, backend, problem, shape, pool, sets=1, rewrite=False):
        cycles = (
            shape.flop / 0.8 / (backend.device_physics.compute_units * backend.device_physics.flop_per_cycle_per_unit)
        )
        return prepare_simulated_launches(
            backend, shape, sets, 1e-2, lambda index: partial(backend.launch_compute, cycles, (shape, index))
        )


class SimulatedGroups(_SimulatedGroupedMatmul, GroupedKernel):
    pass


def test_grouped_rows_are_measured_and_named_by_their_experts(run, tmp_path, monkeypatch):
    small_preset = OperationPreset({GroupedShape(4, 64, 32, 16): "some experts"})
    monkeypatch.setattr(GroupedOperation, "list_presets", lambda self: {"moe": small_preset})
    kernel_options = [*DEVICE, "--kernel", f"{MODULE}:SimulatedGroups"]
    options = [*kernel_options, "--operation", "grouped", "--preset", "moe", "--layout", "nt", "nn"]
    options = ["--time-limit", "0.01s", *options]
    code, out, _ = run("sweep", *options, "--output", "run.jsonl")
    assert code == 0
    assert out.count("some experts") == 2
    log = read_run_log(tmp_path / "run.jsonl")
    assert log.plan.layers == ("some experts",)
    assert {row.problem.layout for row in log.measurements} == {"nt", "nn"}
    assert run("sweep", *options, "--resume", "run.jsonl")[0] == 0
    code, _, err = run("sweep", *options[:-1], "tt", "--resume", "run.jsonl")
    assert (code, "contradicts" in err) == (2, True)
