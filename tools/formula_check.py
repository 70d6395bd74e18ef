"""Compare the FLOP of mamf's formulas with the FLOP that torch counts, for a tiny model of each architecture.

    python tools/formula_check.py    # needs transformers; prints the figures for docs/evidence/training.md

The models have random weights and run on the CPU. Each runs one forward and one backward pass with eager attention, so
that torch counts all its matmuls. The sequences are as long as the attention windows, because eager attention computes
the whole square and masks it afterward.

mamf's formula for Mamba 2 counts the recurrence, but transformers computes it in chunks of 16 tokens and pads it. The
column "by hand" subtracts the additional FLOP: the matmuls within chunks, the matmuls between chunks, and three padded
positions of the convolution.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch

import mamf

_SEQUENCES, _LENGTH, _TARGETS = 2, 64, 32
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 96,
}
_GROUPED = {"num_key_value_heads": 2}
_WINDOW = {"sliding_window": _LENGTH, "head_dim": 32}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ENCODER = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 96, "decoder_ffn_dim": 160}
_ENCODER |= {"vocab_size": 96, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
_NO_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class Case(NamedTuple):
    """A model whose FLOP are compared.

    - ``name``, ``fields``: the class of its configuration in transformers, and the fields of the configuration.
    - ``model``: the class in transformers that makes the model.
    - ``by_hand``: a correction in FLOP, which is added to the count of torch.
    """

    name: str
    fields: dict[str, Any]
    model: str = "AutoModelForCausalLM"
    by_hand: int = 0


CASES = (
    Case("LlamaConfig", _SIZES | _GROUPED),
    Case("MistralConfig", _SIZES | _GROUPED | _WINDOW),
    Case("Qwen2Config", _SIZES | _GROUPED),
    Case("Qwen3Config", _SIZES | _GROUPED | {"head_dim": 32}),
    Case("GemmaConfig", _SIZES | _GROUPED | {"head_dim": 32}),
    Case("Gemma2Config", _SIZES | _GROUPED | _WINDOW),
    Case("Gemma3TextConfig", _SIZES | _GROUPED | _WINDOW),
    Case("Phi3Config", _SIZES | _GROUPED | _NO_TOKENS),
    Case("OlmoConfig", _SIZES | _GROUPED | _NO_TOKENS),
    Case("Olmo2Config", _SIZES | _GROUPED | _NO_TOKENS),
    Case("GraniteConfig", _SIZES | _GROUPED),
    Case("SmolLM3Config", _SIZES | _GROUPED | _NO_TOKENS),
    Case("CohereConfig", _SIZES | _GROUPED | _NO_TOKENS),
    Case("Cohere2Config", _SIZES | _GROUPED | {"sliding_window": _LENGTH} | _NO_TOKENS),
    Case("GPT2Config", {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 96}),
    Case("GPTNeoXConfig", _SIZES),
    Case("GPTJConfig", {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 96, "rotary_dim": 8}),
    Case("Starcoder2Config", _SIZES | _GROUPED | _NO_TOKENS),
    Case("PhiConfig", _SIZES | _GROUPED | _NO_TOKENS),
    Case("OPTConfig", {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 96, "num_hidden_layers": 4,
                       "num_attention_heads": 4, "vocab_size": 96} | _NO_TOKENS),
    Case("FalconConfig", {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 96,
                          "ffn_hidden_size": 96, "new_decoder_architecture": True, "num_kv_heads": 2}),
    Case("FalconConfig", {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 96}),
    Case("MixtralConfig", _SIZES | _GROUPED | _EXPERTS),
    Case("OlmoeConfig", _SIZES | _GROUPED | {"num_experts": 4, "num_experts_per_tok": 2} | _NO_TOKENS),
    Case("Qwen2MoeConfig", _SIZES | _GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 2,
                                                "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}),
    Case("Qwen3MoeConfig", _SIZES | _GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [1],
                                                "moe_intermediate_size": 32}),
    Case("GptOssConfig", _SIZES | _GROUPED | _WINDOW | _EXPERTS | _NO_TOKENS),
    # For Llama 4, transformers computes every expert for every token, so all experts are active in this case.
    Case("Llama4TextConfig", _SIZES | _GROUPED | {"head_dim": 16, "intermediate_size_mlp": 160, "num_local_experts": 2,
         "num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "attention_chunk_size": _LENGTH} | _NO_TOKENS),
    Case("DeepseekV3Config", _SIZES | {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32,
         "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24, "n_routed_experts": 8, "n_group": 2,
         "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}),
    Case("BertConfig", _SIZES, "AutoModelForMaskedLM"),
    Case("BertConfig", _SIZES, "AutoModel"),
    Case("RobertaConfig", _SIZES | _NO_TOKENS, "AutoModelForMaskedLM"),
    Case("T5Config", {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
                      "vocab_size": 96}, "AutoModelForSeq2SeqLM"),
    Case("T5Config", {"d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 96,
                      "feed_forward_proj": "gated-gelu"}, "AutoModelForSeq2SeqLM"),
    Case("BartConfig", _ENCODER | _NO_TOKENS, "AutoModelForSeq2SeqLM"),
    Case("WhisperConfig", _ENCODER | _NO_TOKENS | {"num_mel_bins": 8, "max_source_positions": _LENGTH},
         "AutoModelForSpeechSeq2Seq"),
    Case("ViTConfig", {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
                       "image_size": 32, "patch_size": 8}, "AutoModelForImageClassification"),
    Case("Mamba2Config", {"hidden_size": 64, "num_hidden_layers": 4, "num_heads": 4, "head_dim": 32, "state_size": 16,
                          "n_groups": 1, "vocab_size": 96, "chunk_size": 16},
         by_hand=-3 * 4 * 2 * _SEQUENCES * (_LENGTH * 4 * 16 * (16 + 32) + 4 * 5 * 5 * 32 * 16 + 160 * 4 * 3)),
)  # fmt: skip


def compare(case: Case) -> tuple[str, float, float]:
    """Return the architecture of a case, and the FLOP of a forward and backward pass: by formula, and as counted."""
    import transformers

    config = getattr(transformers, case.name)(**case.fields, attn_implementation="eager")
    model = getattr(transformers, case.model).from_config(config, attn_implementation="eager").train()
    ids = torch.randint(3, 90, (_SEQUENCES, _LENGTH))
    batch: dict[str, Any] = {"input_ids": ids}
    targets = None
    if config.is_encoder_decoder:
        targets = _TARGETS
        batch["decoder_input_ids"] = ids[:, :_TARGETS]
    if config.model_type == "vit":
        batch = {"pixel_values": torch.ones(_SEQUENCES, 3, config.image_size, config.image_size)}
    elif config.model_type == "whisper":
        batch["input_features"] = torch.ones(_SEQUENCES, config.num_mel_bins, 2 * _LENGTH)
        del batch["input_ids"]
    flops = mamf.model_flops(model)
    formula = flops.compute_flop(_SEQUENCES, flops.fixed_length or _LENGTH, targets)
    counted = mamf.count_flops(lambda: model(**batch)[0].float().sum().backward())
    return config.model_type, formula, counted + case.by_hand


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| architecture | formula, MFLOP | counted, MFLOP | by hand | formula / counted |")
    print("|:--|--:|--:|--:|--:|")
    for case in CASES:
        kind, formula, counted = compare(case)
        by_hand = f"{case.by_hand / 1e6:.2f}" if case.by_hand else ""
        print(f"| {kind} | {formula / 1e6:.2f} | {counted / 1e6:.2f} | {by_hand} | {formula / counted:.4f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
