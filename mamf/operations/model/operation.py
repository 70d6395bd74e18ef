"""Define the operation ``model``, a training step of a language model, and count its parameters, FLOP and bytes.

mamf counts the FLOP that the model needs, not those that the device executes. The backward pass may repeat work of the
forward pass: it computes attention scores again and, with activation checkpointing, whole blocks. mamf does not count
this repeated work. The functions in this file have no side effects.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args

from mamf.backend import Backend, DeviceInfo
from mamf.dtypes import DTYPES
from mamf.errors import BaseShape, UsageError, parse_size
from mamf.kernel import Buffer, Kernel, Work
from mamf.measurement import Measurement
from mamf.operation import CheckedProblem, FlopOperation, Parameter, Preset, describe
from mamf.operations.attention.operation import AttentionShape
from mamf.plans import SUSTAINED

ModelStyle = Literal["gpt2", "llama", "moe"]
TrainingPhase = Literal["forward", "forward-backward", "step"]
OptimizerName = Literal["adamw", "adamw-fused"]
TRAINING_PHASES: tuple[str, ...] = get_args(TrainingPhase)
#: The FLOP of each phase of a training step, divided by the FLOP of a forward pass. A backward pass has two matmuls for
#: each matmul of the forward pass.
FLOP_FACTORS_BY_PHASE: Mapping[str, int] = {"forward": 1, "forward-backward": 3, "step": 3}
#: For each phase of a training step: the minimum memory traffic, as a multiple of the bytes of the parameters, and a
#: text that describes this traffic.
_PARAMETER_TRAFFIC_BY_PHASE: Mapping[str, tuple[int, str]] = {
    "forward": (1, "parameters once"),
    "forward-backward": (2, "parameters and gradients once"),
    "step": (4, "parameters, gradients and optimizer state once"),
}


@dataclass(frozen=True, order=True)
class ModelShape(BaseShape):
    """The shape of a training step: ``batch`` sequences of ``context`` tokens each. A shape is written ``b8s1024``."""

    text_pattern: ClassVar[re.Pattern[str]] = re.compile(r"b(\d+)s(\d+)", re.ASCII)
    text_description: ClassVar[str] = "the shape of a training step: write bBATCHsCONTEXT, for example b8s1024"

    batch: int = field(metadata=describe("number of sequences", default="8", parse_text=parse_size))
    context: int = field(
        metadata=describe(
            "tokens per sequence", default="256 512 1024", keyword="context_lengths", parse_text=parse_size
        )
    )

    def __str__(self) -> str:
        return f"b{self.batch}s{self.context}"

    @property
    def token_count(self) -> int:
        return self.batch * self.context


def _make_preset_field_metadata(help_text: str) -> Mapping[str, Any]:
    """Return the metadata of a field that --size sets. Help hides the field's own option, which users rarely need."""
    return describe(help_text, is_rare=True)


