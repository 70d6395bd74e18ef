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
each_style = pytest.mark.parametrize("problem", [GPT2, LLAMA, MOE], ids=["gpt2", "llama", "moe"])


@functools.cache
def open_cpu():
    return open_backend("cpu")


def prepare(problem, kernel=None, shape=SHAPE):
    kernel = kernel or TorchModel("sdpa-math")
    cpu = open_cpu()
    assert not (kernel.explain_unsupported_problem(cpu, problem) or kernel.explain_unsupported_shape(problem, shape))
    return CheckedKernel(kernel.prepare(cpu, problem, shape, cpu.make_operand_pool("normal", 0), sets=3))


class TestModelKernel(AnyKernelContract):
    @pytest.fixture
    def backend(self):
        return open_cpu()

    @pytest.fixture
    def kernel(self):
        return make_kernel(make_operation("model"), "torch[sdpa-math]")

    @pytest.fixture
    def problem(self):
        return replace(LLAMA, phase="forward-backward")

    @pytest.fixture
    def shape(self):
        return SHAPE


def test_a_model_that_does_not_fit_in_memory_is_never_made(monkeypatch):
    """Check that mamf does not start to make the model. A system that overcommits memory would kill the process."""
    monkeypatch.setattr(torch_model, "make_network", lambda *arguments: pytest.fail("mamf started to make the model"))
    with pytest.raises(MemoryError, match=r"out of memory: \d+\.\d GB are needed"):
        prepare(replace(GPT2, layers=99_999_999))


@each_style
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_forward_and_backward_is_right(problem, dtype):
    step = prepare(replace(problem, phase="forward-backward", dtype=dtype))
    step.warm_up_and_verify(open_cpu())
    assert step.verdict.details["gradient_error"] > 0
    assert step.verdict.error < (1e-5 if dtype == "float32" else 0.03)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
def test_a_step_runs_its_optimizer_and_keeps_its_parameters(optimizer, monkeypatch):
    problem = replace(GPT2, phase="step", optimizer=optimizer)
    step = prepare(problem)
    step.warm_up_and_verify(open_cpu())
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


def test_checkpointing_does_not_change_the_results():
    problem = replace(GPT2, phase="forward-backward")
    plain, checkpointed = prepare(problem), prepare(replace(problem, checkpointing=True))
    for plain_result, checkpointed_result in zip(plain.launches[0](), checkpointed.launches[0](), strict=True):
        assert torch.allclose(plain_result, checkpointed_result)


