"""Test the FLOP of a model from its formula, and the counter of the FLOP that torch runs."""

import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import mamf
from mamf.errors import UnsupportedError
from mamf.integrations.model_flops import ModelFlops, WindowedLayers, _read_architecture_sections

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def compute_llama_flops(**changes):
    return mamf.model_flops(SimpleNamespace(**LLAMA | changes))


def test_llama_3_8b_counts_all_weights_except_the_embedding_and_the_norms():
    # Llama 3 8B has 8030261248 parameters. The embedding (128256 x 4096) is only looked up, and the 65 norms (of 4096
    # weights each) only scale, so they need no matmul.
    assert compute_llama_flops().weight_count == 8030261248 - 128256 * 4096 - 65 * 4096


def test_causal_attention_has_half_the_flop_of_full_attention():
    flops = compute_llama_flops()
    full, causal = flops.compute_flop_per_token(8192), flops.compute_flop_per_token(8192, causal=True)
    assert full - 6 * flops.weight_count == 12 * 32 * 4096 * 8192
    assert full - causal == causal - 6 * flops.weight_count


def test_a_model_has_the_flops_of_its_configuration():
    model = SimpleNamespace(config=SimpleNamespace(**LLAMA))
    assert mamf.model_flops(model) == compute_llama_flops()


def test_an_unknown_architecture_is_an_error():
    with pytest.raises(UnsupportedError, match="flops_per_step"):
        compute_llama_flops(model_type="mamba")


def test_formula_and_counter_agree_for_every_architecture():
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    path = Path(__file__).parents[2] / "tools" / "formula_check.py"
    spec = importlib.util.spec_from_file_location("formula_check", path)
    formula_check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(formula_check)
    comparisons = [formula_check.compare(case) for case in formula_check.CASES]
    # Round, because no formula counts the pooler of BertModel, which has less than 0.05 % of the FLOP of this model.
    assert [kind for kind, formula, counted in comparisons if round(formula / counted, 3) != 1] == []
    checked_names = {kind.lower().replace("_", "") for kind, _, _ in comparisons}
    listed_names = {name.replace("_", "") for name in _read_architecture_sections() if " " not in name}
    assert listed_names - checked_names == {"mt5", "umt5", "mbart", "deepseekv2"}


#: The fields of published configurations, and the number of active parameters that the publishers state.
PUBLISHED = {
    "deepseek-v3": (
        {
            "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
            "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
            "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
            "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "vocab_size": 129280,
        },
        37e9,
    ),
    "gpt-oss-120b": (
        {
            "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 128,
            "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 18,
        },
        5.1e9,
    ),
    "llama-4-scout": (
        {
            "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
            "num_local_experts": 16, "num_experts_per_tok": 1, "vocab_size": 202048, "attention_chunk_size": 8192,
            "interleave_moe_layer_step": 1,
            "layer_types": (["chunked_attention"] * 3 + ["full_attention"]) * 12,
        },
        17.2e9 - 202048 * 5120,  # the published number includes the embedding
    ),
    "vit-base": (
        {
            "model_type": "vit", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
            "intermediate_size": 3072, "image_size": 224, "patch_size": 16, "num_channels": 3, "num_labels": 1000,
        },
        86e6,
    ),
    "mamba2-2.7b": (
        {
            "model_type": "mamba2", "hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80, "head_dim": 64,
            "state_size": 128, "n_groups": 1, "expand": 2, "conv_kernel": 4, "vocab_size": 50288,
        },
        2.7e9,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_are_the_published_active_parameters(name):
    fields, published = PUBLISHED[name]
    flops = mamf.model_flops(SimpleNamespace(**fields))
    if name.startswith("mamba"):  # subtract the recurrence's multiplications, which have no weights
        flops = replace(flops, weight_count=flops.weight_count - 64 * 2 * 5120 * 128)
    assert flops.weight_count == pytest.approx(published, rel=0.03)


def test_windows_count_the_keys_that_they_reach():
    window = {"sliding_window": 1024}
    flops = compute_llama_flops(model_type="gemma2", layer_types=["sliding_attention", "full_attention"] * 16, **window)
    keys = 16 * 8192 + 16 * 1024
    assert flops.compute_flop_per_token(8192) == 6 * flops.weight_count + 12 * 4096 * keys
    # A window has 1024 keys, but the first 1024 queries can use only half as many on average.
    causal = 16 * 8192 / 2 + 16 * (1024 - 1024 * 1024 / (2 * 8192))
    assert flops.compute_flop_per_token(8192, causal=True) == 6 * flops.weight_count + 12 * 4096 * causal
    assert flops.compute_flop_per_token(1024) == compute_llama_flops().compute_flop_per_token(1024)
    assert compute_llama_flops(model_type="mistral", **window).windows == (WindowedLayers(32, 1024),)
    assert compute_llama_flops(model_type="qwen2", use_sliding_window=False, **window).windows == ()


def test_a_chunk_of_attention_is_causal_in_itself():
    flops = ModelFlops(
        weight_count=0, layer_count=1, attention_width=1, windows=(WindowedLayers(1, 1024, is_chunked=True),)
    )
    assert flops.compute_flop_per_token(8192, causal=True) == 12 * 512


def test_a_window_without_layer_types_is_an_error():
    with pytest.raises(UnsupportedError, match="layer_types"):
        compute_llama_flops(model_type="gemma2", sliding_window=1024)


def test_an_encoder_counts_its_own_tokens_and_no_causal_mask():
    encoder = ModelFlops(weight_count=100, layer_count=2, attention_width=8, is_causal=False)
    flops = ModelFlops(weight_count=1000, layer_count=3, attention_width=8, encoder=encoder)
    cross_attention_flop = 12 * 3 * 8 * 64
    flop_per_decoder_token = 6 * 1000 + 12 * 3 * 8 * 16 / 2 + cross_attention_flop
    assert flops.compute_flop(5, 64, 16, causal=True) == 5 * (
        64 * (600 + 12 * 2 * 8 * 64) + 16 * flop_per_decoder_token
    )
    assert flops.compute_flop_per_token(64) == flops.compute_flop(1, 64, 64) / 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3", "text_config": SimpleNamespace(model_type="gemma3_text")}, "its text_config has one"),
        ({"model_type": "t5 encoder"}, "no formula"),
        ({"hidden_size": [64, 128]}, "must be a number above 0"),
        ({"num_hidden_layers": -1}, "must be a number above 0"),
        ({"vocab_size": float("nan")}, "must be a number above 0"),
    ],
)
def test_a_configuration_without_usable_figures_is_an_error(changes, message):
    with pytest.raises(UnsupportedError, match=message):
        compute_llama_flops(**changes)