@dataclass(frozen=True)
class ModelProblem(CheckedProblem):
    """All parameters of a training step except its shape.

    - ``style``: ``gpt2`` (LayerNorm, learned positions, GELU, biases), ``llama`` (RMSNorm, rotary positions, SwiGLU,
      grouped queries) or ``moe`` (like ``llama``, with ``experts`` MLPs per block, of which each token uses
      ``active_experts``).
    - ``tied``: whether the layer that computes the logits uses the weights of the embedding.
    - ``phase``: the part of a training step to run: ``forward``, ``forward-backward``, or ``step``, which includes the
      optimizer.
    - ``autocast``: whether parameters are float32, while torch.autocast runs matmuls in ``dtype``.
    - ``checkpointing``: whether each block saves only its input, and runs again in the backward pass.
    - ``optimizer``: the optimizer, which only the phase ``step`` uses.

    Raises UsageError if the sizes contradict one another.
    """

    operation: ClassVar[str] = "model"

    style: ModelStyle = field(
        default="gpt2",
        metadata=_make_preset_field_metadata("architecture of the blocks: GPT-2, Llama 3 or mixture of experts"),
    )
    d_model: int = field(
        default=768, metadata=_make_preset_field_metadata("width of the residual stream (embedding size)")
    )
    d_ff: int = field(default=3072, metadata=_make_preset_field_metadata("width of the hidden layer of the MLP"))
    layers: int = field(default=12, metadata=_make_preset_field_metadata("number of transformer blocks (layers)"))
    heads: int = field(default=12, metadata=_make_preset_field_metadata("number of query heads"))
    kv_heads: int = field(default=12, metadata=_make_preset_field_metadata("number of key and value heads"))
    experts: int = field(
        default=1, metadata=_make_preset_field_metadata("number of experts per block, if --style is moe")
    )
    active_experts: int = field(
        default=1, metadata=_make_preset_field_metadata("number of experts that each token uses, if --style is moe")
    )
    vocabulary: int = field(default=50257, metadata=_make_preset_field_metadata("number of tokens in the vocabulary"))
    tied: bool = field(
        default=True, metadata=_make_preset_field_metadata("use the embedding's weights also to compute the logits")
    )
    phase: TrainingPhase = field(
        default="forward",
        metadata=describe(
            "part of a training step to time: the forward pass, the forward and backward passes, or a whole step with "
            "the optimizer"
        ),
    )
    autocast: bool = field(
        default=False,
        metadata=_make_preset_field_metadata("keep parameters in float32 and run matmuls under torch.autocast"),
    )
    checkpointing: bool = field(
        default=False,
        metadata=_make_preset_field_metadata("recompute the activations of each block in the backward pass"),
    )
    optimizer: OptimizerName = field(
        default="adamw", metadata=_make_preset_field_metadata("optimizer of the training step, if --phase is step")
    )
    dtype: str = field(
        default="bfloat16",
        metadata=describe("dtype of the model's parameters and activations: bfloat16 or float32", default="bfloat16"),
    )
    data: str = field(
        default="normal",
        metadata=describe(
            "distribution of the random token ids; normal is the only choice",
            choices=("normal",),
            is_rare=True,
        ),
    )
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d_model % self.heads:
            raise UsageError(
                f"d_model {self.d_model} must be a multiple of the number of heads ({self.heads}): change one of them"
            )
        if self.heads % self.kv_heads:
            raise UsageError(
                f"the number of query heads ({self.heads}) must be a multiple of the number of "
                f"kv heads ({self.kv_heads}): change one of them"
            )
        if self.style == "gpt2" and self.kv_heads != self.heads:
            raise UsageError(f"style gpt2 needs as many kv_heads as heads: set kv_heads to {self.heads}")
        if self.style != "gpt2" and self.head_dim % 2:
            raise UsageError(
                f"the head dimension {self.head_dim} (d_model / heads) is odd, but rotary positions need an even one: "
                "change d_model or heads"
            )
        if self.active_experts > self.experts:
            raise UsageError(
                f"active_experts ({self.active_experts}) must be at most experts ({self.experts}): change one of them"
            )
        if (self.experts > 1) != (self.style == "moe"):
            raise UsageError(
                f"style {self.style} cannot have {self.experts} experts: moe needs at least 2, other styles exactly 1"
            )

    @property
    def parameter_dtype(self) -> str:
        return "float32" if self.autocast else self.dtype

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    @property
    def has_backward_pass(self) -> bool:
        return self.phase != "forward"

    def make_attention_shape(self, shape: ModelShape) -> AttentionShape:
        """Return the attention shape of one layer, for the operation ``attention``."""
        return AttentionShape(
            shape.batch,
            self.heads,
            self.kv_heads,
            shape.context,
            shape.context,
            self.head_dim,
            self.head_dim,
            causal=True,
        )

    # -- parameters --------------------------------------------------------------------------------------------------

    def _count_layer_weights(self, experts: int) -> int:
        """Return the number of weights in the matmuls of one layer.

        The matmuls are the projections to Q, K, V and the output, the router of a mixture of experts, and the matrices
        of each MLP: two in GPT-2, and three, one of them a gate, in other styles. ``experts``: the number of MLPs to
        count.
        """
        projections = 2 * self.d_model * (self.heads + self.kv_heads) * self.head_dim
        router = self.d_model * self.experts if self.style == "moe" else 0
        return projections + router + experts * (2 if self.style == "gpt2" else 3) * self.d_model * self.d_ff

    def count_parameters(self, shape: ModelShape) -> int:
        """Return the number of parameters. In GPT-2 it depends on the context length, because positions are learned."""
        d = self.d_model
        layer = self._count_layer_weights(self.experts)
        embedding = self.vocabulary * d * (1 if self.tied else 2)
        if self.style == "gpt2":
            norms, biases, positions = 4 * d, 4 * d + self.d_ff + d, shape.context * d
            return embedding + positions + self.layers * (layer + norms + biases) + 2 * d
        return embedding + self.layers * (layer + 2 * d) + d

    def count_parameter_bytes(self, shape: ModelShape) -> int:
        return self.count_parameters(shape) * DTYPES[self.parameter_dtype].itemsize

    # -- FLOP and bytes ----------------------------------------------------------------------------------------------

    def compute_work(self, shape: ModelShape) -> Work:
        copy_count, moved_data = _PARAMETER_TRAFFIC_BY_PHASE[self.phase]
        convention = (
            "model FLOP of matmuls and attention, logits counted, embeddings 0, masked pairs not counted, "
            f"backward twice the forward, nothing recomputed; bytes of {self.phase}: {moved_data}"
        )
        return Work(self.compute_flop(shape), copy_count * self.count_parameter_bytes(shape), convention)

    def compute_flop(self, shape: ModelShape) -> float:
        """Return the FLOP of one launch, which runs the phase once. A multiply-add counts as 2 FLOP."""
        # Count the FLOP of the matmuls with weights in a forward pass, including the matmul that computes the logits.
        matmul_flop = (
            2
            * shape.token_count
            * (self.layers * self._count_layer_weights(self.active_experts) + self.vocabulary * self.d_model)
        )
        attention_flop = self.layers * self.make_attention_shape(shape).flop
        return float(FLOP_FACTORS_BY_PHASE[self.phase] * (matmul_flop + attention_flop))

    def list_buffers(self, shape: ModelShape, sets: int = 1, rewrite: bool = False) -> dict[str, Buffer]:
        """Return no buffers, because the network allocates its parameters, and the launches of all sets share them."""
        return {}

    def count_bytes(self, shape: ModelShape, sets: int = 1, rewrite: bool = False) -> int:
        return self.compute_work(shape).nbytes


