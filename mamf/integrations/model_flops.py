"""Compute the FLOP of a training step by formula: 6 N per token, plus attention.

A token is multiplied with N weights. Each weight costs 2 FLOP forward and 4 backward, so a token costs 6 N FLOP (Kaplan
et al. 2020, arXiv 2001.08361, section 2.1). Attention adds 12 L H Q T FLOP per token, for L layers, H heads, head
dimension Q and sequence length T (Chowdhery et al. 2022, PaLM, arXiv 2204.02311, appendix B). The attention term counts
all pairs of a query and a key, although a model with a causal mask needs only half of the pairs. The formula does not
count work that is done twice to save memory, such as activations that checkpointing recomputes and attention scores
that a flash kernel recomputes in the backward pass. architectures.ini says how to compute N from the configuration of
each architecture.
"""

from __future__ import annotations

import configparser
import functools
import importlib.resources
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mamf.errors import UnsupportedError, is_number, shorten_value

#: For each type of layer in which a query attends to a limited number of keys: the name of the field with this limit.
_WINDOW_FIELD_BY_LAYER_TYPE = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


class WindowedLayers(NamedTuple):
    """A group of a model's layers in which each query attends to a limited number of keys.

    ``layer_count``: the number of layers in the group. ``max_keys_per_query``: the limit. If ``is_chunked``, a sequence
    is split into chunks of this length, and a query attends to the keys of the same chunk. Otherwise a query attends to
    the keys just before it.
    """

    layer_count: int
    max_keys_per_query: int
    is_chunked: bool = False


@dataclass(frozen=True)
class ModelFlops:
    """The FLOP formula of one model.

    - ``weight_count``: N, the number of weights that a token is multiplied with: linear layers, the experts that the
      token uses, router and output layer. Embedding lookups do not count.
    - ``layer_count``: the number of layers with attention.
    - ``attention_width``: the number of heads times the head dimension.
    - ``windows``: the groups of layers in which a query does not attend to all keys.
    - ``is_causal``: whether the model has a causal mask.
    - ``flop_per_sequence``: FLOP per sequence, in addition to the FLOP of its tokens.
    - ``fixed_length``: the length of every sequence if the model fixes it, or else 0.
    - ``encoder``: for an encoder-decoder, the formula of the encoder; the other fields then describe the decoder.
    - ``output_layer_weight_count``: the number of weights in the output layer. They are part of ``weight_count``.

    These shares are below 1 only for a partly frozen model:

    - ``trained_weight_share``: the share of weights that have a gradient.
    - ``input_gradient_share``: the share of weights that are multiplied with an input that has a gradient.
    - ``attention_gradient_share``: the share of layers whose attention has a backward pass.
    """

    weight_count: int
    layer_count: int
    attention_width: int
    windows: tuple[WindowedLayers, ...] = ()
    is_causal: bool = True
    flop_per_sequence: int = 0
    fixed_length: int = 0
    encoder: ModelFlops | None = None
    output_layer_weight_count: int = 0
    trained_weight_share: float = 1.0
    input_gradient_share: float = 1.0
    attention_gradient_share: float = 1.0

    def compute_flop_per_token(self, sequence_length: int, causal: bool = False) -> float:
        """Return the FLOP per token of a sequence, forward and backward.

        ``causal``: whether to count only the half of attention that a causal mask leaves. For an encoder-decoder,
        return the FLOP per input token, and assume that there are as many target tokens as input tokens.
        """
        if self.encoder is not None:
            return self.compute_flop(1, sequence_length, sequence_length, causal) / sequence_length
        weight_flop = 2 * self.weight_count * (1 + self.trained_weight_share + self.input_gradient_share)
        attention_flop = (
            self._compute_attention_flop_per_token(sequence_length, causal)
            * (1 + 2 * self.attention_gradient_share)
            / 3
        )
        return weight_flop + attention_flop + self.flop_per_sequence / sequence_length

    def compute_output_layer_flop(self, tokens: float) -> float:
        """Return the FLOP of the output layer for ``tokens`` tokens, forward and backward."""
        return 2 * self.output_layer_weight_count * tokens * (1 + self.trained_weight_share + self.input_gradient_share)

    def compute_flop(self, sequences: int, length: int, targets: int | None = None, causal: bool = False) -> float:
        """Return the FLOP of ``sequences`` sequences of ``length`` tokens, forward and backward.

        ``targets``: tokens per sequence in the decoder of an encoder-decoder; the default is ``length``.
        """
        if self.encoder is None:
            return sequences * length * self.compute_flop_per_token(length, causal)
        targets, length = targets or length, self.encoder.fixed_length or length
        cross_attention = 12 * self.layer_count * self.attention_width * length
        flop_per_target = replace(self, encoder=None).compute_flop_per_token(targets, causal) + cross_attention
        return sequences * (length * self.encoder.compute_flop_per_token(length) + targets * flop_per_target)

    def _compute_attention_flop_per_token(self, length: int, causal: bool) -> float:
        """Return the FLOP of attention per token, forward and backward, for a model without frozen layers."""
        full_attention = WindowedLayers(self.layer_count - sum(window.layer_count for window in self.windows), length)
        counts_half = causal and self.is_causal
        keys = sum(
            window.layer_count * _compute_mean_key_count(window, length, counts_half)
            for window in (full_attention, *self.windows)
        )
        return 12 * self.attention_width * keys