def test_a_model_without_an_output_layer_counts_without_one():
    model = SimpleNamespace(config=SimpleNamespace(**LLAMA), get_output_embeddings=lambda: None)
    assert mamf.model_flops(model).weight_count == compute_llama_flops().weight_count - 4096 * 128256


@pytest.mark.parametrize(("key_head_count", "has_backward"), [(8, False), (2, False), (8, True), (2, True)])
def test_attention_is_counted_on_a_cpu_and_with_fewer_key_heads(key_head_count, has_backward):
    torch = pytest.importorskip("torch")
    query, key, value = (
        torch.ones(2, count, 64, 32, requires_grad=True) for count in (8, key_head_count, key_head_count)
    )

    def step():
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=key_head_count < 8)
        if has_backward:
            out.sum().backward()

    # The forward pass has two matmuls. The backward pass has five: the recomputed scores, and four gradients.
    assert mamf.count_flops(step) == 2 * (2 * 8 * 64 * 64 * 32) * (7 if has_backward else 2)


@pytest.mark.parametrize("mask", ["none", "causal", "boolean", "additive", "dropout"])
@pytest.mark.parametrize("backend", ["MATH", "FLASH_ATTENTION"])
def test_attention_is_counted_in_full_with_every_backend_and_mask(backend, mask):
    torch = pytest.importorskip("torch")
    if (backend, mask) == ("FLASH_ATTENTION", "dropout"):
        pytest.skip("FlashAttention has no dropout on a CPU")
    query, key = (torch.ones(2, 4, tokens, 32, requires_grad=True) for tokens in (64, 96))
    masks = {"boolean": torch.ones(64, 96, dtype=torch.bool), "additive": torch.zeros(64, 96)}
    options = {"attn_mask": masks.get(mask), "is_causal": mask == "causal", "dropout_p": 0.1 * (mask == "dropout")}

    def step():
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
            torch.nn.functional.scaled_dot_product_attention(query, key, key, **options).sum().backward()

    # The forward pass has two matmuls and the backward pass four. A fused kernel also recomputes the scores.
    assert mamf.count_flops(step) == 2 * (2 * 4 * 64 * 96 * 32) * (6 if backend == "MATH" else 7)


@pytest.mark.parametrize("has_gradients", [True, False])
def test_layers_that_torch_runs_as_one_operation_are_counted(has_gradients):
    torch = pytest.importorskip("torch")
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    tokens = torch.ones(2, 16, 64)

    def step():
        with torch.set_grad_enabled(has_gradients):
            layer(tokens)

    linear_flop = 4 * 2 * 32 * 64 * 64 + 2 * 2 * 32 * 64 * 128
    assert mamf.count_flops(step) == linear_flop + 2 * (2 * 2 * 4 * 16 * 16 * 16)
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_closure_of_an_optimizer_is_counted_and_its_own_matmuls_are_not():
    torch = pytest.importorskip("torch")
    weight, tokens = torch.ones(64, 64, requires_grad=True), torch.ones(32, 64)

    class Orthogonal(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure, scales):
            with torch.enable_grad():
                closure()
            weight.sub_(1e-9 * (weight.grad @ weight.grad.T))

    def run_passes():
        (tokens @ weight).square().sum().backward()

    optimizer = Orthogonal([weight], lr=0.1)
    forward_flop = 2 * 32 * 64 * 64
    assert mamf.count_flops(lambda: optimizer.step(run_passes, scales=torch.ones(2))) == 2 * forward_flop