def _make_preset_fields(
    style: str, d_model: int, d_ff: int, layers: int, heads: int, kv_heads: int, tied: bool = True
) -> dict[str, Any]:
    sizes = {"d_model": d_model, "d_ff": d_ff, "layers": layers, "heads": heads, "kv_heads": kv_heads}
    return {"style": style, **sizes, "vocabulary": 50257 if style == "gpt2" else 128256, "tied": tied}


#: For each value of --size, the fields of ModelProblem that it sets. The models are GPT-2 and Llama 3 in several sizes,
#: and a mixture of experts that is as wide as the small GPT-2.
FIELDS_BY_MODEL_SIZE: Mapping[str, Mapping[str, Any]] = {
    "small": _make_preset_fields("gpt2", 768, 3072, 12, 12, 12),
    "medium": _make_preset_fields("gpt2", 1024, 4096, 24, 16, 16),
    "large": _make_preset_fields("gpt2", 1280, 5120, 36, 20, 20),
    "xl": _make_preset_fields("gpt2", 1600, 6400, 48, 25, 25),
    "2.7b": _make_preset_fields("gpt2", 2560, 10240, 32, 32, 32),
    "1b": _make_preset_fields("llama", 2048, 8192, 16, 32, 8),
    "3b": _make_preset_fields("llama", 3072, 8192, 28, 24, 8),
    "8b": _make_preset_fields("llama", 4096, 14336, 32, 32, 8, tied=False),
    "moe": {**_make_preset_fields("moe", 768, 2048, 12, 12, 4), "experts": 8, "active_experts": 2},
}


class ModelKernel(Kernel[ModelProblem, ModelShape]):
    """A kernel that runs a training step.

    ``dtypes``: the supported dtypes. float16 is not supported, because training in float16 needs loss scaling.
    """

    operation = "model"
    reports_memory = True
    reports_reserved_memory = True
    must_fit_in_burst = True
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float32")

    def explain_unsupported_problem(self, backend: Backend, problem: ModelProblem) -> str | None:
        if problem.autocast and problem.dtype == problem.parameter_dtype:
            return (
                f"--autocast has no effect, because parameters and matmuls are both {problem.dtype}: remove --autocast"
            )
        return self._explain_unsupported_dtype(problem) or backend.explain_unsupported_dtype(problem.dtype)

    def explain_unsupported_shape(self, problem: ModelProblem, shape: ModelShape) -> str | None:
        if shape.context % problem.experts:
            return (
                f"the context length ({shape.context}) must be a multiple of the number of experts "
                f"({problem.experts}): change --context-lengths"
            )
        return None


#: The fields of ModelProblem that the title of a table shows only if they differ from their defaults.
_FIELDS_HIDDEN_AT_DEFAULT = ("vocabulary", "tied", "autocast", "checkpointing", "optimizer", "data", "seed")
#: The name of the model family in titles, by the ``style`` of ModelProblem.
_FAMILY_BY_STYLE: Mapping[str, str] = {"gpt2": "GPT-2", "llama": "Llama 3"}