def model_flops(model: Any) -> ModelFlops:
    """Return the FLOP formula of a transformer, from its configuration.

    ``model``: a configuration of transformers, a model with the attribute ``config``, or a wrapper such as
    DistributedDataParallel with such a model as ``module``. Any object with the attributes of a configuration works
    (``model_type``, ``hidden_size``, ``num_hidden_layers``, ``num_attention_heads``, ``vocab_size``, ...). A ModelFlops
    is returned unchanged. If the model has no output layer, the formula does not count one.

    Raises UnsupportedError for an architecture without a formula, and for a configuration that lacks a field.

    >>> from types import SimpleNamespace
    >>> gpt2 = SimpleNamespace(
    ...     model_type="gpt2", hidden_size=768, num_hidden_layers=12, num_attention_heads=12, vocab_size=50257
    ... )
    >>> flops = mamf.model_flops(gpt2)
    >>> f"{flops.weight_count / 1e6:.1f} M weights, {flops.compute_flop_per_token(1024) / 1e6:.1f} MFLOP a token"
    '123.5 M weights, 854.4 MFLOP a token'
    """
    if isinstance(model, ModelFlops):
        return model
    if not hasattr(model, "config"):  # A wrapper such as DistributedDataParallel stores the model in ``module``.
        model = getattr(model, "module", model)
    config = getattr(model, "config", model)
    architecture = str(getattr(config, "model_type", type(config).__name__))
    sections = _read_architecture_sections()
    if architecture not in sections or " " in architecture:
        text_model = getattr(getattr(config, "text_config", None), "model_type", None)
        known = ", ".join(sorted(each for each in sections if " " not in each))
        raise UnsupportedError(
            f"no formula for {shorten_value(architecture)!r}"
            f"{', but its text_config has one' * (text_model in sections)}: "
            f"count FLOP with mamf.count_flops, or give flops_per_step=; there are formulas for {known}"
        )
    return _ArchitectureReader(config, architecture).make_formula(
        has_output_layer=getattr(model, "get_output_embeddings", lambda: model)() is not None
    )


@functools.cache
def _read_architecture_sections() -> dict[str, configparser.SectionProxy]:
    """Return the sections of architectures.ini by architecture. Several architectures may share one section.

    The section of an encoder has the name of its model, followed by `` encoder``, such as ``t5 encoder``. Only these
    names contain a space.
    """
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(importlib.resources.files("mamf.integrations").joinpath("architectures.ini").read_text("utf-8"))
    names = {name: [name] if name.endswith(" encoder") else name.split() for name in parser.sections()}
    return {each: parser[name] for name in names for each in names[name]}


def _compute_mean_key_count(window: WindowedLayers, length: int, causal: bool) -> float:
    """Return the mean number of keys that a query attends to, over all queries of a sequence of ``length`` tokens."""
    keys = min(window.max_keys_per_query, length)
    if not causal:
        return keys
    return keys / 2 if window.is_chunked else keys - keys * keys / (2 * length)