def test_matmuls_for_which_torch_has_no_formula_are_counted():
    torch = pytest.importorskip("torch")
    a, b = torch.ones(32, 64, dtype=torch.int8), torch.ones(64, 16, dtype=torch.int8)
    assert mamf.count_flops(lambda: torch._int_mm(a, b)) == 2 * 32 * 64 * 16
    tokens = torch.ones(64, 32, dtype=torch.bfloat16, requires_grad=True)
    experts = torch.ones(4, 32, 16, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32)
    grouped_flop = 2 * 64 * 32 * 16
    assert mamf.count_flops(lambda: torch._grouped_mm(tokens, experts, offs=ends)) == grouped_flop
    assert (
        mamf.count_flops(lambda: torch._grouped_mm(tokens, experts, offs=ends).square().sum().backward())
        == 3 * grouped_flop
    )


def test_the_added_formulas_count_the_matmuls_of_attention():
    torch = pytest.importorskip("torch")
    from mamf.integrations.flop_counter import _make_missing_formulas

    formulas = {
        operation: formula for operation, formula in _make_missing_formulas().items() if "attention" in str(operation)
    }
    query, key = (1, 8, 100, 64), (1, 2, 50, 64)
    forward_flop = {op: formulas[op](query, key, key, out_shape=None) for op in formulas if "backward" not in str(op)}
    assert torch.ops.aten._scaled_dot_product_flash_attention in forward_flop
    assert set(forward_flop.values()) == {2 * 8 * 100 * 50 * 128}
    backward_formula = formulas[torch.ops.aten._scaled_dot_product_cudnn_attention_backward]
    assert backward_formula(query, query, key, key) == 2.5 * 2 * 8 * 100 * 50 * 128


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("layer", ["Conv2d", "ConvTranspose2d"])
def test_each_gradient_of_a_convolution_has_as_many_flop_as_its_forward_pass(layer, groups):
    torch = pytest.importorskip("torch")
    layer = getattr(torch.nn, layer)(8, 16, 3, stride=2, groups=groups)
    images = torch.ones(2, 8, 9, 9, requires_grad=True)
    forward_flop = mamf.count_flops(lambda: layer(images))
    assert mamf.count_flops(lambda: layer(images).sum().backward()) == 3 * forward_flop


def test_a_function_is_not_compiled_while_it_is_counted_but_afterwards():
    torch = pytest.importorskip("torch")
    if not hasattr(torch.compiler, "set_stance"):
        pytest.skip("needs torch.compiler.set_stance, which torch 2.6 added")
    compiled_graphs = []
    layer = torch.nn.Linear(8, 8)
    step = torch.compile(layer, backend=lambda graph, inputs: compiled_graphs.append(graph) or graph.forward)
    assert mamf.count_flops(lambda: step(torch.ones(4, 8))) == 2 * 4 * 8 * 8
    assert not compiled_graphs
    step(torch.ones(4, 8))
    assert compiled_graphs


def test_a_counter_with_a_failing_formula_raises_nothing_and_returns_nan():
    torch = pytest.importorskip("torch")
    from mamf.integrations.flop_counter import StepFlopCounter

    def fail(*operands, **options):
        raise AssertionError

    working_counter, failing_counter = StepFlopCounter(), StepFlopCounter()
    failing_counter.flop_registry[torch.ops.aten.mm] = fail
    for counter in (working_counter, failing_counter):
        counter.start_counting()
        torch.ones(4, 8) @ torch.ones(8, 2)
        counter.stop_counting()
    assert working_counter.stop_counting() == 2 * 4 * 8 * 2
    assert math.isnan(failing_counter.stop_counting())


def test_matmuls_of_an_optimizer_are_not_counted():
    torch = pytest.importorskip("torch")

    class Muon(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            weight = self.param_groups[0]["params"][0]
            weight.data += weight.data @ weight.data

    layer = torch.nn.Linear(8, 8, bias=False)
    torch.optim.SGD(layer.parameters())  # from now on SGD.step runs hooks, also if Muon.step calls it
    optimizer = Muon(layer.parameters())

    def step():
        layer(torch.ones(4, 8)).sum().backward()
        optimizer.step()

    assert mamf.count_flops(step) == 2 * 2 * 4 * 8 * 8
