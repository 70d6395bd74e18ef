"""Prepare and verify attention kernels on torch tensors, in each direction (forward, backward, both).

A kernel derives from ``TorchAttention``, declares its layout and implements ``attend``. The shortest example is
``Sdpa`` in torch_kernels.py. Kernels of a library, such as ``FusedSdpa``, derive from ``LibraryAttention``.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import operator
import re
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch

from mamf.backend import Backend, OperandPool, Unavailability
from mamf.errors import get_first_message_line
from mamf.kernel import PreparedKernel, Verdict
from mamf.machine.environment import get_package_version
from mamf.operations.attention.attention_reference import (
    MAX_ROUNDING_DEVIATIONS,
    ReferenceDistance,
    compare_edge_heads,
    compare_rows,
    compare_rows_on_host,
    compute_key_sum_error,
    judge_distance,
    make_block_structured_inputs,
    verify_nan_and_infinity,
)
from mamf.operations.attention.operation import AttentionKernel, AttentionProblem, AttentionShape
from mamf.operations.operand_sets import (
    ChangeDetector,
    OperandSet,
    SignFlipper,
    combine_operand_sets,
    explain_torch_unavailability,
    explain_wrong_type,
    join_rows,
    list_result_tensors,
    split_buffers_into_sets,
    take_pool_buffers,
    view_as,
)

#: The command that mamf suggests if a kernel does not support a device. Torch's attention runs on all devices.
PORTABLE_COMMAND = "mamf attention --kernel sdpa"
#: Texts in the errors that torch's attention raises if none of its backends supports the operands.
NO_BACKEND_ERROR_TEXTS = ("No available kernel", "No viable backend")
#: The largest relative error ||O - reference|| / ||reference|| of a correct output O of an exact kernel, by dtype.
#: Rounding O and the softmax P to 8 bits of mantissa (bfloat16) causes an error of sqrt(2) * 1.65e-3 = 2.3e-3, as
#: measured in results/. Rounding them to 11 bits (float16) causes an eighth of this error. These limits are at least
#: twice as large. In float32 and float64, the rounding of sums and exponentials causes the errors.
ERROR_BOUND_BY_DTYPE = {"bfloat16": 5e-3, "float16": 1.2e-3, "float32": 2e-5, "float64": 1e-12}
# Errors of gradients may be larger than errors of outputs by this factor, because gradients are rounded more often.
# The largest error of a gradient in results/ is 3.3e-3.
_GRADIENT_TOLERANCE_FACTOR = 2.0
# The smallest subnormal number of a dtype, called u. In float16, the gradient of a score may be so small that it is
# rounded to a multiple of u. The root mean square of this rounding error is u / sqrt(12). The gradient is about V / N,
# where V is the variance of the data (1/3 or more) and N the number of keys that a query sees. So the relative error is
# at most 0.87 * u * N.
_MIN_SUBNORMAL_BY_DTYPE = {"float16": 2.0**-24}
# The operands whose signs mamf changes between launches, by direction. For ``bwd`` mamf does not change V, because all
# launches use the same forward pass, which saved V.
_SIGN_CHANGING_OPERANDS = {"fwd": ("v",), "bwd": ("do",), "fwd+bwd": ("v", "do")}


def describe_head_dims(head_dims: Sequence[int]) -> str:
    """Describe the head dimensions that a kernel supports: ``64, 128`` or ``8 to 256 in steps of 8``."""
    ends = f"{head_dims[0]} to {head_dims[-1]}" if head_dims else ""
    return f"{ends} in steps of {head_dims.step}" if isinstance(head_dims, range) else ", ".join(map(str, head_dims))


class TorchAttention(AttentionKernel):
    """An attention kernel on torch tensors. Derived classes implement ``attend`` or ``bind_operands``.

    - ``layout``: the order of the operands' dimensions: ``bhsd`` (batch, heads, sequence, head dimension) or ``bshd``.
    - ``supports_gqa``: whether the kernel supports fewer kv heads than query heads.
    - ``supports_window``: whether the kernel supports a sliding window.
    - ``supports_unequal_lengths``: whether the kernel's causal mask is right if the numbers of queries and keys differ.
    - ``supports_unequal_head_dims``: whether keys and values may have different head dimensions.
    - ``head_dims``: the supported head dimensions, of keys and of values.
    """

    layout: ClassVar[str] = "bhsd"
    supports_gqa: ClassVar[bool] = True
    supports_window: ClassVar[bool] = False
    supports_unequal_lengths: ClassVar[bool] = True
    supports_unequal_head_dims: ClassVar[bool] = True
    head_dims: ClassVar[range | tuple[int, ...]] = range(8, 257, 8)
    #: The largest ||O - reference|| / ||reference|| of a correct output O; None: see ERROR_BOUND_BY_DTYPE.
    tolerance: ClassVar[float | None] = None

    def explain_unavailability(self, backend: Backend) -> Unavailability | None:
        return explain_torch_unavailability(backend)

    def attend(self, shape: AttentionShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Launch the forward pass of one shape, and return the output. All tensors have the kernel's layout."""
        raise NotImplementedError(f"{type(self).__name__} must implement attend or bind_operands")

    def bind_operands(
        self, backend: Backend, problem: AttentionProblem, shape: AttentionShape
    ) -> Callable[..., torch.Tensor]:
        """Return a function of q, k and v that launches the forward pass of one shape and returns the output.

        If a kernel must be compiled, compile it in this method, which mamf does not time.
        """
        return lambda q, k, v: self.attend(shape, q, k, v)

    def make_details(
        self, problem: AttentionProblem, shape: AttentionShape, operands: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        """Return details of a launch for reports, such as the sparsity or the backend that the library chose."""
        return {}

    def explain_unsupported_shape(self, problem: AttentionProblem, shape: AttentionShape) -> str | None:
        key_dim, value_dim, supported = shape.head_dim, shape.head_dim_v, describe_head_dims(self.head_dims)
        refusals = (
            (
                not self.supports_gqa and shape.heads != shape.kv_heads,
                f"does not support fewer kv heads than query heads: set --kv-heads to {shape.heads}",
            ),
            (not self.supports_window and shape.window is not None, "does not support a window: remove --window"),
            (
                not self.supports_unequal_head_dims and key_dim != value_dim,
                f"needs the same head dimension for keys and values: use --head-dims {key_dim}",
            ),
            (key_dim not in self.head_dims, f"does not support head dimension {key_dim}: use {supported}"),
            (
                value_dim not in self.head_dims,
                f"does not support head dimension {value_dim} of values: use {supported}",
            ),
            (
                shape.causal and not self.supports_unequal_lengths and shape.seqlen_q != shape.seqlen_k,
                "needs as many queries as keys for a causal mask: remove --query-lens",
            ),
        )
        return next((f"{self.name} {text}" for is_wrong, text in refusals if is_wrong), None)

    def prepare(
        self,
        backend: Backend,
        problem: AttentionProblem,
        shape: AttentionShape,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> PreparedKernel:
        forward_pass = self.bind_operands(backend, problem, shape)
        buffer_sets = split_buffers_into_sets(take_pool_buffers(pool, problem.list_buffers(shape, sets)), sets)
        attentions = [
            PreparedAttention(self, problem, shape, self.view_operands(problem, shape, buffers))
            for buffers in buffer_sets
        ]
        if problem.direction == "bwd":
            # The code below measures how much memory the forward passes save for the backward passes. Run one forward
            # pass first, because some libraries allocate other memory, such as a workspace, in their first launch.
            attentions[0].make_launch(forward_pass)
            attentions[0].saved_output = None
        bytes_before = backend.read_allocated_memory_bytes()
        launches = [attention.make_launch(forward_pass) for attention in attentions]
        bytes_after = backend.read_allocated_memory_bytes()
        extra_bytes_per_set = 0 if bytes_before is None or bytes_after is None else (bytes_after - bytes_before) // sets
        operand_sets = [
            attention.make_operand_set(launch) for attention, launch in zip(attentions, launches, strict=True)
        ]
        return combine_operand_sets(operand_sets, tuple, extra_bytes_per_set=extra_bytes_per_set)

    def view_operands(
        self, problem: AttentionProblem, shape: AttentionShape, buffers: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """View one-dimensional buffers as q, k, v and, for a backward pass, do (the gradient of the output), in the
        kernel's layout. If the problem has a sparsity, return a q and a k with block structure instead.
        """
        views = {}
        for name, tensor in buffers.items():
            heads, length, width = shape.tensor_dimensions[name]
            order = (heads, length) if self.layout == "bhsd" else (length, heads)
            views[name] = view_as(tensor, shape.batch, *order, width)
        if problem.sparsity:
            views |= make_block_structured_inputs(
                views["q"], views["k"], problem.sparsity, 2 if self.layout == "bhsd" else 1
            )
        return views

    def is_refusal(self, error: Exception) -> bool:
        return isinstance(error, RuntimeError) and any(text in str(error) for text in NO_BACKEND_ERROR_TEXTS)

    def get_error_bound(self, problem: AttentionProblem) -> float:
        """Return the largest error ||O - reference|| / ||reference|| of a correct output O of this kernel."""
        return self.tolerance if self.tolerance is not None else ERROR_BOUND_BY_DTYPE[problem.dtype]


class PreparedAttention:
    """A kernel and the operands of its launches. This class makes the launch function and verifies the output."""

    def __init__(
        self,
        kernel: TorchAttention,
        problem: AttentionProblem,
        shape: AttentionShape,
        operands: Mapping[str, torch.Tensor],
    ) -> None:
        self._kernel, self._problem, self._shape, self._operands = kernel, problem, shape, operands
        #: The output of the single forward pass that all launches of direction ``bwd`` use; None for other directions.
        self.saved_output: torch.Tensor | None = None
        self._find_changed_operands = ChangeDetector(operands)
        self._sign_flippers = [
            SignFlipper(join_rows(operands[name])) for name in _SIGN_CHANGING_OPERANDS[problem.direction]
        ]

    def make_operand_set(self, launch: Callable[[], object]) -> OperandSet:
        is_special = self._problem.direction == "fwd" and self._kernel.is_exact
        verify_special_values = partial(
            verify_nan_and_infinity,
            self._shape,
            self._view_as_bhsd(self._operands),
            lambda: self._view_as_bhsd(self._name_results(launch()))["o"],
        )
        return OperandSet(
            launch,
            self.verify,
            verify_whole_output=self.verify_whole_output,
            change_operands=lambda: list(map(SignFlipper.flip_random_signs, self._sign_flippers)),
            restore_operands=lambda: list(map(SignFlipper.restore_signs, self._sign_flippers)),
            list_changed_operands=self._find_changed_operands,
            is_deterministic=is_special,
            verify_special_values=verify_special_values if is_special else None,
        )

    def make_launch(self, forward_pass: Callable[..., torch.Tensor]) -> Callable[[], object]:
        """Return a function without arguments that launches the passes of the problem's direction.

        ``forward_pass``: launches the forward pass, given q, k and v. For the direction ``bwd``, call it once and keep
        the autograd graph, which each launch runs backward.
        """
        operands = [self._operands[name] for name in "qkv"]
        if self._problem.direction == "fwd":
            return partial(torch.no_grad()(forward_pass), *operands)
        leaves, gradient = [each.detach().requires_grad_() for each in operands], self._operands["do"]
        if self._problem.direction == "bwd":
            output = forward_pass(*leaves)
            self.saved_output = output.detach()
            return lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True)

        def run_both_passes() -> object:
            result = forward_pass(*leaves)
            return (result.detach(), *torch.autograd.grad(result, leaves, gradient))

        return run_both_passes

    def verify(self, result: object) -> Verdict:
        """Verify random rows of the output and of dQ, the gradient of Q, in the first and the last head."""
        if reason := self._explain_wrong_type(result):
            return Verdict(math.inf, 0.0, reason=reason)
        verdict = self._judge_distance(compare_rows(*self._get_comparison_inputs(result), covers_all_heads=False))
        return replace(verdict, details={**self._kernel_details, **verdict.details})

    @cached_property
    def _kernel_details(self) -> dict[str, Any]:
        return self._kernel.make_details(self._problem, self._shape, [self._operands[name] for name in "qkv"])

    def verify_whole_output(self, result: object) -> Verdict:
        """Verify the whole output and all gradients of the first and the last head, and samples of all other heads.

        The samples are random rows of the output and of dQ, and the sums of dK and dV along the keys. The host also
        verifies some rows of one head.
        """
        inputs = self._get_comparison_inputs(result)
        whole_verdict, host_distance = self._judge_distance(compare_edge_heads(*inputs)), compare_rows_on_host(*inputs)
        row_verdicts = [
            self._judge_distance(distance) for distance in (compare_rows(*inputs), host_distance) if distance
        ]
        worst_verdict = max(whole_verdict, *row_verdicts, key=lambda verdict: (not verdict.ok, verdict.error))
        reason = worst_verdict.reason
        if self._problem.has_backward_pass and worst_verdict.ok:
            sum_error = compute_key_sum_error(*inputs)
            max_sum_error = MAX_ROUNDING_DEVIATIONS * self._kernel.get_error_bound(self._problem)
            reason = (
                f"sums of dK or dV have a relative error of {sum_error:.2g}; "
                f"rounding explains at most {max_sum_error:.2g}"
                if sum_error > max_sum_error
                else ""
            )
        return replace(worst_verdict, details=whole_verdict.details, reason=reason)

    def _get_comparison_inputs(
        self, result: object
    ) -> tuple[AttentionShape, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        return self._shape, self._view_as_bhsd(self._operands), self._view_as_bhsd(self._name_results(result))

    def _judge_distance(self, distance: ReferenceDistance) -> Verdict:
        kernel, problem = self._kernel, self._problem
        bound, mean_keys = kernel.get_error_bound(problem), self._shape.unmasked_pairs_per_head / self._shape.seqlen_q
        factor = _GRADIENT_TOLERANCE_FACTOR + mean_keys * _MIN_SUBNORMAL_BY_DTYPE.get(problem.dtype, 0.0) / bound
        details = {"gradient_error": distance.max_gradient_error} if problem.has_backward_pass else {}
        if not kernel.is_exact:
            details |= {"cosine_similarity": distance.cosine_similarity, "relative_l1": distance.relative_l1_error}
        return replace(judge_distance(distance, bound, factor, kernel.is_exact), details=details)

    def _view_as_bhsd(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        is_bhsd = self._kernel.layout == "bhsd"
        return {name: tensor if is_bhsd else tensor.transpose(1, 2) for name, tensor in tensors.items()}

    def _explain_wrong_type(self, result: object) -> str:
        q, k, v = (self._operands[name] for name in "qkv")
        expected_results = [q[..., :1].expand(*q.shape[:-1], v.shape[-1]), q, k, v]
        results = result if isinstance(result, tuple) else (result,)
        pairs = zip(results, expected_results if self.saved_output is None else expected_results[1:], strict=False)
        return next(filter(None, (explain_wrong_type(each, expected) for each, expected in pairs)), "")

    def _name_results(self, result: object) -> dict[str, torch.Tensor]:
        """Return the tensors of a launch's result by name: the output ``o`` and, for a backward pass, ``dq``, ``dk``
        and ``dv``.
        """
        outputs = list_result_tensors(result)
        if self.saved_output is not None:
            outputs = [self.saved_output, *outputs]
        return dict(zip(("o", "dq", "dk", "dv") if self._problem.has_backward_pass else ("o",), outputs, strict=True))


# -- kernels of libraries ----------------------------------------------------------------------------------------------


ComputeCapability = tuple[int, int]
#: The highest compute capability in the ``capability_range`` of a library that supports all newer NVIDIA cards.
NO_MAX_CAPABILITY: ComputeCapability = (99, 9)
# Matches the message of a RuntimeError if a library, or the way it was built, does not support a dtype, feature or
# size.
_UNSUPPORTED_ERROR_PATTERN = re.compile(r"\bonly supports? |\bbuild (does not support|has) |\bbuilt with .* disabled")


class KernelLibrary:
    """A library of kernels from a vendor or a third party.

    mamf imports the library only when it needs it. The library may be absent, half installed, or built for another card
    or CUDA version, so the import may raise any exception. mamf reports the exception as the reason why the kernel is
    unavailable, with the command that fixes the problem. Text that the library prints during import goes to stderr,
    because mamf writes results to stdout.

    - ``library_name``: its name in messages. ``distribution_name``: its name in pip. ``install_command``: the command
      that installs it.
    - ``module_name``: its Python module. ``function_name``: the function of this module that the kernel calls; empty
      if the kernel calls several.
    - ``runtimes``: the runtimes of the backends on which it runs, such as ``cuda``.
    - ``capability_range``: the lowest and the highest compute capability of the NVIDIA cards on which it runs.
    - ``portable_install_command``: the command that mamf suggests on devices with other runtimes.
    - ``alternative_nvidia_install_command``: the command that mamf suggests on NVIDIA cards that the library does not
      support; if empty, mamf suggests ``portable_install_command``.
    """

    library_name: ClassVar[str]
    module_name: ClassVar[str]
    function_name: ClassVar[str] = ""
    distribution_name: ClassVar[str]
    install_command: ClassVar[str]
    runtimes: ClassVar[tuple[str, ...]] = ("cuda",)
    capability_range: ClassVar[tuple[ComputeCapability, ComputeCapability]] = (0, 0), NO_MAX_CAPABILITY
    portable_install_command: ClassVar[str] = PORTABLE_COMMAND
    alternative_nvidia_install_command: ClassVar[str] = ""

    def import_library(self) -> Any:
        """Import the library, and return the function that the kernel calls, or the module if it calls several.

        The import may raise any exception. Derived classes raise ModuleNotFoundError if a module named ``module_name``
        is installed, but belongs to another library.
        """
        module = importlib.import_module(self.module_name)
        return operator.attrgetter(self.function_name)(module) if self.function_name else module

    def make_version_details(self) -> dict[str, Any]:
        """Return the name and version of the installed package as a detail of a launch; {} if it is not installed."""
        version = get_package_version(self.distribution_name)
        return {"library": f"{self.distribution_name} {version}"} if version else {}

    def is_refusal(self, error: Exception) -> bool:
        return isinstance(error, (AssertionError, NotImplementedError)) or (
            isinstance(error, RuntimeError) and _UNSUPPORTED_ERROR_PATTERN.search(str(error)) is not None
        )

    def supports_capability(self, capability: ComputeCapability) -> bool:
        """Return whether the library supports NVIDIA cards of this compute capability (major, minor)."""
        lowest, highest = self.capability_range
        return lowest <= capability <= highest

    def explain_unavailability(self, backend: Backend) -> Unavailability | None:
        if backend.runtime not in self.runtimes:
            return Unavailability(
                f"{self.library_name} does not support the backend {backend.name}", self.portable_install_command
            )
        if backend.runtime == "cuda":
            major, minor = torch.cuda.get_device_capability(backend.index)
            if not self.supports_capability((major, minor)):
                reason = f"{self.library_name} does not support cards with compute capability {major}.{minor}"
                return Unavailability(reason, self.alternative_nvidia_install_command or self.portable_install_command)
        try:
            self.import_library_quietly()
        except Exception as error:  # The import of a broken library may raise any exception.
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing and f"{self.module_name}.".startswith(f"{missing}."):
                return Unavailability(f"{self.library_name} is not installed: {error}", self.install_command)
            reason = f"{self.library_name} is installed but cannot be loaded: {get_first_message_line(error)}"
            # If a dependency is missing, the install command installs it. Otherwise the library itself is broken. To
            # install the library again, pip needs --force-reinstall. Without --no-deps, pip would also reinstall the
            # dependencies and replace torch.
            reinstall_command = self.install_command.replace(" --no-deps", "").replace(
                "pip install", "pip install --force-reinstall --no-deps", 1
            )
            return Unavailability(reason, self.install_command if missing else reinstall_command)
        return None

    def import_library_quietly(self) -> Any:
        with contextlib.redirect_stdout(sys.stderr):
            return self.import_library()


class LibraryAttention(KernelLibrary, TorchAttention):
    """An attention kernel from a library. Derived classes implement ``launch_forward``."""

    supports_unequal_head_dims = False

    @abstractmethod
    def launch_forward(
        self,
        function: Any,
        problem: AttentionProblem,
        shape: AttentionShape,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> Any:
        """Launch the forward pass, and return the output in the kernel's layout, or a tuple that begins with it.

        ``function``: the function or module that ``import_library`` returned.
        """

    def bind_operands(
        self, backend: Backend, problem: AttentionProblem, shape: AttentionShape
    ) -> Callable[..., torch.Tensor]:
        function = self.import_library_quietly()

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            result = self.launch_forward(function, problem, shape, q, k, v)
            return result[0] if isinstance(result, tuple) else result

        return attend

    def make_details(
        self, problem: AttentionProblem, shape: AttentionShape, operands: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        return self.make_version_details()


# The tolerance of quantized kernels for inputs with block structure. For these inputs, rounding to int8 causes larger
# errors, because the scores of attended keys are far above those of other keys. A numerical model of int8 with a scale
# per block predicts an error of 6.7e-2. The limit is about twice as large.
_BLOCK_STRUCTURE_TOLERANCE = 1.5e-1


class QuantizedAttention(LibraryAttention):
    """An attention kernel that quantizes Q, K and V in every launch. It is approximate and has no backward pass."""

    directions = ("fwd",)
    is_exact = False

    def get_error_bound(self, problem: AttentionProblem) -> float:
        return _BLOCK_STRUCTURE_TOLERANCE if problem.sparsity else super().get_error_bound(problem)


def get_window_size(shape: AttentionShape, unlimited_size: int | None) -> tuple[int | None, int | None]:
    """Return the argument ``window_size`` of attention libraries: how many keys a query sees before and after itself.

    ``unlimited_size``: the number that means "no limit" in the library.
    """
    if shape.window is None:
        return unlimited_size, unlimited_size
    return shape.window, 0 if shape.causal else shape.window
