"""The operation ``model``: training steps of language models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from mamf.backend import Backend, DeviceInfo
from mamf.measurement import Measurement
from mamf.operation import FlopOperation, Parameter, Preset
from mamf.operations.model.shapes import SIZES, ModelKernel, ModelProblem, ModelShape
from mamf.plans import SUSTAINED

_BATCH, _CONTEXTS = 8, (256, 512, 1024)
#: Fields that a title names only if they differ from the defaults.
_RARE = ("vocabulary", "tied", "autocast", "checkpointing", "optimizer", "data", "seed")
#: Names by style of block.
_FAMILIES: Mapping[str, str] = {"gpt2": "GPT-2", "llama": "Llama 3"}


class Model(FlopOperation[ModelProblem, ModelShape]):
    name = "model"
    kernel_group = "mamf.model_kernels"
    kernel_type = ModelKernel
    shape_type = ModelShape
    problem_type = ModelProblem
    shape_example = "b8s1024"
    own_command = "model"
    chart = "phases"
    axis_label = "context length"
    default_regime = SUSTAINED
    counts_model_flop = True
    preset_parameter = Parameter(
        "preset", str, "model; small to 2.7b are GPT-2, 1b to 8b are Llama 3 (default: small)", keyword="size"
    )

    def default_shapes(self, backend: Backend) -> Sequence[ModelShape]:
        return [ModelShape(_BATCH, context) for context in _CONTEXTS]

    def presets(self) -> Mapping[str, Preset[ModelShape]]:
        """Return the architectures by name."""
        return {size: Preset(fields={name: (value,) for name, value in parts.items()}) for size, parts in SIZES.items()}

    def complete(self, preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``given`` with the preset's sizes. Scale ``d_ff`` and ``heads`` with ``d_model``, ``kv_heads`` with
        ``heads``, unless they are given.
        """
        usual = {field.name: field.default for field in fields(ModelProblem)} | dict(preset)
        asked = {**preset, **given}
        for size, followers in (("d_model", ("d_ff", "heads")), ("heads", ("kv_heads",))):
            if size in asked and asked[size] != usual[size]:
                asked |= {
                    name: max(1, round(usual[name] * asked[size] / usual[size]))
                    for name in followers
                    if name not in given
                }
        return asked

    def columns(self, row: Measurement, info: DeviceInfo | None = None) -> Mapping[str, object]:
        """Return tokens per second, parameters, GB that a launch needs and GB that the process reserved."""
        shape = row.shape
        return {
            "tokens/s": round(shape.tokens / row.seconds) if row.ok else None,
            "parameters": row.problem.parameters(shape),
            "GB": None if row.peak_memory_bytes is None else row.peak_memory_bytes / 1e9,
            "GB reserved": None if row.peak_reserved_bytes is None else row.peak_reserved_bytes / 1e9,
        }

    def words(self, problem: ModelProblem) -> Sequence[str]:
        """Return the architecture, the phase, and the fields that differ from the defaults."""
        usual = {field.name: field.default for field in fields(problem)}
        values = {name: getattr(problem, name) for name in _RARE}
        others = [f"{name} {value}" for name, value in values.items() if value != usual[name]]
        return [problem.architecture, problem.phase, *others]

    def describe_problem(self, problem: ModelProblem) -> Sequence[str]:
        """Return the words, with the name of a known model in place of its dimensions: ``Llama 3 1B``."""
        for size, parts in SIZES.items():
            if problem.style in _FAMILIES and all(getattr(problem, name) == value for name, value in parts.items()):
                name = f"{_FAMILIES[problem.style]} {size.upper() if size[0].isdecimal() else size}"
                own = {f"{field} {value}" for field, value in parts.items()}
                return [name, *(word for word in self.words(problem)[1:] if word not in own)]
        return self.words(problem)

    def axis(self, shape: ModelShape) -> float:
        """Tokens per sequence."""
        return float(shape.context)
