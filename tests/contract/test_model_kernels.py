"""Test the kernels of the operation ``model`` with tiny models on the CPU: right results pass, faults are found."""

import functools
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mamf.engine.regimes.base import CheckedKernel, WrongResultError
from mamf.operations.attention.operation import AttentionOperation
from mamf.operations.attention.torch_attention import TorchAttention
from mamf.operations.attention.torch_kernels import SdpaMath
from mamf.operations.model import torch_model
from mamf.operations.model.operation import ModelProblem, ModelShape
from mamf.operations.model.torch_model import TorchModel, get_reference_cache
from mamf.plugins.discovery import make_kernel, make_operation, open_backend
from mamf.testing.contracts import AnyKernelContract

attention_kernel = functools.partial(make_kernel, AttentionOperation())

TINY = {"d_model": 32, "d_ff": 64, "layers": 2, "heads": 4, "kv_heads": 4, "vocabulary": 97, "dtype": "float32"}
GPT2 = ModelProblem(**TINY)
LLAMA = ModelProblem(**{**TINY, "style": "llama", "kv_heads": 2, "tied": False})
MOE = ModelProblem(**{**TINY, "style": "moe", "kv_heads": 2, "experts": 4, "active_experts": 2})
SHAPE = ModelShape(2, 16)
STYLES = pytest.mark.parametrize("problem", [GPT2, LLAMA, MOE], ids=["gpt2", "llama", "moe"])


@functools.cache
def cpu():
    return open_backend("cpu")


def checked(problem, kernel=None, shape=SHAPE):
    kernel = kernel or TorchModel("sdpa-math")
    assert not (kernel.explain_unsupported_problem(cpu(), problem) or kernel.explain_unsupported_shape(problem, shape))
    return CheckedKernel(kernel.prepare(cpu(), problem, shape, cpu().make_operand_pool("normal", 0), sets=3))


class TestModelKernel(AnyKernelContract):
    @pytest.fixture
    def backend(self):
        return cpu()

    @pytest.fixture
    def kernel(self):
        return make_kernel(make_operation("model"), "torch[sdpa-math]")

    @pytest.fixture
    def problem(self):
        return replace(LLAMA, phase="forward-backward")

    @pytest.fixture
    def shape(self):
        return SHAPE


def test_a_model_that_the_memory_cannot_hold_is_not_begun(monkeypatch):
    """Check that mamf does not start to make the model. A system that overcommits memory would kill the process."""
    monkeypatch.setattr(torch_model, "make_network", lambda *given: pytest.fail("it was begun"))
    with pytest.raises(MemoryError, match=r"out of memory: \d+\.\d GB are needed"):
        checked(replace(GPT2, layers=99_999_999))


@STYLES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_forward_and_backward_is_right(problem, dtype):
    step = checked(replace(problem, phase="forward-backward", dtype=dtype))
    step.warm_up_and_verify(cpu())
    assert step.verdict.details["gradient_error"] > 0
    assert step.verdict.error < (1e-5 if dtype == "float32" else 0.03)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
def test_a_step_runs_its_optimizer_and_keeps_its_parameters(optimizer, monkeypatch):
    problem = replace(GPT2, phase="step", optimizer=optimizer)
    step = checked(problem)
    step.warm_up_and_verify(cpu())
    step.poison_outputs()
    for launch in (*step.launches, *step.launches):
        launch()
    step.verify_last_outputs()
    step.require_unchanged_operands()
    step.poison_outputs()
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: None)
    step.launches[0]()
    with pytest.raises(WrongResultError):
        step.verify_last_outputs()


def test_checkpointing_changes_no_answer():
    problem = replace(GPT2, phase="forward-backward")
    plain, again = checked(problem), checked(replace(problem, checkpointing=True))
    for one, other in zip(plain.launches[0](), again.launches[0](), strict=True):
        assert torch.allclose(one, other)


