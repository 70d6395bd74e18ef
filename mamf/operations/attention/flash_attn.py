"""Call FlashAttention 2, 3 and 4: three libraries with different packages, signatures and supported cards."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import torch

from mamf.machine.environment import get_package_version
from mamf.operations.attention.operation import AttentionProblem, AttentionShape
from mamf.operations.attention.torch_attention import (
    NO_MAX_CAPABILITY,
    KernelLibrary,
    LibraryAttention,
    get_window_size,
)

# The module of FlashAttention 3 in most builds. In other builds it is the top-level module flash_attn_interface.
_FLASH_ATTENTION_3_MODULE = "flash_attn_3.flash_attn_interface"


class _FlashAttentionKernel(LibraryAttention):
    layout = "bshd"
    supports_window = True
    #: The value in the library's argument ``window_size`` for a side of the window that has no limit.
    unlimited_window_size: ClassVar[int | None] = -1

    def launch_forward(
        self,
        function: Any,
        problem: AttentionProblem,
        shape: AttentionShape,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> Any:
        # The result may be a tuple: old builds of FlashAttention 3, and FlashAttention 4, also return the log-sum-exp.
        return function.flash_attn_func(
            q, k, v, causal=shape.causal, window_size=get_window_size(shape, self.unlimited_window_size)
        )


class FlashAttention2Library(KernelLibrary):
    library_name = "FlashAttention 2"
    module_name = "flash_attn"
    distribution_name = "flash-attn"
    install_command = "pip install flash-attn --no-build-isolation"
    runtimes = ("cuda", "hip")
    capability_range = (8, 0), NO_MAX_CAPABILITY

    def import_library(self) -> Any:
        module = super().import_library()
        # The package flash-attn-4 also installs a module flash_attn. It contains only the submodule ``cute``.
        if not hasattr(module, "flash_attn_func"):
            text = "the installed module flash_attn contains only FlashAttention 4, but FlashAttention 2 is needed"
            raise ModuleNotFoundError(text, name=self.module_name)
        return module


class FlashAttention2(FlashAttention2Library, _FlashAttentionKernel):
    name = "flash-attn-2"


class FlashAttention3Library(KernelLibrary):
    library_name = "FlashAttention 3"
    module_name = "flash_attn_interface"
    distribution_name = "flash-attn-3"
    install_command = (
        "pip install --no-build-isolation"
        " 'flash-attn-3 @ git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper'"
    )
    capability_range = (9, 0), (9, 9)
    alternative_nvidia_install_command = "mamf attention --kernel flash-attn-4"

    def import_library(self) -> Any:
        try:
            return importlib.import_module(_FLASH_ATTENTION_3_MODULE)
        except ModuleNotFoundError as error:
            # Try the module's other name only if the module itself is missing. If one of its dependencies is missing,
            # raise the error, which names this dependency.
            if not f"{_FLASH_ATTENTION_3_MODULE}.".startswith(f"{error.name}."):
                raise
            return super().import_library()


class FlashAttention3(FlashAttention3Library, _FlashAttentionKernel):
    name = "flash-attn-3"
    supports_unequal_head_dims = True
    # The library supports a head dimension above 256 only for values, and only if the head dimension of keys is at most
    # 64. The library itself raises an error for other combinations.
    head_dims = range(8, 513, 8)


class FlashAttention4(_FlashAttentionKernel):
    """The kernel of FlashAttention 4, written in CuTe DSL.

    The library compiles the kernel during the first launch of each configuration, which mamf does not time.
    """

    name = "flash-attn-4"
    library_name = "FlashAttention 4"
    module_name = "flash_attn.cute"
    distribution_name = "flash-attn-4"
    # pip needs the option --pre, because all releases of flash-attn-4 are pre-releases.
    install_command = "pip install --pre flash-attn-4   # for CUDA 13: 'flash-attn-4[cu13]'"
    capability_range = (8, 0), (12, 9)
    unlimited_window_size = None
    supports_unequal_head_dims = True

    def import_library(self) -> Any:
        # flash-attn 2.8 includes an early copy of flash_attn.cute, which needs other packages. The module's __version__
        # does not show whether the module is this copy, so check that the package flash-attn-4 is installed.
        if get_package_version(self.distribution_name) is None:
            raise ModuleNotFoundError(f"the package {self.distribution_name} is not installed", name=self.module_name)
        return super().import_library()
