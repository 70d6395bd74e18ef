"""Call SageAttention 1 and 2, which compute Q K^T in int8 and P V in float16 or fp8, where P is the softmax.

They quantize the operands in every launch, and have no backward pass.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from mamf.machine.environment import get_package_version
from mamf.operations.attention.operation import AttentionProblem, AttentionShape
from mamf.operations.attention.torch_attention import (
    NO_MAX_CAPABILITY,
    ComputeCapability,
    QuantizedAttention,
)

_INT8_AND_FLOAT16, _INT8_AND_FP8 = ("int8", "float16"), ("int8", "float8_e4m3fn")
#: The dtypes of Q K^T and of P V in SageAttention 2, by compute capability. SageAttention 2 does not support other
#: capabilities, such as those of B200 and B300.
_MATMUL_DTYPES_BY_CAPABILITY: Mapping[ComputeCapability, tuple[str, str]] = {
    (8, 0): _INT8_AND_FLOAT16,
    (8, 6): _INT8_AND_FLOAT16,
    (8, 9): _INT8_AND_FP8,
    (9, 0): _INT8_AND_FP8,
    (12, 0): _INT8_AND_FP8,
    (12, 1): _INT8_AND_FP8,
}


class _SageAttention(QuantizedAttention):
    module_name = "sageattention"
    function_name = "sageattn"
    distribution_name = "sageattention"
    # SageAttention's causal mask is correct only if the numbers of queries and keys are equal.
    supports_unequal_lengths = False
    required_major_version: ClassVar[int]

    def import_library(self) -> Any:
        # Both versions have the function ``sageattn``, but only version 2 also has a function for each of its kernels.
        has_kernels = hasattr(importlib.import_module(self.module_name), "sageattn_qk_int8_pv_fp16_triton")
        if has_kernels != (self.required_major_version == 2):
            version = get_package_version(self.distribution_name) or ("2.x" if has_kernels else "1.x")
            raise ModuleNotFoundError(
                f"the installed sageattention has version {version}, but {self.library_name} is needed",
                name=self.module_name,
            )
        return super().import_library()

    def launch_forward(
        self,
        function: Any,
        problem: AttentionProblem,
        shape: AttentionShape,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> Any:
        k = k.clone() if self.required_major_version == 1 else k
        return function(q, k, v, tensor_layout="HND", is_causal=shape.causal)


class SageAttention1(_SageAttention):
    """The kernel of SageAttention 1, in Triton.

    The library overwrites K: it subtracts the mean of K from K. So each launch copies K and passes the copy. Without
    the copy, the first launch would change the operands of later launches. The time of a launch includes the copy,
    because a model that uses K afterward has to copy K too.
    """

    name = "sage-1"
    required_major_version = 1
    library_name = "SageAttention 1"
    install_command = "pip install sageattention==1.0.6"
    capability_range = (8, 0), NO_MAX_CAPABILITY
    matmul_dtypes = _INT8_AND_FLOAT16
    head_dims = (64, 96, 128)
    #: For normally distributed data, a simulation of int8 quantization with one scale per block predicts a relative
    #: error of 1.3e-2, and the measured difference from FlashAttention 2 is 1.4e-2. The limit is about twice as large.
    tolerance = 3e-2

    def make_details(
        self, problem: AttentionProblem, shape: AttentionShape, operands: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        return {
            **super().make_details(problem, shape, operands),
            "ran": "with a copy of K, which the measured time includes",
        }


class SageAttention2(_SageAttention):
    """The kernel of SageAttention 2, in CUDA, or in Triton on sm86.

    The details of a launch contain the dtypes of its matmuls, because these dtypes depend on the card.
    """

    name = "sage-2"
    required_major_version = 2
    library_name = "SageAttention 2"
    install_command = "pip install --no-build-isolation git+https://github.com/thu-ml/SageAttention"
    alternative_nvidia_install_command = "mamf attention --kernel sage-1"
    head_dims = range(8, 129, 8)
    #: For normally distributed data, the relative error is 4e-2 with Q and K in int8, and P and V in fp8 (3 bits of
    #: mantissa). The limit is twice as large.
    tolerance = 8e-2

    def supports_capability(self, capability: ComputeCapability) -> bool:
        return capability in _MATMUL_DTYPES_BY_CAPABILITY

    def make_details(
        self, problem: AttentionProblem, shape: AttentionShape, operands: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        dtypes = _MATMUL_DTYPES_BY_CAPABILITY[torch.cuda.get_device_capability(operands[0].device)]
        return {**super().make_details(problem, shape, operands), "product_dtypes": " ".join(dtypes)}