class ProductDtypes(TorchDispatchMode):
    """A dispatch mode that collects the dtypes of the operands of all matmuls."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.name() in ("aten::mm", "aten::bmm", "aten::addmm"):
            self.found |= {each.dtype for each in arguments if isinstance(each, torch.Tensor)}
        return function(*arguments, **(keywords or {}))


@STYLES
def test_autocast_keeps_parameters_in_float32_and_multiplies_in_its_dtype(problem):
    problem = replace(problem, phase="forward-backward", dtype="bfloat16", autocast=True)
    step = checked(problem)
    step.warm_up_and_verify(cpu())
    assert 1e-4 < step.verdict.error < 0.03
    with ProductDtypes() as products:
        losses, *gradients = step.launches[0]()
    assert products.found == {torch.bfloat16}
    assert {losses.dtype, *(each.dtype for each in gradients)} == {torch.float32}
    assert step.prepared.extra_bytes_per_set == 4 * problem.count_parameters(SHAPE)
    assert problem.count_bytes(SHAPE) == 2 * step.prepared.extra_bytes_per_set


def test_autocast_to_what_parameters_are_is_unsupported():
    assert "remove --autocast" in TorchModel().explain_unsupported_problem(cpu(), replace(GPT2, autocast=True))


class Altering(SdpaMath):
    """An attention kernel that changes a parameter of its model."""

    name = "altering"
    network = None

    def attend(self, shape, q, k, v):
        with torch.no_grad():
            self.network.head.norm.weight.mul_(1.01)
        return super().attend(shape, q, k, v)


def test_the_reference_of_altered_parameters_is_not_passed_on(monkeypatch):
    problem = replace(GPT2, seed=13)
    monkeypatch.setattr(
        torch_model, "initialize_weights", lambda network, generator: setattr(Altering, "network", network)
    )
    with pytest.raises(WrongResultError, match=r"changed its operands: head\.norm\.weight"):
        checked(problem, TorchModel(f"{__name__}:Altering")).warm_up_and_verify(cpu())
    assert not get_reference_cache(problem, SHAPE, cpu().device)


class Faulty(SdpaMath):
    """An attention kernel without a causal mask, so that each token also attends to later tokens."""

    name = "faulty"

    def attend(self, shape, q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


class Rounded(SdpaMath):
    """An attention kernel with a right output, but with gradients that are only 0.2 times the right ones."""

    name = "rounded"

    def attend(self, shape, q, k, v):
        output = super().attend(shape, q, k, v * 1.0)
        return output.detach() * 0.8 + output * 0.2


@pytest.mark.parametrize(("kind", "phase"), [(Faulty, "forward"), (Rounded, "forward-backward")])
def test_a_wrong_attention_shows_in_the_model(kind, phase):
    kernel = TorchModel(f"{__name__}:{kind.__name__}")
    with pytest.raises(WrongResultError):
        checked(replace(GPT2, phase=phase, dtype="bfloat16"), kernel, ModelShape(2, 64)).warm_up_and_verify(cpu())


class Sequential(TorchAttention):
    """An attention kernel without a backward pass, for tensors [batch, sequence, heads, head dimension]."""

    name = "sequential"
    layout = "bshd"
    directions = ("fwd",)
    dtypes = ("float32",)

    def explain_unavailability(self, backend):
        return None

    def attend(self, shape, q, k, v):
        assert not torch.is_grad_enabled()
        return SdpaMath().attend(shape, *(each.transpose(1, 2) for each in (q, k, v))).transpose(1, 2)


def test_an_attention_of_forward_alone_has_that_phase_alone():
    kernel = TorchModel(f"{__name__}:Sequential")
    checked(LLAMA, kernel).warm_up_and_verify(cpu())
    assert "--direction fwd+bwd: use fwd" in kernel.explain_unsupported_problem(
        cpu(), replace(LLAMA, phase="forward-backward")
    )


def test_what_an_attention_cannot_the_model_cannot():
    assert attention_kernel("sdpa-flash").name in TorchModel("sdpa-flash").explain_unsupported_shape(
        replace(GPT2, d_model=4 * 6), SHAPE
    )
    assert "does not support float16" in TorchModel().explain_unsupported_problem(cpu(), replace(GPT2, dtype="float16"))


def test_a_compiled_model_is_compiled_for_each_shape_anew(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda network, **options: asked.append(options) or network)
    monkeypatch.setattr(torch.compiler, "reset", lambda: asked.append("reset"))
    checked(GPT2, make_kernel(make_operation("model"), "compiled[sdpa-math]")).warm_up_and_verify(cpu())
    assert asked == ["reset", {"dynamic": False}]


def test_a_compiled_model_is_held_to_the_same_reference(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda network, **options: lambda *batch: network(*batch) * 1.5)
    with pytest.raises(WrongResultError):
        checked(GPT2, make_kernel(make_operation("model"), "compiled[sdpa-math]")).warm_up_and_verify(cpu())


def test_what_dynamo_makes_of_a_model_is_one_graph_and_right(monkeypatch):
    graphs = []
    compiled = functools.partial(torch.compile, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    monkeypatch.setattr(torch, "compile", compiled)
    problem = replace(GPT2, phase="forward-backward", layers=1, dtype="bfloat16", autocast=True)
    checked(problem, make_kernel(make_operation("model"), "compiled[sdpa-math]")).warm_up_and_verify(cpu())
    assert len(graphs) == 1


def test_a_launch_of_a_step_is_a_step_to_mamf_profile(run, monkeypatch):
    """Check that ``mamf profile`` counts the steps of ``mamf run``. ``mamf autoprofile`` profiles models this way."""
    sizes = [f"{name}={value}" for name, value in TINY.items() if name != "dtype"]
    model = ["torch[sdpa]", "--operation", "model", "--shape", "b2s16", "--set", *sizes, "phase=step"]
    options = ["--dtype", "float32", "--backend", "cpu", "--no-verify", "--launches", "2"]
    monkeypatch.setattr("mamf.cli.reserve_stdout_for_reports", lambda: None)  # captured stdout has no descriptor
    _, out, _ = run("profile", "--warmup", "1", "--steps", "1", "-m", "mamf", "run", *model, *options)
    assert ": 1 step of" in out