class _ArchitectureReader:
    """A reader that evaluates a section of architectures.ini with the fields of a model's configuration."""

    def __init__(self, config: Any, section: str) -> None:
        self.config, self.section = config, _read_architecture_sections()[section]

    def make_formula(self, has_output_layer: bool = True) -> ModelFlops:
        layers, experts = self.evaluate_term("layers"), self.evaluate_term("experts")
        sparse_layer_count = self._count_sparse_layers(layers) if experts else 0
        mlp_weights = (layers - sparse_layer_count) * (self.evaluate_term("mlp") if layers > sparse_layer_count else 0)
        mlp_weights += sparse_layer_count * (experts + (self.evaluate_term("router") if sparse_layer_count else 0))
        encoder, head_weights = self.section["encoder"], self.evaluate_term("head") if has_output_layer else 0
        return ModelFlops(
            weight_count=layers * self.evaluate_term("projections") + mlp_weights + head_weights,
            layer_count=layers,
            attention_width=self.evaluate_term("width"),
            windows=tuple(self._list_windowed_layers(layers)),
            is_causal=self.section["mask"] == "causal",
            flop_per_sequence=self.evaluate_term("sequence"),
            fixed_length=self.evaluate_term("positions"),
            encoder=_ArchitectureReader(self.config, encoder).make_formula() if encoder else None,
            output_layer_weight_count=head_weights,
        )

    def evaluate_term(self, name: str) -> int:
        """Return the value of a term: a key of the section, a field of the configuration, or a whole number.

        A key may have several alternative values, separated by ``|``. Use the first value for which the configuration
        has all fields.
        """
        name = name.strip()
        if name not in self.section:
            return int(name) if name.isdecimal() else self._read_config_field(name)
        for alternative in self.section[name].split("|"):
            try:
                return sum(map(self._evaluate_product, alternative.split("+")))
            except UnsupportedError as error:
                missing_field_error = error
        raise missing_field_error

    def _evaluate_product(self, text: str) -> int:
        """Return the value of a product such as ``a*b/c/d``: a times b, divided by c times d and rounded down."""
        factors, _, divisors = text.partition("/")
        divisor = math.prod(map(self.evaluate_term, divisors.split("/"))) if divisors else 1
        return math.prod(map(self.evaluate_term, factors.split("*"))) // divisor

    def _read_config_field(self, name: str) -> int:
        value = getattr(self.config, name, None)
        if not value:
            raise UnsupportedError(f"the model's configuration has no {name}: give flops_per_step=")
        if value is not True and not (is_number(value) and 0 < value < math.inf):
            raise UnsupportedError(
                f"{name} {shorten_value(value)} in the model's configuration must be a number above 0: "
                "correct the configuration, or give flops_per_step="
            )
        return int(value)

    def _count_sparse_layers(self, layers: int) -> int:
        """Return the number of layers whose MLP is a mixture of experts, from the fields of the configuration."""
        config = self.config
        layer_interval = (
            getattr(config, "decoder_sparse_step", None) or getattr(config, "interleave_moe_layer_step", None) or 1
        )
        first_sparse_layer, dense_layers = (
            getattr(config, "first_k_dense_replace", 0),
            getattr(config, "mlp_only_layers", None) or (),
        )
        sparse_layers = getattr(config, "moe_layers", None) or [
            layer for layer in range(layers) if (layer + 1) % layer_interval == 0
        ]
        return sum(first_sparse_layer <= layer < layers and layer not in dense_layers for layer in sparse_layers)

    def _list_windowed_layers(self, layers: int) -> list[WindowedLayers]:
        types = getattr(self.config, "layer_types", None)
        if types:
            counts_by_type = ((layer_type, types.count(layer_type)) for layer_type in _WINDOW_FIELD_BY_LAYER_TYPE)
            return [
                WindowedLayers(
                    count,
                    self._read_config_field(_WINDOW_FIELD_BY_LAYER_TYPE[layer_type]),
                    layer_type == "chunked_attention",
                )
                for layer_type, count in counts_by_type
                if count
            ]
        if self.section["windows"]:
            raise UnsupportedError(
                "the model's configuration has no layer_types, so it is unknown which layers use a sliding window: "
                "give flops_per_step="
            )
        uses_window = getattr(self.config, "sliding_window", None) and getattr(self.config, "use_sliding_window", True)
        return [WindowedLayers(layers, self._read_config_field("sliding_window"))] if uses_window else []
