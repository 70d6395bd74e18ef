"""Prepare and verify attention kernels on torch tensors, in each direction (forward, backward, both).

A kernel derives from ``TorchAttention``, declares its layout and implements ``attend``. The shortest example is
``Sdpa`` in torch_kernels.py. Kernels of a library derive from ``LibraryAttention``, such as ``FusedSdpa``.
"""

from __future__ import annotations

import contextlib
import math
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch

from mamf.backend import Backend, OperandPool, Unavailable
from mamf.errors import get_first_message_line
from mamf.kernel import Prepared, Verdict
from mamf.machine.environment import get_package_version
from mamf.operations.attention.attention_reference import (
    ReferenceDistance,
    compare_edge_heads,
    compare_rows,
    compare_rows_on_host,
    compute_key_sum_error,
    make_block_structured_inputs,
    verify_special_attention,
)
from mamf.operations.attention.operation import AttentionKernel, AttentionProblem, AttentionShape
from mamf.operations.operand_sets import (
    ChangeDetector,
    OperandSet,
    SignFlipper,
    check_torch_backend,
    combine_operand_sets,
    explain_wrong_type,
    get_max_error,
    join_rows,
    list_tensors,
    split_into_sets,
    take_pool_buffers,
    view_as,
)

#: The command that mamf suggests if a kernel does not support a device, because torch's attention runs on all devices.
PORTABLE_COMMAND = "mamf attention --kernel sdpa"
#: Texts in the errors that torch's attention raises if none of its backends supports the operands.
NO_BACKEND_ERROR_TEXTS = ("No available kernel", "No viable backend")
# The largest ||O - reference|| / ||reference|| of a correct output O, by dtype. Rounding O and P, the softmax, to 8
# bits of mantissa (bfloat16) causes sqrt(2) * 1.65e-3 = 2.3e-3, as measured in results/; 11 bits (float16) cause an
# eighth of that. These limits are at least twice as large. In float32 and float64 sums and exponentials cause the
# errors.
_ERROR_BOUNDS = {"bfloat16": 5e-3, "float16": 1.2e-3, "float32": 2e-5, "float64": 1e-12}
# Errors of gradients may be larger than errors of outputs by this factor, because gradients are rounded more often.
# The largest error in results/ is 3.3e-3.
_GRADIENT_FACTOR = 2.0
# The smallest subnormal number of float16. The gradient of a score is about the variance of the data (1/3 or more)
# divided by the number of keys that a query sees. In float16 the gradient may be subnormal, so it is rounded to a
# multiple of this number, which adds an error of up to 0.87 times this number times the number of keys.
_SMALLEST_SUBNORMAL = {"float16": 2.0**-24}
# The slope of a linear fit of a result to the reference may differ from 1 by the first number, plus the second number
# times the standard deviation of rounding.
_MAX_SLOPE_ERROR, _MAX_DEVIATIONS = 1e-3, 8.0
# The operands whose signs mamf changes between launches, by direction. For ``bwd`` it does not change V, because the
# saved forward pass contains V.
_CHANGING_OPERANDS = {"fwd": ("v",), "bwd": ("do",), "fwd+bwd": ("v", "do")}
# The largest relative error of a single row of the output, for exact and for approximate kernels. Rounding causes a far
# smaller error, and a row that the kernel never wrote has a far larger error.
_ROW_TOLERANCE, _ROW_TOLERANCE_APPROXIMATE = 0.25, 0.6


def get_attention_tolerance(dtype: str) -> float:
    """Return the largest ||O - reference|| / ||reference|| that the output O of an exact kernel may have."""
    return _ERROR_BOUNDS[dtype]


