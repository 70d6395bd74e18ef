"""Call FlashInfer's attention kernels for a paged cache: decode, prefill and MLA (one latent vector per token).

Before FlashInfer can launch a kernel, it plans on the host how to divide the work among compute units. A server plans
once per step, for all layers of the model. So mamf does not time the planning as part of a launch, but reports the time
of planning separately.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from mamf.operations.attention.torch_attention import NO_MAX_CAPABILITY
from mamf.operations.decode.operation import SAME_AS_QUERIES, DecodeProblem, DecodeShape
from mamf.operations.decode.torch_decode import CacheTables, LibraryDecodeKernel, PlannedKernel, view_as_pages
from mamf.torch_backend import TorchBackend, get_torch_dtype

#: The size of FlashInfer's workspace in bytes, as in vLLM. FlashInfer's examples use a smaller workspace, which is too
#: small to split a long cache over many compute units.
_WORKSPACE_BYTES = 384 * 2**20
#: Use tensor cores if at least this many query heads share a kv head, as vLLM does. For fewer heads they are slower.
_MIN_HEADS_PER_KV_HEAD_FOR_TENSOR_CORES = 4


class _FlashInferKernel(LibraryDecodeKernel):
    """The base class of FlashInfer's kernels. The first call that plans a kernel also compiles the kernel."""

    library_name = "FlashInfer"
    module_name = "flashinfer"
    distribution_name = "flashinfer-python"
    install_command = "pip install flashinfer-python"
    capability_range = (7, 5), NO_MAX_CAPABILITY
    supports_contiguous_cache = False
    head_dims: ClassVar[Sequence[int]] = (64, 128, 256)

    @abstractmethod
    def make_wrapper_and_planner(
        self, module: Any, problem: DecodeProblem, shape: DecodeShape, tables: CacheTables, workspace: torch.Tensor
    ) -> tuple[Any, Callable[[], object]]:
        """Return FlashInfer's wrapper, an object that launches the attention, and a function that plans the attention.

        ``module``: the imported library. ``workspace``: device memory that the library uses while it computes. The
        planning function reads copies of ``tables`` on the host.
        """

    def launch_planned_attention(
        self, wrapper: Any, shape: DecodeShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> object:
        """Launch the attention that was planned with ``wrapper``, and return the output."""
        return wrapper.run(q, (view_as_pages(shape, k), view_as_pages(shape, v)))

    def bind_operands(
        self, backend: TorchBackend, problem: DecodeProblem, shape: DecodeShape, tables: CacheTables
    ) -> PlannedKernel:
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=backend.device)
        wrapper, plan = self.make_wrapper_and_planner(self.import_library_quietly(), problem, shape, tables, workspace)
        plan()  # Plan once before timing, because the first call also compiles the kernel.
        backend.synchronize()
        start_seconds = backend.now()
        plan()
        seconds = backend.now() - start_seconds
        return PlannedKernel(
            partial(self.launch_planned_attention, wrapper, shape), {"planning_us": round(seconds * 1e6, 1)}
        )


def _make_dtype_options(problem: DecodeProblem) -> dict[str, torch.dtype]:
    return {
        "q_data_type": get_torch_dtype(problem.dtype),
        "kv_data_type": get_torch_dtype(problem.resolved_cache_dtype),
    }


class FlashInferDecode(_FlashInferKernel):
    name = "flashinfer-decode"
    max_queries = 1
    cache_dtypes: ClassVar[tuple[str, ...]] = (SAME_AS_QUERIES, "float8_e4m3fn")

    def make_wrapper_and_planner(
        self, module: Any, problem: DecodeProblem, shape: DecodeShape, tables: CacheTables, workspace: torch.Tensor
    ) -> tuple[Any, Callable[[], object]]:
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=problem.graph,
            use_tensor_cores=shape.heads_per_kv_head >= _MIN_HEADS_PER_KV_HEAD_FOR_TENSOR_CORES,
            paged_kv_indptr_buffer=torch.empty_like(tables.page_starts),
            paged_kv_indices_buffer=torch.empty_like(tables.concatenated_pages),
            paged_kv_last_page_len_buffer=torch.empty_like(tables.last_page_lengths),
        )
        return wrapper, partial(
            wrapper.plan,
            tables.page_starts.cpu(),
            tables.concatenated_pages,
            tables.last_page_lengths.cpu(),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.page_size,
            sm_scale=shape.score_scale,
            **_make_dtype_options(problem),
        )


class FlashInferPrefill(_FlashInferKernel):
    name = "flashinfer-prefill"
    cache_dtypes: ClassVar[tuple[str, ...]] = (SAME_AS_QUERIES, "float8_e4m3fn")

    def make_wrapper_and_planner(
        self, module: Any, problem: DecodeProblem, shape: DecodeShape, tables: CacheTables, workspace: torch.Tensor
    ) -> tuple[Any, Callable[[], object]]:
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=problem.graph,
            qo_indptr_buf=torch.empty_like(tables.query_starts),
            paged_kv_indptr_buf=torch.empty_like(tables.page_starts),
            paged_kv_indices_buf=torch.empty_like(tables.concatenated_pages),
            paged_kv_last_page_len_buf=torch.empty_like(tables.last_page_lengths),
        )
        return wrapper, partial(
            wrapper.plan,
            tables.query_starts.cpu(),
            tables.page_starts.cpu(),
            tables.concatenated_pages,
            tables.last_page_lengths.cpu(),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.page_size,
            causal=shape.queries > 1,
            sm_scale=shape.score_scale,
            **_make_dtype_options(problem),
        )


class FlashInferMla(_FlashInferKernel):
    name = "flashinfer-mla"
    supports_latent_cache = True
    head_dims = ()

    def explain_unsupported_shape(self, problem: DecodeProblem, shape: DecodeShape) -> str | None:
        if shape.is_latent and tuple(shape.head_dims) != (576, 512):
            return (
                f"{self.name} does not support a latent cache with head dimensions {shape.head_dims}: "
                "use --head-dims 576/512"
            )
        return super().explain_unsupported_shape(problem, shape)

    def make_wrapper_and_planner(
        self, module: Any, problem: DecodeProblem, shape: DecodeShape, tables: CacheTables, workspace: torch.Tensor
    ) -> tuple[Any, Callable[[], object]]:
        value_dim, position_dim = shape.head_dim_v, shape.head_dim - shape.head_dim_v
        wrapper = module.mla.BatchMLAPagedAttentionWrapper(
            workspace,
            use_cuda_graph=problem.graph,
            qo_indptr=torch.empty_like(tables.query_starts),
            kv_indptr=torch.empty_like(tables.page_starts),
            kv_indices=torch.empty_like(tables.concatenated_pages),
            kv_len_arr=torch.empty_like(tables.sequence_lengths),
        )
        queries, starts, lengths = (
            each.cpu() for each in (tables.query_starts, tables.page_starts, tables.sequence_lengths)
        )
        sizes = shape.heads, value_dim, position_dim, shape.page_size
        options = shape.queries > 1, shape.score_scale, *_make_dtype_options(problem).values()
        return wrapper, partial(wrapper.plan, queries, starts, tables.concatenated_pages, lengths, *sizes, *options)

    def launch_planned_attention(
        self, wrapper: Any, shape: DecodeShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> object:
        width, latent = shape.head_dim_v, view_as_pages(shape, k)[:, :, 0]
        return wrapper.run(q[..., :width], q[..., width:], latent[..., :width], latent[..., width:])
