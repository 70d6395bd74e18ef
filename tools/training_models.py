"""The models, batches and independent FLOP counts of tools/training_setups.py."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

#: Sizes on a CPU, and on an accelerator.
SMALL = {"hidden": 128, "layers": 2, "heads": 4, "length": 128, "batch": 4, "vocabulary": 512, "image": 32}
LARGE = {"hidden": 2048, "layers": 8, "heads": 16, "length": 2048, "batch": 8, "vocabulary": 32000, "image": 224}


class Attention(nn.Module):
    """Separate projections, so that tensor parallelism can split them by heads."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.size = hidden // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads)
        self.w1, self.w3 = (nn.Linear(hidden, 3 * hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * hidden, hidden, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.w2(functional.silu(self.w1(y)) * self.w3(y))


class Decoder(nn.Module):
    """A Llama-like language model that returns its loss."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        hidden, layers, heads, vocabulary = (sizes[each] for each in ("hidden", "layers", "heads", "vocabulary"))
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.config = SimpleNamespace(
            model_type="llama", hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
            num_attention_heads=heads, vocab_size=vocabulary,
        )  # fmt: skip

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


def conv_net(sizes: dict[str, int]) -> nn.Module:
    """With a depthwise convolution."""
    width = sizes["hidden"] // 4
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, groups=width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 1, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(2 * width, 10),
    )  # fmt: skip


class Denoiser(nn.Module):
    """A diffusion model's two halves and its time embedding; called with images and times."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        width = sizes["hidden"] // 4
        self.time = nn.Linear(1, width)
        self.down, self.middle = nn.Conv2d(3, width, 3, stride=2, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.up = nn.ConvTranspose2d(width, 3, 4, stride=2, padding=1)

    def forward(self, images: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        x = self.down(images) + self.time(times[:, None])[:, :, None, None]
        return self.up(functional.silu(self.middle(functional.silu(x))))


def transformers_model(kind: str, sizes: dict[str, int]) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model of transformers with random weights, and one sample of its data."""
    import transformers

    hidden, length = sizes["hidden"], sizes["length"]
    usual = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": sizes["layers"]}
    usual |= {"num_attention_heads": sizes["heads"], "vocab_size": sizes["vocabulary"]}
    seq2seq = {"d_model": hidden, "vocab_size": sizes["vocabulary"]}
    whisper = {"encoder_layers": sizes["layers"], "decoder_layers": sizes["layers"], "num_mel_bins": 80}
    whisper |= {"encoder_ffn_dim": 4 * hidden, "decoder_ffn_dim": 4 * hidden, "max_source_positions": length}
    whisper |= {"encoder_attention_heads": sizes["heads"], "decoder_attention_heads": sizes["heads"]}
    whisper |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    fields = {
        "Llama": usual | {"num_key_value_heads": sizes["heads"] // 2},
        "Gemma2": usual | {"num_key_value_heads": sizes["heads"] // 2, "head_dim": 64, "sliding_window": length},
        # torch's own counter does not know grouped products.
        "Mixtral": usual | {"num_key_value_heads": sizes["heads"] // 2, "num_local_experts": 4,
                            "num_experts_per_tok": 2, "experts_implementation": "eager"},
        "GPT2": {"n_embd": hidden, "n_layer": sizes["layers"], "n_head": sizes["heads"], "n_positions": length,
                 "vocab_size": sizes["vocabulary"]},
        "Bert": usual | {"max_position_embeddings": length},
        "ViT": usual | {"image_size": sizes["image"], "patch_size": 16 if sizes["image"] > 100 else 8},
        "T5": seq2seq | {"num_layers": sizes["layers"], "num_heads": sizes["heads"], "d_kv": hidden // sizes["heads"],
                         "d_ff": 3 * hidden, "decoder_start_token_id": 0},
        "Whisper": seq2seq | whisper,
    }  # fmt: skip
    heads = {"Bert": "MaskedLM", "ViT": "ImageClassification", "T5": "Seq2SeqLM", "Whisper": "SpeechSeq2Seq"}
    config = getattr(transformers, f"{kind}Config")(
        **fields[kind], attn_implementation="eager" if kind == "Gemma2" else "sdpa"
    )
    model = getattr(transformers, f"AutoModelFor{heads.get(kind, 'CausalLM')}").from_config(config)
    ids = torch.randint(3, sizes["vocabulary"], (length,))
    sample = {"input_ids": ids, "labels": ids}
    if kind == "ViT":
        sample = {"pixel_values": torch.ones(3, sizes["image"], sizes["image"]), "labels": torch.tensor(1)}
    elif kind == "T5":
        sample["labels"] = ids[: length // 2]
    elif kind == "Whisper":
        longest = min(length // 4, config.max_target_positions)
        sample = {"input_features": torch.ones(80, 2 * length), "labels": ids[:longest]}
    return model.train(), sample


def counted_by_torch(step: Any) -> float:
    """torch's own counter and formulas, with attention as products."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        step()
    return float(counter.get_total_flops())


def counted_by_hand(model: nn.Module, *inputs: torch.Tensor) -> float:
    """Convolutions and linear layers: three times the multiply-adds forward, less the gradient of the inputs."""
    flop, firsts = 0.0, {id(each) for each in inputs}

    def add(layer: Any, given: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        nonlocal flop
        if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
            positions = given[0] if isinstance(layer, nn.ConvTranspose2d) else out
            one = 2 * positions.numel() * math.prod(layer.weight.shape[1:])
        else:
            one = 2 * out.numel() * layer.in_features
        flop += one * (3 if given[0].requires_grad and id(given[0]) not in firsts else 2)

    kinds = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)
    hooks = [each.register_forward_hook(add) for each in model.modules() if isinstance(each, kinds)]
    model(*inputs)
    for each in hooks:
        each.remove()
    return flop