class MatmulDtypes(TorchDispatchMode):
    """A dispatch mode that collects the dtypes of the operands of all matmuls."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.name() in ("aten::mm", "aten::bmm", "aten::addmm"):
            self.dtypes |= {each.dtype for each in arguments if isinstance(each, torch.Tensor)}
        return function(*arguments, **(keywords or {}))


@each_style
def test_autocast_keeps_parameters_in_float32_and_multiplies_in_its_dtype(problem):
    problem = replace(problem, phase="forward-backward", dtype="bfloat16", autocast=True)
    step = prepare(problem)
    step.warm_up_and_verify(open_cpu())
    assert 1e-4 < step.verdict.error < 0.03
    with MatmulDtypes() as matmuls:
        losses, *gradients = step.launches[0]()
    assert matmuls.dtypes == {torch.bfloat16}
    assert {losses.dtype, *(each.dtype for each in gradients)} == {torch.float32}
    assert step.prepared.extra_bytes_per_set == 4 * problem.count_parameters(SHAPE)
    assert problem.count_bytes(SHAPE) == 2 * step.prepared.extra_bytes_per_set


def test_autocast_to_the_dtype_of_the_parameters_is_unsupported():
    assert "remove --autocast" in TorchModel().explain_unsupported_problem(open_cpu(), replace(GPT2, autocast=True))


class ParameterChanging(SdpaMath):
    """An attention kernel that changes a parameter of its model."""

    name = "parameter-changing"
    network = None

    def attend(self, shape, q, k, v):
        with torch.no_grad():
            self.network.head.norm.weight.mul_(1.01)
        return super().attend(shape, q, k, v)


def test_the_reference_of_changed_parameters_is_not_cached(monkeypatch):
    problem = replace(GPT2, seed=13)
    monkeypatch.setattr(
        torch_model, "initialize_weights", lambda network, generator: setattr(ParameterChanging, "network", network)
    )
    with pytest.raises(WrongResultError, match=r"changed its operands: head\.norm\.weight"):
        prepare(problem, TorchModel(f"{__name__}:ParameterChanging")).warm_up_and_verify(open_cpu())
    assert not get_reference_cache(problem, SHAPE, open_cpu().device)


class WithoutMask(SdpaMath):
    """An attention kernel without a causal mask, so that each token also attends to later tokens."""

    name = "without-mask"

    def attend(self, shape, q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


class SmallGradients(SdpaMath):
    """An attention kernel with a right output, but with gradients that are only 0.2 times the right ones."""

    name = "small-gradients"

    def attend(self, shape, q, k, v):
        output = super().attend(shape, q, k, v)
        return output.detach() * 0.8 + output * 0.2


@pytest.mark.parametrize(("kind", "phase"), [(WithoutMask, "forward"), (SmallGradients, "forward-backward")])
def test_a_wrong_attention_shows_in_the_model(kind, phase):
    kernel = TorchModel(f"{__name__}:{kind.__name__}")
    with pytest.raises(WrongResultError):
        prepare(replace(GPT2, phase=phase, dtype="bfloat16"), kernel, ModelShape(2, 64)).warm_up_and_verify(open_cpu())


class ForwardOnly(TorchAttention):
    """An attention kernel without a backward pass, for tensors [batch, sequence, heads, head dimension]."""

    name = "forward-only"
    layout = "bshd"
    directions = ("fwd",)
    dtypes = ("float32",)

    def explain_unavailability(self, backend):
        return None

    def attend(self, shape, q, k, v):
        assert not torch.is_grad_enabled()
        return SdpaMath().attend(shape, *(each.transpose(1, 2) for each in (q, k, v))).transpose(1, 2)


def test_an_attention_kernel_without_a_backward_pass_supports_only_the_forward_phase():
    kernel = TorchModel(f"{__name__}:ForwardOnly")
    prepare(LLAMA, kernel).warm_up_and_verify(open_cpu())
    assert "--direction fwd+bwd: use fwd" in kernel.explain_unsupported_problem(
        open_cpu(), replace(LLAMA, phase="forward-backward")
    )


def test_a_model_supports_only_what_its_attention_kernel_supports():
    assert attention_kernel("sdpa-flash").name in TorchModel("sdpa-flash").explain_unsupported_shape(
        replace(GPT2, d_model=4 * 6), SHAPE
    )
    float16_problem = replace(GPT2, dtype="float16")
    assert "does not support float16" in TorchModel().explain_unsupported_problem(open_cpu(), float16_problem)


def test_a_model_is_compiled_again_for_each_shape(monkeypatch):
    compile_calls = []
    monkeypatch.setattr(torch, "compile", lambda network, **options: compile_calls.append(options) or network)
    monkeypatch.setattr(torch.compiler, "reset", lambda: compile_calls.append("reset"))
    prepare(GPT2, make_kernel(make_operation("model"), "compiled[sdpa-math]")).warm_up_and_verify(open_cpu())
    assert compile_calls == ["reset", {"dynamic": False}]


def test_a_compiled_model_with_wrong_results_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda network, **options: lambda *batch: network(*batch) * 1.5)
    with pytest.raises(WrongResultError):
        prepare(GPT2, make_kernel(make_operation("model"), "compiled[sdpa-math]")).warm_up_and_verify(open_cpu())


def test_dynamo_makes_one_graph_of_a_model_and_its_results_are_right(monkeypatch):
    graphs = []
    compiled = functools.partial(torch.compile, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    monkeypatch.setattr(torch, "compile", compiled)
    problem = replace(GPT2, phase="forward-backward", layers=1, dtype="bfloat16", autocast=True)
    prepare(problem, make_kernel(make_operation("model"), "compiled[sdpa-math]")).warm_up_and_verify(open_cpu())
    assert len(graphs) == 1


def test_mamf_profile_counts_each_launch_of_a_step(run, monkeypatch):
    """Check that ``mamf profile`` counts the steps of ``mamf run``. ``mamf autoprofile`` profiles models this way."""
    sizes = [f"{name}={value}" for name, value in TINY.items() if name != "dtype"]
    model = ["torch[sdpa]", "--operation", "model", "--shape", "b2s16", "--set", *sizes, "phase=step"]
    options = ["--dtype", "float32", "--backend", "cpu", "--no-verify", "--launches", "2"]
    monkeypatch.setattr("mamf.cli.reserve_stdout_for_reports", lambda: None)  # captured stdout has no descriptor
    _, out, _ = run("profile", "--warmup", "1", "--steps", "1", "-m", "mamf", "run", *model, *options)
    assert ": 1 step of" in out