class TorchAttention(AttentionKernel):
    """An attention kernel on torch tensors. Derived classes implement ``attend`` or ``bind``.

    - ``layout``: the order of the operands' dimensions: ``bhsd`` (batch, heads, sequence, head dimension) or ``bshd``.
    - ``has_gqa``: whether it supports fewer kv heads than query heads. ``has_window``: whether it supports a window.
    - ``has_unequal_lengths``: whether its causal mask is right if the numbers of queries and keys differ.
    - ``head_dims``: the head dimensions that it supports.
    """

    layout: ClassVar[str] = "bhsd"
    has_gqa: ClassVar[bool] = True
    has_window: ClassVar[bool] = False
    has_unequal_lengths: ClassVar[bool] = True
    head_dims: ClassVar[range | tuple[int, ...]] = range(8, 257, 8)
    #: The head dimensions that it supports for values; None: those in ``head_dims``.
    value_dims: ClassVar[range | None] = None
    #: The largest ||O - reference|| / ||reference|| of a correct output O; None: the limit of the dtype.
    tolerance: ClassVar[float | None] = None

    def unavailable(self, backend: Backend) -> Unavailable | None:
        return check_torch_backend(backend)

    def attend(self, shape: AttentionShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Launch the forward pass of one shape, and return the output. All tensors have the kernel's layout."""
        raise NotImplementedError(f"{type(self).__name__} must implement attend or bind")

    def bind(self, backend: Backend, problem: AttentionProblem, shape: AttentionShape) -> Callable[..., torch.Tensor]:
        """Return a function of q, k and v that launches the forward pass of one shape and returns the output.

        Kernels that must be compiled compile here, outside of the timed launches.
        """
        return lambda q, k, v: self.attend(shape, q, k, v)

    def details(
        self, problem: AttentionProblem, shape: AttentionShape, operands: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        """Return details of a launch for reports, such as the sparsity or the backend that the library chose."""
        return {}

    def unsupported_shape(self, problem: AttentionProblem, shape: AttentionShape) -> str | None:
        if not self.has_gqa and shape.heads != shape.kv_heads:
            return f"{self.name} does not support fewer kv heads than heads: set --kv-heads to {shape.heads}"
        if not self.has_window and shape.window is not None:
            return f"{self.name} does not support a window: remove --window"
        if shape.head_dim not in self.head_dims:
            return f"{self.name} does not support head dimension {shape.head_dim}: use {_format_sizes(self.head_dims)}"
        if shape.head_dim_v not in (value_dims := self.value_dims or self.head_dims):
            return f"{self.name} does not support values of width {shape.head_dim_v}: use {_format_sizes(value_dims)}"
        if shape.causal and not self.has_unequal_lengths and shape.seqlen_q != shape.seqlen_k:
            return f"{self.name} needs as many queries as keys for a causal mask"
        return None

    def prepare(
        self,
        backend: Backend,
        problem: AttentionProblem,
        shape: AttentionShape,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> Prepared:
        forward_pass = self.bind(backend, problem, shape)
        memory = split_into_sets(take_pool_buffers(pool, problem.buffers(shape, sets)), sets)
        attentions = [
            PreparedAttention(self, problem, shape, self.view_operands(problem, shape, flat)) for flat in memory
        ]
        if problem.direction == "bwd":
            # Run a forward pass first, so that memory that a library allocates only once, such as a workspace, is not
            # counted below as memory of a saved forward pass.
            attentions[0].make_launch(forward_pass)
            attentions[0].release_forward()
        before = backend.allocated_memory()
        launches = [attention.make_launch(forward_pass) for attention in attentions]
        after = backend.allocated_memory()
        ready = [each.operand_set(launch) for each, launch in zip(attentions, launches, strict=True)]

        def find_changed() -> Sequence[str]:
            return tuple(dict.fromkeys(name for each in attentions for name in each.find_changed()))

        held = 0 if before is None or after is None else (after - before) // sets
        return combine_operand_sets(ready, find_changed, held_bytes=held)

    def view_operands(
        self, problem: AttentionProblem, shape: AttentionShape, flat: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """View one-dimensional buffers as q, k, v and, for a backward pass, do (the gradient of the output), in the
        kernel's layout. If the problem has a sparsity, return a q and a k with block structure instead.
        """
        views = {}
        for name, tensor in flat.items():
            heads, length, width = shape.dimensions[name.replace("do", "o")]
            order = (heads, length) if self.layout == "bhsd" else (length, heads)
            views[name] = view_as(tensor, shape.batch, *order, width)
        if problem.sparsity:
            views |= make_block_structured_inputs(
                views["q"], views["k"], problem.sparsity, 2 if self.layout == "bhsd" else 1
            )
        return views

    def refuses(self, error: Exception) -> bool:
        return isinstance(error, RuntimeError) and any(text in str(error) for text in NO_BACKEND_ERROR_TEXTS)

    def get_error_bound(self, problem: AttentionProblem) -> float:
        """Return the largest ||O - reference|| / ||reference|| that this kernel's output O may have."""
        return self.tolerance if self.tolerance is not None else get_attention_tolerance(problem.dtype)


class PreparedAttention:
    """One operand set of an attention kernel, which makes its launch and verifies the results."""

    def __init__(
        self,
        kernel: TorchAttention,
        problem: AttentionProblem,
        shape: AttentionShape,
        operands: Mapping[str, torch.Tensor],
    ) -> None:
        self._kernel, self._problem, self._shape, self._operands = kernel, problem, shape, operands
        self._forward: torch.Tensor | None = None
        self._details: dict[str, Any] | None = None
        self.find_changed = ChangeDetector(operands)
        self._signs = [SignFlipper(join_rows(operands[name])) for name in _CHANGING_OPERANDS[problem.direction]]

    def operand_set(self, launch: Callable[[], object]) -> OperandSet:
        is_special = self._problem.direction == "fwd" and self._kernel.is_exact
        return OperandSet(
            launch,
            self.verify,
            verify_whole=self.verify_whole,
            change=self.change_signs,
            restore=self.restore_signs,
            repeats_bits=is_special,
            verify_special=partial(self._verify_special, launch) if is_special else None,
        )

    def run_forward(self, forward_pass: Callable[..., torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return forward_pass(*(self._operands[name] for name in "qkv"))

    def make_launch(self, forward_pass: Callable[..., torch.Tensor]) -> Callable[[], object]:
        """Return a function without arguments that launches the passes of the problem's direction.

        ``forward_pass``: launches the forward pass with q, k and v. For ``bwd``, run the forward pass here, once, and
        keep its autograd graph: each launch runs the graph backward.
        """
        if self._problem.direction == "fwd":
            return lambda: self.run_forward(forward_pass)
        leaves = [self._operands[name].detach().requires_grad_() for name in "qkv"]
        gradient = self._operands["do"]
        if self._problem.direction == "bwd":
            output = forward_pass(*leaves)
            self._forward = output.detach()
            return lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True)

        def run_both_passes() -> object:
            result = forward_pass(*leaves)
            return (result.detach(), *torch.autograd.grad(result, leaves, gradient))

        return run_both_passes

    def release_forward(self) -> None:
        """Release the output of the saved forward pass, and with it the memory of the pass."""
        self._forward = None

    def change_signs(self) -> None:
        for signs in self._signs:
            signs.change()

    def restore_signs(self) -> None:
        for signs in self._signs:
            signs.restore()

    def verify(self, result: object) -> Verdict:
        """Verify random rows of the output and of dQ, the gradient of Q, in the first and the last head."""
        if reason := self._explain_wrong_type(result):
            return Verdict(math.inf, 0.0, reason=reason)
        if self._details is None:
            operands = [self._operands[name] for name in "qkv"]
            self._details = self._kernel.details(self._problem, self._shape, operands)
        found = self._judge_distance(compare_rows(*self._list_comparison_inputs(result), covers_all_heads=False))
        return replace(found, details={**self._details, **found.details})

    def verify_whole(self, result: object) -> Verdict:
        """Verify the whole output and all gradients of the first and the last head, and samples of all other heads.

        The samples are random rows of the output and of dQ, and the sums of dK and dV along the keys. The host also
        verifies some rows of one head.
        """
        compared = self._list_comparison_inputs(result)
        whole, on_host = self._judge_distance(compare_edge_heads(*compared)), compare_rows_on_host(*compared)
        rows = [self._judge_distance(each) for each in (compare_rows(*compared), on_host) if each]
        worst = max(whole, *rows, key=lambda each: (not each.ok, each.error))
        reason = worst.reason
        if self._problem.has_backward and worst.ok:
            sums = compute_key_sum_error(*compared)
            most = _MAX_DEVIATIONS * self._kernel.get_error_bound(self._problem)
            reason = (
                f"sums of dK or dV are off by {sums:.2g}; rounding explains at most {most:.2g}" if sums > most else ""
            )
        return replace(worst, details=whole.details, reason=reason)

    def _list_comparison_inputs(
        self, result: object
    ) -> tuple[AttentionShape, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        return self._shape, self._view_as_bhsd(self._operands), self._view_as_bhsd(self._name_results(result))

    def _verify_special(self, launch: Callable[[], object]) -> Verdict:
        operands = self._view_as_bhsd(self._operands)
        return verify_special_attention(
            self._shape, operands, lambda: self._view_as_bhsd(self._name_results(launch()))["o"]
        )

    def _judge_distance(self, found: ReferenceDistance) -> Verdict:
        kernel, problem = self._kernel, self._problem
        gradients = get_max_error(error for name, error in found.errors.items() if name != "o")
        details = {"gradient_error": gradients} if problem.has_backward else {}
        if not kernel.is_exact:
            details |= {"cosine_similarity": found.cosine, "relative_l1": found.relative_l1}
        bound = kernel.get_error_bound(problem)
        # A single missing row hardly changes the norm of a long output, so check the worst row against its own limit.
        row = found.worst_row_error / (_ROW_TOLERANCE if kernel.is_exact else _ROW_TOLERANCE_APPROXIMATE) * bound
        keys = self._shape.pairs / self._shape.seqlen_q
        factor = _GRADIENT_FACTOR + keys * _SMALLEST_SUBNORMAL.get(problem.dtype, 0.0) / bound
        worst = get_max_error((found.errors["o"], gradients / factor, row if row > bound else 0.0))
        reason = ""
        for name, slope in found.slopes.items() if kernel.is_exact and worst <= bound else ():
            most = min(_MAX_SLOPE_ERROR, bound) + _MAX_DEVIATIONS * found.errors[name] / math.sqrt(found.rows)
            if abs(slope) > most:
                reason = f"{name} is {1 + slope:.6g} times the expected one; rounding explains at most {most:.1g}"
        # Allow larger errors if there are few rows, because errors do not average out: gradients of 3 tokens have twice
        # the relative error of gradients of many tokens.
        averaged = worst if worst <= bound else worst / (1 + 2 / math.sqrt(found.rows))
        return Verdict(averaged, bound, details, reason=reason)

    def _view_as_bhsd(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        is_bhsd = self._kernel.layout == "bhsd"
        return {name: tensor if is_bhsd else tensor.transpose(1, 2) for name, tensor in tensors.items()}

    def _explain_wrong_type(self, result: object) -> str:
        q, k, v = (self._operands[name] for name in "qkv")
        alike = [q[..., :1].expand(*q.shape[:-1], v.shape[-1]), q, k, v]
        returned = result if isinstance(result, tuple) else (result,)
        pairs = zip(returned, alike if self._forward is None else alike[1:], strict=False)
        return next(filter(None, (explain_wrong_type(each, expected) for each, expected in pairs)), "")

    def _name_results(self, result: object) -> dict[str, torch.Tensor]:
        """Return the tensors of a launch's result by name: the output ``o`` and, for a backward pass, ``dq``, ``dk``
        and ``dv``.
        """
        outputs = list_tensors(result)
        if self._forward is not None:
            outputs = [self._forward, *outputs]
        names = ("o", "dq", "dk", "dv") if self._problem.has_backward else ("o",)
        return dict(zip(names, outputs, strict=True))


def _format_sizes(sizes: range | tuple[int, ...]) -> str:
    if isinstance(sizes, range):
        return f"{sizes.start} to {sizes[-1]} in steps of {sizes.step}"
    return ", ".join(map(str, sizes))


# -- kernels of libraries ----------------------------------------------------------------------------------------------


ComputeCapability = tuple[int, int]


class WrongLibraryError(ImportError):
    """The error if the module with a library's name is something else. The message says what it is."""


class KernelLibrary:
    """A library of a vendor or a third party that has kernels. Derived classes implement ``import_library``.

    mamf imports the library only when it needs it. The library may be absent, half installed, or built for another card
    or CUDA version, so the import may raise any exception. mamf turns it into a reason, with the command that fixes it.
    Text that the library prints during import goes to stderr, because stdout is for results.

    - ``library_name``: its name in messages. ``module_name``: its Python module. ``distribution_name``: its name in
      pip. ``install_command``: the command that installs it.
    - ``runtimes``: the runtimes of the backends on which it runs, such as ``cuda``.
    - ``supported_cards``: the NVIDIA cards on which it runs, in words. ``alternative_kernel``: the kernel that mamf
      suggests for other cards. ``portable_command``: the command that it suggests for other runtimes.
    """

    library_name: ClassVar[str]
    module_name: ClassVar[str]
    distribution_name: ClassVar[str]
    install_command: ClassVar[str]
    runtimes: ClassVar[tuple[str, ...]] = ("cuda",)
    supported_cards: ClassVar[str] = ""
    alternative_kernel: ClassVar[str] = "sdpa"
    portable_command: ClassVar[str] = PORTABLE_COMMAND

    @abstractmethod
    def import_library(self) -> Any:
        """Import the library, and return the function or module that the kernel calls. May raise any exception."""

    def format_version(self) -> str | None:
        """Return the name and version of the installed package, such as ``flash-attn 2.8.3``; None if it is missing."""
        version = get_package_version(self.distribution_name)
        return f"{self.distribution_name} {version}" if version else None

    def supports_capability(self, capability: ComputeCapability) -> bool:
        """Return whether the library supports NVIDIA cards of this compute capability (major, minor)."""
        return True

    def unavailable(self, backend: Backend) -> Unavailable | None:
        if backend.runtime not in self.runtimes:
            return Unavailable(f"{self.library_name} does not support {backend.name}", self.portable_command)
        if backend.runtime == "cuda":
            major, minor = torch.cuda.get_device_capability(backend.index)
            if not self.supports_capability((major, minor)):
                return Unavailable(
                    f"{self.library_name} runs on {self.supported_cards}, not on sm{major}{minor}",
                    f"mamf attention --kernel {self.alternative_kernel}",
                )
        try:
            self.import_library_quietly()
        except Exception as error:  # A broken library may raise any exception.
            return self.explain_load_error(error)
        return None

    def explain_load_error(self, error: Exception) -> Unavailable:
        if isinstance(error, WrongLibraryError):
            return Unavailable(f"{self.library_name} is not installed: {error}", self.install_command)
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{self.module_name}.".startswith(f"{missing}."):
            return Unavailable(f"{self.library_name} is not installed", self.install_command)
        return Unavailable(
            f"{self.library_name} is installed but cannot be loaded: {get_first_message_line(error)}",
            self.make_repair_command(error),
        )

    def make_repair_command(self, error: Exception) -> str:
        """Return the command that repairs an installed library whose import raises ``error``."""
        # pip needs --no-deps, because it would otherwise also reinstall the dependencies and replace torch.
        return self.install_command.replace(" --no-deps", "").replace(
            "pip install", "pip install --force-reinstall --no-deps", 1
        )

    def import_library_quietly(self) -> Any:
        with contextlib.redirect_stdout(sys.stderr):
            return self.import_library()


class LibraryAttention(KernelLibrary, TorchAttention):
    """An attention kernel from a library. Derived classes implement ``import_library`` and ``launch_forward``."""

    has_unequal_head_dims: ClassVar[bool] = False

    @abstractmethod
    def launch_forward(
        self,
        function: Any,
        problem: AttentionProblem,
        shape: AttentionShape,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """Launch the forward pass, and return the output in the kernel's layout.

        ``function``: the function or module that ``import_library`` returned.
        """

    def bind(self, backend: Backend, problem: AttentionProblem, shape: AttentionShape) -> Callable[..., torch.Tensor]:
        function = self.import_library_quietly()
        return lambda q, k, v: self.launch_forward(function, problem, shape, q, k, v)

    def unsupported_shape(self, problem: AttentionProblem, shape: AttentionShape) -> str | None:
        if not self.has_unequal_head_dims and shape.head_dim != shape.head_dim_v:
            return f"{self.name} needs values as wide as keys: use --head-dims {shape.head_dim}"
        return super().unsupported_shape(problem, shape)

    def details(
        self, problem: AttentionProblem, shape: AttentionShape, operands: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        version = self.format_version()
        return {"library": version} if version else {}


class QuantizedAttention(LibraryAttention):
    """An attention kernel that quantizes Q, K and V in every launch. It is approximate and has no backward pass.

    ``structured_tolerance``: the tolerance for inputs with block structure, on which rounding to int8 causes larger
    errors, because their scores differ by 14 and more.
    """

    directions = ("fwd",)
    is_exact = False
    structured_tolerance: ClassVar[float]

    def get_error_bound(self, problem: AttentionProblem) -> float:
        return self.structured_tolerance if problem.sparsity else super().get_error_bound(problem)


def extract_output(result: Any) -> torch.Tensor:
    """Return the output from the result of a library's function: the result, or its first entry if it is a tuple."""
    output: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return output


def get_window_size(shape: AttentionShape, unlimited: int | None) -> tuple[int | None, int | None]:
    """Return how many keys a query sees before and after itself, as libraries expect it for a shape's window.

    ``unlimited``: the value by which the library says that there is no limit.
    """
    if shape.window is None:
        return unlimited, unlimited
    return shape.window, 0 if shape.causal else shape.window