class ModelOperation(FlopOperation[ModelProblem, ModelShape]):
    name = "model"
    kernel_group = "mamf.model_kernels"
    kernel_type = ModelKernel
    shape_type = ModelShape
    problem_type = ModelProblem
    shape_example = "b8s1024"
    command_name = "model"
    chart_kind = "phases"
    axis_label = "context length"
    default_regime = SUSTAINED
    counts_model_flop = True
    preset_parameter = Parameter(
        "preset",
        str,
        "size of the model: GPT-2 (small to 2.7b), Llama 3 (1b to 8b) or mixture of experts (moe) (default: small)",
        keyword="size",
    )

    def choose_default_shapes(self, backend: Backend) -> Sequence[ModelShape]:
        return [ModelShape(batch=8, context=context) for context in (256, 512, 1024)]

    def list_presets(self) -> Mapping[str, Preset[ModelShape]]:
        """Return the presets by name. Each preset sets the fields of ModelProblem to the sizes of one model."""
        return {
            size: Preset(fields={name: (value,) for name, value in preset_fields.items()})
            for size, preset_fields in FIELDS_BY_MODEL_SIZE.items()
        }

    def complete_fields(self, preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that the user gave (``given``) and, for other fields, the sizes of the preset.

        If the user changes ``d_model``, scale ``d_ff`` and ``heads`` by the same ratio. If ``heads`` changes, scale
        ``kv_heads`` by the same ratio as ``heads``. Do not scale a field that the user gave.
        """
        defaults = {field.name: field.default for field in fields(ModelProblem)} | dict(preset)
        completed = {**preset, **given}
        for size, scaled_fields in (("d_model", ("d_ff", "heads")), ("heads", ("kv_heads",))):
            if size in completed and completed[size] != defaults[size]:
                completed |= {
                    name: max(1, round(defaults[name] * completed[size] / defaults[size]))
                    for name in scaled_fields
                    if name not in given
                }
        return completed

    def make_columns(self, row: Measurement, info: DeviceInfo | None = None) -> Mapping[str, object]:
        """Return additional columns of a report: tokens per second, the number of parameters, the memory that a launch
        needs and the memory that torch has reserved, in GB.
        """
        shape = row.shape
        return {
            "tokens/s": round(shape.token_count / row.seconds) if row.ok else None,
            "parameters": row.problem.count_parameters(shape),
            "GB": None if row.peak_memory_bytes is None else row.peak_memory_bytes / 1e9,
            "GB reserved": None if row.peak_reserved_bytes is None else row.peak_reserved_bytes / 1e9,
        }

    def list_identifying_fields(self, problem: ModelProblem) -> Sequence[str]:
        """Return texts for titles of reports: the architecture, the phase, and fields that differ from their defaults.

        The architecture is the style with d_model, d_ff, layers and heads, such as ``gpt2 768/3072/12/12``.
        """
        kv = "" if problem.kv_heads == problem.heads else f"/{problem.kv_heads}"
        experts = f", {problem.active_experts} of {problem.experts} experts" if problem.style == "moe" else ""
        sizes = f"{problem.d_model}/{problem.d_ff}/{problem.layers}/{problem.heads}{kv}{experts}"
        defaults = {field.name: field.default for field in fields(problem)}
        values = {name: getattr(problem, name) for name in _FIELDS_HIDDEN_AT_DEFAULT}
        other_texts = [f"{name} {value}" for name, value in values.items() if value != defaults[name]]
        return [f"{problem.style} {sizes}", problem.phase, *other_texts]

    def describe_problem(self, problem: ModelProblem) -> Sequence[str]:
        """Return texts for titles of reports. Name known models, such as ``Llama 3 1B``, instead of listing sizes."""
        for size, preset_fields in FIELDS_BY_MODEL_SIZE.items():
            if problem.style in _FAMILY_BY_STYLE and all(
                getattr(problem, name) == value for name, value in preset_fields.items()
            ):
                name = f"{_FAMILY_BY_STYLE[problem.style]} {size.upper() if size[0].isdecimal() else size}"
                implied_texts = {f"{field} {value}" for field, value in preset_fields.items()}
                return [
                    name,
                    *(text for text in self.list_identifying_fields(problem)[1:] if text not in implied_texts),
                ]
        return self.list_identifying_fields(problem)

    def find_axis_position(self, shape: ModelShape) -> float:
        """Return the position of a shape on the horizontal axis of charts: the tokens per sequence."""
        return float(shape.context)
