"""Call FlashAttention 2, 3 and 4, three libraries that differ in their package, signature and supported cards."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from mamf.backend import Backend
from mamf.errors import UnsupportedError
from mamf.machine.environment import get_package_version
from mamf.operations.attention.operation import AttentionProblem, AttentionShape
from mamf.operations.attention.torch_attention import (
    ComputeCapability,
    KernelLibrary,
    LibraryAttention,
    WrongLibraryError,
    extract_output,
    get_window_size,
)

_FA3_MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
_FA3_MAX_BACKWARD_WIDTH = 256
_FA4_FORWARD_MAJORS = (8, 9, 10, 11, 12)
_BLACKWELL_DATACENTER_MAJORS = (10, 11)
# The compiled libraries raise errors with these texts for dtypes, features and sizes that they, or the way in which
# they were built, do not support.
_REFUSAL = re.compile(r"\bonly supports? |\bbuild (does not support|has) |\bbuilt with .* disabled")
#: The head dimensions (of keys, of values) above 128 that FlashAttention 4 supports on Blackwell.
_FA4_WIDE_ON_BLACKWELL = ((192, 128), (256, 256))


def is_refusal(error: Exception) -> bool:
    """Return whether an error means that FlashAttention does not support the request.

    FlashAttention 4 raises AssertionError for this.
    """
    return isinstance(error, (AssertionError, NotImplementedError)) or (
        isinstance(error, RuntimeError) and _REFUSAL.search(str(error)) is not None
    )


class _FlashAttentionKernel(LibraryAttention):
    layout = "bshd"
    has_window = True
    #: The number by which the library's argument ``window_size`` says that a side of the window is unlimited.
    no_window: ClassVar[int | None] = -1

    def launch_forward(
        self,
        function: Any,
        problem: AttentionProblem,
        shape: AttentionShape,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        # Old builds of FlashAttention 3, and FlashAttention 4, return a tuple with the log-sum-exp as its second entry.
        return extract_output(
            function.flash_attn_func(q, k, v, causal=shape.causal, window_size=get_window_size(shape, self.no_window))
        )

    def refuses(self, error: Exception) -> bool:
        return is_refusal(error)


class FlashAttention2Library(KernelLibrary):
    library_name = "FlashAttention 2"
    module_name = "flash_attn"
    distribution_name = "flash-attn"
    install_command = "pip install flash-attn --no-build-isolation"
    runtimes = ("cuda", "hip")
    supported_cards = "compute capability 8.0 and above"

    def supports_capability(self, capability: ComputeCapability) -> bool:
        return capability >= (8, 0)

    def import_library(self) -> Any:
        module = importlib.import_module(self.module_name)
        # flash-attn-4 also installs a package flash_attn, which contains only ``cute``.
        if not hasattr(module, "flash_attn_func"):
            raise WrongLibraryError(
                "the installed flash_attn contains only FlashAttention 4 (cute), no flash_attn_func"
            )
        return module


class FlashAttention2(FlashAttention2Library, _FlashAttentionKernel):
    name = "flash-attn-2"


class FlashAttention3Library(KernelLibrary):
    library_name = "FlashAttention 3"
    module_name = _FA3_MODULES[0]
    distribution_name = "flash-attn-3"
    install_command = (
        "pip install --no-build-isolation"
        " 'flash-attn-3 @ git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper'"
    )
    supported_cards = "Hopper (sm90) only"
    alternative_kernel = "flash-attn-4"

    def supports_capability(self, capability: ComputeCapability) -> bool:
        return capability[0] == 9

    def import_library(self) -> Any:
        for name in _FA3_MODULES:
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError as error:
                # The module may be missing under one of its names. If one of its dependencies is missing, raise the
                # error.
                if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                    raise
        raise ModuleNotFoundError(f"no {' and no '.join(_FA3_MODULES)}", name=self.module_name)


class FlashAttention3(FlashAttention3Library, _FlashAttentionKernel):
    name = "flash-attn-3"
    has_unequal_head_dims = True
    value_dims = range(8, 513, 8)

    def unsupported_shape(self, problem: AttentionProblem, shape: AttentionShape) -> str | None:
        d, dv = shape.head_dims
        if d != dv and not (d <= 64 or (128 < d <= 192 and 96 < dv <= 128)):
            return f"{self.name} does not support values of width {dv} with keys of width {d}"
        if problem.has_backward and dv > _FA3_MAX_BACKWARD_WIDTH:
            return f"{self.name} has no backward pass for values of width {dv}: use at most {_FA3_MAX_BACKWARD_WIDTH}"
        return super().unsupported_shape(problem, shape)


class FlashAttention4(_FlashAttentionKernel):
    """The kernel of FlashAttention 4, written in CuTe DSL.

    It compiles in the first launch of each configuration, which mamf does not time.
    """

    name = "flash-attn-4"
    library_name = "FlashAttention 4"
    module_name = "flash_attn.cute"
    distribution_name = "flash-attn-4"
    # pip needs --pre, because flash-attn-4 has only pre-releases.
    install_command = "pip install --pre flash-attn-4   # for CUDA 13: 'flash-attn-4[cu13]'"
    supported_cards = "compute capability 8.0 to 12.x"
    no_window = None
    has_unequal_head_dims = True

    def supports_capability(self, capability: ComputeCapability) -> bool:
        return capability[0] in _FA4_FORWARD_MAJORS

    def import_library(self) -> Any:
        # flash-attn 2.8 includes an early copy of flash_attn.cute, which needs other packages. The module's __version__
        # does not tell whether it is this copy, so ask for the installed package.
        if get_package_version(self.distribution_name) is None:
            raise ModuleNotFoundError(f"no {self.distribution_name}", name=self.module_name)
        return importlib.import_module(self.module_name)

    def unsupported(self, backend: Backend, problem: AttentionProblem) -> str | None:
        is_asked = problem.has_backward and backend.runtime in self.runtimes
        if is_asked and torch.cuda.get_device_capability(backend.index)[0] == 8:
            return f"{self.name} has no backward pass on sm8x: it needs sm90 or newer"
        return super().unsupported(backend, problem)

    def bind(self, backend: Backend, problem: AttentionProblem, shape: AttentionShape) -> Callable[..., torch.Tensor]:
        major, minor = torch.cuda.get_device_capability(backend.index)
        if not supports_head_dims(major, shape.head_dim, shape.head_dim_v):
            raise UnsupportedError(
                f"{self.name} does not support head dimensions {shape.head_dim}/{shape.head_dim_v} on sm{major}{minor}"
            )
        return super().bind(backend, problem, shape)


def supports_head_dims(major: int, head_dim: int, head_dim_v: int) -> bool:
    """Return whether FlashAttention 4 supports these head dimensions, which must be multiples of 8.

    ``major``: the major compute capability of the card.
    """
    if major in _BLACKWELL_DATACENTER_MAJORS:
        return max(head_dim, head_dim_v) <= 128 or (head_dim, head_dim_v) in _FA4_WIDE_ON_BLACKWELL
    return max(head_dim, head_dim_v) <= 256
