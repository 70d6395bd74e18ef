"""FlashAttention 2, 3 and 4: three libraries with different packages, signatures and supported cards."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from mamf.backend import Backend
from mamf.errors import UnsupportedError
from mamf.machine.environment import package_version
from mamf.operations.attention.shapes import AttentionProblem, AttentionShape
from mamf.operations.attention.torch_attention import (
    AbsentError,
    Capability,
    Library,
    LibraryAttention,
    output_of,
    window_of,
)

_FA3_MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
_FA3_WIDEST_BACKWARD = 256
_FA4_FORWARD_MAJORS = (8, 9, 10, 11, 12)
_BLACKWELL_DATACENTER_MAJORS = (10, 11)
# What the compiled libraries raise for dtypes, features and sizes that they, or this build, lack.
_REFUSAL = re.compile(r"\bonly supports? |\bbuild (does not support|has) |\bbuilt with .* disabled")
#: Head dimensions of keys and values above 128 that its Blackwell kernels support.
_FA4_WIDE_ON_BLACKWELL = ((192, 128), (256, 256))


def is_refusal(error: Exception) -> bool:
    """Whether the library does not support what it was asked for. FlashAttention 4 asserts what it supports."""
    return isinstance(error, (AssertionError, NotImplementedError)) or (
        isinstance(error, RuntimeError) and _REFUSAL.search(str(error)) is not None
    )


class _FlashAttention(LibraryAttention):
    layout = "bshd"
    has_window = True
    #: The library's value for an unlimited side of the window.
    no_window: ClassVar[int | None] = -1

    def call(
        self,
        function: Any,
        problem: AttentionProblem,
        shape: AttentionShape,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        # Older builds of FA3, and all of FA4, also return the log-sum-exp.
        return output_of(
            function.flash_attn_func(q, k, v, causal=shape.causal, window_size=window_of(shape, self.no_window))
        )

    def refuses(self, error: Exception) -> bool:
        return is_refusal(error)


class FlashAttention2Library(Library):
    library = "FlashAttention 2"
    module = "flash_attn"
    distribution = "flash-attn"
    install = "pip install flash-attn --no-build-isolation"
    runtimes = ("cuda", "hip")
    cards = "compute capability 8.0 and above"

    def runs_on(self, capability: Capability) -> bool:
        return capability >= (8, 0)

    def load(self) -> Any:
        module = importlib.import_module(self.module)
        # flash-attn-4 makes a namespace of the same name, with nothing but ``cute`` inside.
        if not hasattr(module, "flash_attn_func"):
            raise AbsentError("the installed flash_attn has no flash_attn_func, only FlashAttention 4 (cute)")
        return module


class FlashAttention2(FlashAttention2Library, _FlashAttention):
    name = "flash-attn-2"


class FlashAttention3Library(Library):
    library = "FlashAttention 3"
    module = _FA3_MODULES[0]
    distribution = "flash-attn-3"
    install = (
        "pip install --no-build-isolation"
        " 'flash-attn-3 @ git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper'"
    )
    cards = "Hopper (sm90) only"
    instead = "flash-attn-4"

    def runs_on(self, capability: Capability) -> bool:
        return capability[0] == 9

    def load(self) -> Any:
        for name in _FA3_MODULES:
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError as error:
                # Only the module itself may be missing under one of its names, not what it imports.
                if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                    raise
        raise ModuleNotFoundError(f"no {' and no '.join(_FA3_MODULES)}", name=self.module)


class FlashAttention3(FlashAttention3Library, _FlashAttention):
    name = "flash-attn-3"
    has_unequal_head_dims = True
    value_dims = range(8, 513, 8)

    def unsupported_shape(self, problem: AttentionProblem, shape: AttentionShape) -> str | None:
        d, dv = shape.head_dims
        if d != dv and not (d <= 64 or (128 < d <= 192 and 96 < dv <= 128)):
            return f"{self.name} has no values of width {dv} with keys of width {d}"
        if problem.has_backward and dv > _FA3_WIDEST_BACKWARD:
            return f"{self.name} has no backward pass for values of width {dv}; it has one up to {_FA3_WIDEST_BACKWARD}"
        return super().unsupported_shape(problem, shape)


class FlashAttention4(_FlashAttention):
    """Written in CuTe DSL. Compiles in the first launch of a configuration, which is for verification and not timed."""

    name = "flash-attn-4"
    library = "FlashAttention 4"
    module = "flash_attn.cute"
    distribution = "flash-attn-4"
    # All its releases are pre-releases so far.
    install = "pip install --pre flash-attn-4   # for CUDA 13: 'flash-attn-4[cu13]'"
    cards = "compute capability 8.0 to 12.x"
    no_window = None
    has_unequal_head_dims = True

    def runs_on(self, capability: Capability) -> bool:
        return capability[0] in _FA4_FORWARD_MAJORS

    def load(self) -> Any:
        # flash-attn 2.8 includes an early copy of this module, which needs other packages. Its __version__ is no help.
        if package_version(self.distribution) is None:
            raise ModuleNotFoundError(f"no {self.distribution}", name=self.module)
        return importlib.import_module(self.module)

    def unsupported(self, backend: Backend, problem: AttentionProblem) -> str | None:
        is_asked = problem.has_backward and backend.runtime in self.runtimes
        if is_asked and torch.cuda.get_device_capability(backend.index)[0] == 8:
            return f"{self.name} has no backward pass on sm8x; it has one from sm90 on"
        return super().unsupported(backend, problem)

    def bind(self, backend: Backend, problem: AttentionProblem, shape: AttentionShape) -> Callable[..., torch.Tensor]:
        major, minor = torch.cuda.get_device_capability(backend.index)
        if not has_head_dims(major, shape.head_dim, shape.head_dim_v):
            raise UnsupportedError(
                f"{self.name} has no head dimensions {shape.head_dim} and {shape.head_dim_v} on sm{major}{minor}"
            )
        return super().bind(backend, problem, shape)


def has_head_dims(major: int, head_dim: int, head_dim_v: int) -> bool:
    """Whether FlashAttention 4 has these, both multiples of 8, on cards of this generation."""
    if major in _BLACKWELL_DATACENTER_MAJORS:
        return max(head_dim, head_dim_v) <= 128 or (head_dim, head_dim_v) in _FA4_WIDE_ON_BLACKWELL
    return max(head_dim, head_dim_v) <= 256
