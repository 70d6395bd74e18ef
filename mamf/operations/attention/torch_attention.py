"""Base classes of attention kernels on torch tensors: operands, launches in each direction, verification; and what
kernels of libraries share.

A kernel defines its layout and its call; ``Sdpa`` in torch_kernels.py is the shortest example, of a library
``FusedSdpa``.
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
from mamf.errors import first_line
from mamf.kernel import Prepared, Verdict
from mamf.machine.environment import package_version
from mamf.operations.attention.attention_reference import (
    Distance,
    block_structured,
    distance_of_heads,
    distance_of_rows,
    distance_on_host,
    error_of_key_sums,
    verify_special_attention,
)
from mamf.operations.attention.shapes import AttentionKernel, AttentionProblem, AttentionShape
from mamf.operations.operand_sets import (
    OperandSet,
    Signs,
    Unchanged,
    check_torch,
    explain_wrong_type,
    prepare_sets,
    split_sets,
    take_buffers,
    tensors_of,
    view_as,
    with_long_rows,
    worst_of,
)

#: The command for devices that a kernel does not support: torch's own choice runs on all devices.
ON_ANY_DEVICE = "mamf attention --kernel sdpa"
#: The messages of torch's dispatchers if no kernel fits.
NOTHING_FITS = ("No available kernel", "No viable backend")
# ||O - reference|| / ||reference||: rounding P and O to 8 bits gives sqrt(2) 1.65e-3 = 2.3e-3, as exact kernels show in
# results/, and to 11 bits an eighth of that. The bounds are at least twice as large. Float32 and float64 round sums and
# exponents.
_TOLERANCE = {"bfloat16": 5e-3, "float16": 1.2e-3, "float32": 2e-5, "float64": 1e-12}
# Gradients are rounded more often: the largest error in results/ is 3.3e-3.
_GRADIENT_FACTOR = 2.0
# Gradients of scores are about the data's variance (1/3 or more) over the number of keys that a query sees. In float16
# they may be subnormal numbers, multiples of this. Rounding to them gives an error of at most 0.87 of this times those
# keys.
_SUBNORMAL = {"float16": 2.0**-24}
# The largest deviation from 1 of the slope of a result against the reference, and the deviations, in standard ones,
# that are rare by chance.
_SLOPE, _RARE = 1e-3, 8.0
# Operands that change, by direction; a saved forward pass keeps its V.
_CHANGING = {"fwd": ("v",), "bwd": ("do",), "fwd+bwd": ("v", "do")}
# The largest error of a single row of the output: far above rounding, far below that of a row that was not written.
_ROW_TOLERANCE, _ROW_TOLERANCE_APPROXIMATE = 0.25, 0.6


def tolerance_of(dtype: str) -> float:
    """The largest ||O - reference|| / ||reference|| of a correct result of an exact kernel."""
    return _TOLERANCE[dtype]


class TorchAttention(AttentionKernel):
    """Derived kernels supply ``attend`` or ``bind``. ``layout``: the order of batch, heads and sequence, ``bhsd`` or
    ``bshd``. ``has_gqa``: whether it supports fewer kv heads than heads.
    """

    layout: ClassVar[str] = "bhsd"
    has_gqa: ClassVar[bool] = True
    has_window: ClassVar[bool] = False
    has_unequal_lengths: ClassVar[bool] = True
    head_dims: ClassVar[range | tuple[int, ...]] = range(8, 257, 8)
    #: Widths of values; None: the head dimensions.
    value_dims: ClassVar[range | None] = None
    #: The largest ||O - reference|| / ||reference|| of a correct result; None: by dtype.
    tolerance: ClassVar[float | None] = None

    def unavailable(self, backend: Backend) -> Unavailable | None:
        return check_torch(backend)

    def attend(self, shape: AttentionShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The output, in the kernel's layout."""
        raise NotImplementedError(f"{type(self).__name__} supplies neither attend nor bind")

    def bind(self, backend: Backend, problem: AttentionProblem, shape: AttentionShape) -> Callable[..., torch.Tensor]:
        """``attend`` for one shape, called with q, k, v. Kernels that compile do so here."""
        return lambda q, k, v: self.attend(shape, q, k, v)

    def details(
        self, problem: AttentionProblem, shape: AttentionShape, operands: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        """Further findings about a launch, such as the kernel that a dispatcher chose, or the sparsity."""
        return {}

    def unsupported_shape(self, problem: AttentionProblem, shape: AttentionShape) -> str | None:
        if not self.has_gqa and shape.heads != shape.kv_heads:
            return f"{self.name} needs as many kv heads as heads"
        if not self.has_window and shape.window is not None:
            return f"{self.name} has no window"
        if shape.head_dim not in self.head_dims:
            return f"{self.name} has no head dimension {shape.head_dim}; it has {_in_words(self.head_dims)}"
        if shape.head_dim_v not in (value_dims := self.value_dims or self.head_dims):
            return f"{self.name} has no values of width {shape.head_dim_v}; it has {_in_words(value_dims)}"
        if shape.causal and not self.has_unequal_lengths and shape.seqlen_q != shape.seqlen_k:
            return f"{self.name} is causal for equal lengths of queries and keys only"
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
        call = self.bind(backend, problem, shape)
        memory = split_sets(take_buffers(pool, problem.buffers(shape, sets)), sets)
        attentions = [PreparedAttention(self, problem, shape, self.operands(problem, shape, flat)) for flat in memory]
        if problem.direction == "bwd":
            # A one-time allocation of a library, such as a workspace, is not part of a saved forward pass.
            attentions[0].launch_of(call)
            attentions[0].forget()
        before = backend.allocated_memory()
        launches = [attention.launch_of(call) for attention in attentions]
        after = backend.allocated_memory()
        ready = [each.operand_set(launch) for each, launch in zip(attentions, launches, strict=True)]

        def unchanged() -> Sequence[str]:
            return tuple(dict.fromkeys(name for each in attentions for name in each.unchanged()))

        held = 0 if before is None or after is None else (after - before) // sets
        return prepare_sets(ready, unchanged, held_bytes=held)

    def operands(
        self, problem: AttentionProblem, shape: AttentionShape, flat: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """q, k, v and, for a backward pass, do: views of flat memory in the kernel's layout."""
        views = {}
        for name, tensor in flat.items():
            heads, length, width = shape.dimensions[name.replace("do", "o")]
            order = (heads, length) if self.layout == "bhsd" else (length, heads)
            views[name] = view_as(tensor, shape.batch, *order, width)
        if problem.sparsity:
            views |= block_structured(views["q"], views["k"], problem.sparsity, 2 if self.layout == "bhsd" else 1)
        return views

    def refuses(self, error: Exception) -> bool:
        return isinstance(error, RuntimeError) and any(text in str(error) for text in NOTHING_FITS)

    def bound(self, problem: AttentionProblem) -> float:
        """The largest ||O - reference|| / ||reference|| of a correct result."""
        return self.tolerance if self.tolerance is not None else tolerance_of(problem.dtype)

    def canonical(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor as batch, heads, sequence, width."""
        return tensor if self.layout == "bhsd" else tensor.transpose(1, 2)


class PreparedAttention:
    """One operand set: its launch and the reference result, computed by other operations in higher precision."""

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
        self.unchanged = Unchanged(operands)
        self._signs = [Signs(with_long_rows(operands[name])) for name in _CHANGING[problem.direction]]

    def operand_set(self, launch: Callable[[], object]) -> OperandSet:
        is_special = self._problem.direction == "fwd" and self._kernel.is_exact
        return OperandSet(
            launch,
            self.verify,
            verify_whole=self.verify_whole,
            change=self.change,
            restore=self.restore,
            repeats_bits=is_special,
            verify_special=partial(self._verify_special, launch) if is_special else None,
        )

    def forward(self, call: Callable[..., torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return call(*(self._operands[name] for name in "qkv"))

    def launch_of(self, call: Callable[..., torch.Tensor]) -> Callable[[], object]:
        """A launch without arguments. For ``bwd`` the forward pass runs once, here; its graph is kept and
        differentiated in each launch.
        """
        if self._problem.direction == "fwd":
            return lambda: self.forward(call)
        leaves = [self._operands[name].detach().requires_grad_() for name in "qkv"]
        gradient = self._operands["do"]
        if self._problem.direction == "bwd":
            output = call(*leaves)
            self._forward = output.detach()
            return lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True)

        def both() -> object:
            result = call(*leaves)
            return (result.detach(), *torch.autograd.grad(result, leaves, gradient))

        return both

    def forget(self) -> None:
        """Release a saved forward pass."""
        self._forward = None

    def change(self) -> None:
        for signs in self._signs:
            signs.change()

    def restore(self) -> None:
        for signs in self._signs:
            signs.restore()

    def verify(self, result: object) -> Verdict:
        """Verify rows of the output and of dQ in two heads."""
        if reason := self._wrong_type(result):
            return Verdict(math.inf, 0.0, reason=reason)
        if self._details is None:
            operands = [self._operands[name] for name in "qkv"]
            self._details = self._kernel.details(self._problem, self._shape, operands)
        found = self._verdict(distance_of_rows(*self._compared(result), is_whole=False))
        return replace(found, details={**self._details, **found.details})

    def verify_whole(self, result: object) -> Verdict:
        """Verify the whole output and all gradients of two heads; rows of the output and of dQ in all heads, sums of
        all dK and dV, and some rows on the host.
        """
        compared = self._compared(result)
        whole, on_host = self._verdict(distance_of_heads(*compared)), distance_on_host(*compared)
        rows = [self._verdict(each) for each in (distance_of_rows(*compared), on_host) if each]
        worst = max(whole, *rows, key=lambda each: (not each.ok, each.error))
        reason = worst.reason
        if self._problem.has_backward and worst.ok:
            sums = error_of_key_sums(*compared)
            most = _RARE * self._kernel.bound(self._problem)
            reason = (
                f"sums of dK or dV are off by {sums:.2g}; rounding explains at most {most:.2g}" if sums > most else ""
            )
        return replace(worst, details=whole.details, reason=reason)

    def _compared(self, result: object) -> tuple[AttentionShape, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        return self._shape, self._canonical(self._operands), self._canonical(self._named(result))

    def _verify_special(self, launch: Callable[[], object]) -> Verdict:
        operands = self._canonical(self._operands)
        return verify_special_attention(self._shape, operands, lambda: self._canonical(self._named(launch()))["o"])

    def _verdict(self, found: Distance) -> Verdict:
        kernel, problem = self._kernel, self._problem
        gradients = worst_of(error for name, error in found.errors.items() if name != "o")
        details = {"gradient_error": gradients} if problem.has_backward else {}
        if not kernel.is_exact:
            details |= {"cosine_similarity": found.cosine, "relative_l1": found.relative_l1}
        bound = kernel.bound(problem)
        # A missing row vanishes in the norm of a long output, so the worst row counts too, in units of its bound.
        row = found.worst_row / (_ROW_TOLERANCE if kernel.is_exact else _ROW_TOLERANCE_APPROXIMATE) * bound
        keys = self._shape.pairs / self._shape.seqlen_q
        factor = _GRADIENT_FACTOR + keys * _SUBNORMAL.get(problem.dtype, 0.0) / bound
        worst = worst_of((found.errors["o"], gradients / factor, row if row > bound else 0.0))
        reason = ""
        for name, slope in found.slopes.items() if kernel.is_exact and worst <= bound else ():
            most = min(_SLOPE, bound) + _RARE * found.errors[name] / math.sqrt(found.rows)
            if abs(slope) > most:
                reason = f"{name} is {1 + slope:.6g} times the expected one; rounding changes it by at most {most:.1g}"
        # Errors of few rows do not average out: gradients of three tokens have twice the error of those of many.
        averaged = worst if worst <= bound else worst / (1 + 2 / math.sqrt(found.rows))
        return Verdict(averaged, bound, details, reason=reason)

    def _canonical(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: self._kernel.canonical(tensor) for name, tensor in tensors.items()}

    def _wrong_type(self, result: object) -> str:
        q, k, v = (self._operands[name] for name in "qkv")
        alike = [q[..., :1].expand(*q.shape[:-1], v.shape[-1]), q, k, v]
        returned = result if isinstance(result, tuple) else (result,)
        pairs = zip(returned, alike if self._forward is None else alike[1:], strict=False)
        return next(filter(None, (explain_wrong_type(each, expected) for each, expected in pairs)), "")

    def _named(self, result: object) -> dict[str, torch.Tensor]:
        """The output ``o`` and, for a backward pass, ``dq``, ``dk`` and ``dv`` from the result of a launch."""
        outputs = tensors_of(result)
        if self._forward is not None:
            outputs = [self._forward, *outputs]
        names = ("o", "dq", "dk", "dv") if self._problem.has_backward else ("o",)
        return dict(zip(names, outputs, strict=True))


def _in_words(sizes: range | tuple[int, ...]) -> str:
    if isinstance(sizes, range):
        return f"{sizes.start} to {sizes[-1]} in steps of {sizes.step}"
    return ", ".join(map(str, sizes))


# -- kernels of libraries ----------------------------------------------------------------------------------------------


Capability = tuple[int, int]


class AbsentError(ImportError):
    """A module of the library's name can be imported, but it is something else; says what."""


class Library:
    """What kernels of a vendor's or third party's library share. It is loaded late; derived kernels supply ``load``.

    A library may be absent, half installed, built for another card or another CUDA: importing it may raise anything,
    and all errors become a reason with the command that fixes it. What it prints on import goes to stderr, because
    stdout holds results.

    ``library`` is its name in a sentence, ``module`` what is imported, ``distribution`` what pip calls it and
    ``install`` the command that installs it. ``cards``: in words, which of NVIDIA's it runs on; ``instead``: the kernel
    to try on the others.
    """

    library: ClassVar[str]
    module: ClassVar[str]
    distribution: ClassVar[str]
    install: ClassVar[str]
    runtimes: ClassVar[tuple[str, ...]] = ("cuda",)
    cards: ClassVar[str] = ""
    instead: ClassVar[str] = "sdpa"
    on_any_device: ClassVar[str] = ON_ANY_DEVICE

    @abstractmethod
    def load(self) -> Any:
        """The library's function or module, imported now. May raise anything."""

    def version(self) -> str | None:
        """The distribution and its version, or None."""
        version = package_version(self.distribution)
        return f"{self.distribution} {version}" if version else None

    def runs_on(self, capability: Capability) -> bool:
        """Whether it has code for an NVIDIA card of this compute capability."""
        return True

    def unavailable(self, backend: Backend) -> Unavailable | None:
        if backend.runtime not in self.runtimes:
            return Unavailable(f"{self.library} has no kernels for {backend.name}", self.on_any_device)
        if backend.runtime == "cuda":
            major, minor = torch.cuda.get_device_capability(backend.index)
            if not self.runs_on((major, minor)):
                return Unavailable(
                    f"{self.library} runs on {self.cards}, not on sm{major}{minor}",
                    f"mamf attention --kernel {self.instead}",
                )
        try:
            self.loaded()
        except Exception as error:  # a broken library may raise anything
            return self.not_loaded(error)
        return None

    def not_loaded(self, error: Exception) -> Unavailable:
        if isinstance(error, AbsentError):
            return Unavailable(f"{self.library} is not installed: {error}", self.install)
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{self.module}.".startswith(f"{missing}."):
            return Unavailable(f"{self.library} is not installed", self.install)
        return Unavailable(f"{self.library} is installed but does not load: {first_line(error)}", self.repair(error))

    def repair(self, error: Exception) -> str:
        """The command that fixes an installation that does not load."""
        # --no-deps: a forced reinstallation of all it depends on would replace torch.
        return self.install.replace(" --no-deps", "").replace(
            "pip install", "pip install --force-reinstall --no-deps", 1
        )

    def loaded(self) -> Any:
        with contextlib.redirect_stdout(sys.stderr):
            return self.load()


class LibraryAttention(Library, TorchAttention):
    """A kernel of a library. Derived kernels supply ``load`` and ``call``."""

    has_unequal_head_dims: ClassVar[bool] = False

    @abstractmethod
    def call(
        self,
        function: Any,
        problem: AttentionProblem,
        shape: AttentionShape,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """The output, in the kernel's layout, by what ``load`` gave."""

    def bind(self, backend: Backend, problem: AttentionProblem, shape: AttentionShape) -> Callable[..., torch.Tensor]:
        function = self.loaded()
        return lambda q, k, v: self.call(function, problem, shape, q, k, v)

    def unsupported_shape(self, problem: AttentionProblem, shape: AttentionShape) -> str | None:
        if not self.has_unequal_head_dims and shape.head_dim != shape.head_dim_v:
            return f"{self.name} needs values as wide as keys"
        return super().unsupported_shape(problem, shape)

    def details(
        self, problem: AttentionProblem, shape: AttentionShape, operands: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        version = self.version()
        return {"library": version} if version else {}


class QuantizedAttention(LibraryAttention):
    """Quantises Q, K and V in every launch: approximate, forward only.

    ``structured_tolerance`` is for inputs with block structure: their scores stand out by 14 and more, and so does what
    int8 rounds off them.
    """

    directions = ("fwd",)
    is_exact = False
    structured_tolerance: ClassVar[float]

    def bound(self, problem: AttentionProblem) -> float:
        return self.structured_tolerance if problem.sparsity else super().bound(problem)


def output_of(result: Any) -> torch.Tensor:
    """The output of a call that may return statistics with it."""
    output: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return output


def window_of(shape: AttentionShape, unlimited: int | None) -> tuple[int | None, int | None]:
    """Keys seen before and after a query; ``unlimited`` is how the library writes that all are."""
    if shape.window is None:
        return unlimited, unlimited
    return shape.window, 0 if shape.causal else shape.window
