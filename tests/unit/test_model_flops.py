"""FLOP of a model: by formula, and beside what was counted."""

from types import SimpleNamespace

import pytest

import mamf
from mamf.errors import UnsupportedError
from mamf.integrations.model_flops import ModelFlops

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def flops_of(**changes):
    return mamf.model_flops(SimpleNamespace(**LLAMA | changes))


def test_of_llama_3_8b_all_weights_but_the_embedding_and_the_norms_count():
    # 8030261248 parameters, of which 128256 x 4096 are looked up and 65 norms of 4096 scale.
    assert flops_of().weights == 8030261248 - 128256 * 4096 - 65 * 4096


def test_attention_is_told_whole_and_causal():
    flops = flops_of()
    whole, causal = flops.per_token(8192), flops.per_token(8192, causal=True)
    assert whole - 6 * flops.weights == 12 * 32 * 4096 * 8192
    assert whole - causal == causal - 6 * flops.weights


def test_of_experts_the_active_count():
    # Mixtral 8x7B: 12.9e9 active parameters of 46.7e9, embeddings included.
    moe = flops_of(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2, vocab_size=32000)
    assert moe.weights + 32000 * 4096 == pytest.approx(12.88e9, rel=0.001)
    assert moe.expert_weights == 32 * 2 * 3 * 4096 * 14336


def test_a_model_is_known_by_its_configuration():
    model = SimpleNamespace(config=SimpleNamespace(**LLAMA))
    assert mamf.model_flops(model) == flops_of()


def test_an_unknown_architecture_is_told_and_gets_no_number():
    with pytest.raises(UnsupportedError, match="flops_per_step"):
        flops_of(model_type="mamba")


def test_a_missing_number_is_named():
    with pytest.raises(UnsupportedError, match="no vocab_size"):
        flops_of(vocab_size=None)


FLOPS = ModelFlops(weights=10**6, layers=2, attention_width=512, expert_weights=4 * 10**5)
ATTENTION = 12 * 2 * 512 * 1000


@pytest.mark.parametrize(
    ("counted", "told"),
    [
        (6e6 + ATTENTION, "they agree"),
        (6e6 + ATTENTION / 2, "causal"),
        (6e6, "misses attention"),
        (3.6e6 + ATTENTION, "misses the experts"),
        (3.6e6, "misses attention and the experts"),
        (6e6 + ATTENTION * 7 / 6, "flash kernel"),
        ((6e6 + ATTENTION) / 3, "forward pass alone"),
        ((6e6 + ATTENTION) * 4 / 3, "checkpointing"),
        ((6e6 + ATTENTION) * 5, "does not know"),
    ],
)
def test_a_disagreement_is_explained_in_a_line(counted, told):
    line = FLOPS.beside(counted * 64, tokens=64, sequence_length=1000)
    assert told in line
    assert "\n" not in line


def test_formula_and_counter_agree_for_a_small_llama():
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.zeros(2, 128, dtype=torch.long)
    counted = mamf.count_flops(lambda: model(input_ids=ids, labels=ids).loss.backward())
    assert counted == 256 * mamf.model_flops(model).per_token(128)


@pytest.mark.parametrize(("heads", "backward"), [(8, False), (2, False), (8, True), (2, True)])
def test_attention_is_counted_on_a_cpu_too_and_with_fewer_heads_of_keys(heads, backward):
    torch = pytest.importorskip("torch")
    query, key, value = (torch.ones(2, count, 64, 32, requires_grad=True) for count in (8, heads, heads))

    def step():
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=heads < 8)
        if backward:
            out.sum().backward()

    # Two products forward; the scores anew and four gradients backward.
    assert mamf.count_flops(step) == 2 * (2 * 8 * 64 * 64 * 32) * (7 if backward else 2)


@pytest.mark.parametrize(
    ("kind", "experts"),
    [
        ("MixtralConfig", {"num_local_experts": 4}),
        ("Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 32}),
    ],
)
def test_formula_and_counter_agree_for_experts(kind, experts):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    config = getattr(transformers, kind)(**sizes, **experts)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.zeros(2, 128, dtype=torch.long)
    counted = mamf.count_flops(lambda: model(input_ids=ids, labels=ids).loss.backward())
    assert counted == 256 * mamf.model_flops(model).per_token(128)


@pytest.mark.parametrize("mask", ["none", "causal", "boolean", "additive", "dropout"])
@pytest.mark.parametrize("backend", ["MATH", "FLASH_ATTENTION"])
def test_attention_is_counted_whole_by_every_way_that_torch_takes(backend, mask):
    torch = pytest.importorskip("torch")
    if (backend, mask) == ("FLASH_ATTENTION", "dropout"):
        pytest.skip("none on a CPU")
    query, key = (torch.ones(2, 4, tokens, 32, requires_grad=True) for tokens in (64, 96))
    masks = {"boolean": torch.ones(64, 96, dtype=torch.bool), "additive": torch.zeros(64, 96)}
    options = {"attn_mask": masks.get(mask), "is_causal": mask == "causal", "dropout_p": 0.1 * (mask == "dropout")}

    def step():
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
            torch.nn.functional.scaled_dot_product_attention(query, key, key, **options).sum().backward()

    # Two products forward and four backward; a fused kernel has the scores anew.
    assert mamf.count_flops(step) == 2 * (2 * 4 * 64 * 96 * 32) * (6 if backend == "MATH" else 7)


@pytest.mark.parametrize("has_gradients", [True, False])
def test_layers_that_torch_runs_as_one_operation_are_counted(has_gradients):
    torch = pytest.importorskip("torch")
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    tokens = torch.ones(2, 16, 64)

    def step():
        with torch.set_grad_enabled(has_gradients):
            layer(tokens)

    products = 4 * 2 * 32 * 64 * 64 + 2 * 2 * 32 * 64 * 128
    assert mamf.count_flops(step) == products + 2 * (2 * 2 * 4 * 16 * 16 * 16)
    assert torch.backends.mha.get_fastpath_enabled()


def test_products_of_torch_that_it_has_no_formula_of_are_counted():
    torch = pytest.importorskip("torch")
    whole, other = torch.ones(32, 64, dtype=torch.int8), torch.ones(64, 16, dtype=torch.int8)
    assert mamf.count_flops(lambda: torch._int_mm(whole, other)) == 2 * 32 * 64 * 16
    tokens = torch.ones(64, 32, dtype=torch.bfloat16, requires_grad=True)
    experts = torch.ones(4, 32, 16, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32)
    grouped = 2 * 64 * 32 * 16
    assert mamf.count_flops(lambda: torch._grouped_mm(tokens, experts, offs=ends)) == grouped
    assert (
        mamf.count_flops(lambda: torch._grouped_mm(tokens, experts, offs=ends).square().sum().backward()) == 3 * grouped
    )


def test_attention_formulas_are_of_operations_that_torch_has():
    torch = pytest.importorskip("torch")
    from mamf.integrations.flop_counter import _formulas

    formulas = {operation: each for operation, each in _formulas().items() if "attention" in str(operation)}
    query, key = (1, 8, 100, 64), (1, 2, 50, 64)
    told = {op: formulas[op](query, key, key, out_shape=None) for op in formulas if "backward" not in str(op)}
    assert torch.ops.aten._scaled_dot_product_flash_attention in told
    assert set(told.values()) == {2 * 8 * 100 * 50 * 128}
    backward = formulas[torch.ops.aten._scaled_dot_product_cudnn_attention_backward]
    assert backward(query, query, key, key) == 2.5 * 2 * 8 * 100 * 50 * 128
