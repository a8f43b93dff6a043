# SPDX-License-Identifier: Apache-2.0
"""Batch decode: one query token per request over a paged KV cache."""

from __future__ import annotations

from typing import Any

from cupyinfer.attention.call_errors import arguments_of, checked_call
from cupyinfer.attention.metadata import host_indices, page_table
from cupyinfer.attention.options import make_options
from cupyinfer.attention.request import AttentionRequest
from cupyinfer.attention.run_arrays import cache_views
from cupyinfer.attention.wrapper import BatchAttentionWrapper, plan_values
from cupyinfer.schedule.geometry import check_flag, decode_geometry
from cupyinfer.workspace import WorkspaceSize


def decode_request(
    indptr: Any,
    indices: Any,
    last_page_len: Any,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    *,
    kv_layout: str = "NHD",
    copy_pages: bool = False,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: Any = "float16",
    kv_data_type: Any = None,
    data_type: Any = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    alibi_slopes: Any = None,
    sinks: Any = None,
    head_dim_vo: int | None = None,
    non_blocking: bool = True,
) -> AttentionRequest:
    """Check the arguments of a decode plan; see `BatchDecodeWithPagedKVCacheWrapper.plan`."""
    if non_blocking is not True:
        check_flag(non_blocking, "non_blocking")
    options = make_options(  # by position, which looks up what is kept in two thirds of the time
        True,
        True,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        head_dim_vo,
        page_size,
        q_data_type if data_type is None else data_type,
        kv_data_type,
        False,
        window_left,
        sm_scale,
        logits_soft_cap,
        pos_encoding_mode,
        rope_scale,
        rope_theta,
        fixed_split_size,
        disable_split_kv,
    )
    geometry = decode_geometry(host_indices(indptr, "indptr"), host_indices(last_page_len, "last_page_len"), options.page_size)
    pages = page_table(indices, geometry.num_kv_entries, "indices", copy_pages)
    values = plan_values(options, geometry, (None, None), alibi_slopes, sinks)
    return AttentionRequest(options, geometry, pages, values, kv_layout)


class BatchDecodeWithPagedKVCacheWrapper(BatchAttentionWrapper):
    """Attention of one query token per request over a paged KV cache.

    Construct it with two workspaces (see `BatchAttentionWrapper`), `plan` once per batch, `run` once per layer.
    `workspace_size` takes the arguments of `plan` and says how large the workspaces must be.
    """

    @arguments_of(decode_request)
    def workspace_size(self, *args: Any, **options: Any) -> WorkspaceSize:
        """Bytes that `plan` with the same arguments needs of each workspace. Changes nothing and touches no device memory.

        Errors as for `plan`.
        """
        return self._size(self._request(*args, **options))

    @arguments_of(decode_request)
    def plan(self, *args: Any, **options: Any) -> None:
        """Schedule a batch for the following runs.

        Names and meaning of the arguments are FlashInfer's.

        Args:
            indptr: int [batch_size + 1], offsets of each request's pages in `indices`. On a GPU it costs a synchronising copy.
            indices: int [indptr[-1]], page ids. A contiguous int32 GPU array is read in place until the last run.
            last_page_len: int [batch_size], keys in each request's last page, 1 to page_size; any value for a request without pages.
            num_qo_heads: query heads, a multiple of num_kv_heads, at most 64 to one.
            num_kv_heads: KV heads.
            head_dim: width of a head: 64, 96, 128, 192 (with head_dim_vo 128) or 256.
            page_size: keys per page, at least 1.
            pos_encoding_mode: "NONE", "ROPE_LLAMA" or "ALIBI".
            window_left: keys a query sees to the left of its own position, -1 for all.
            logits_soft_cap: logits become ``cap * tanh(logit / cap)``; None or 0 for no cap.
            q_data_type: "float16" or "bfloat16", of queries and outputs (`data_type` sets both this and the cache's).
            kv_data_type: the cache's type, by default the queries'; or "float8_e4m3fn", "float8_e5m2".
            sm_scale: factor of ``q . k``, by default ``1 / sqrt(head_dim)``.
            rope_scale, rope_theta: of ROPE_LLAMA, by default 1 and 10000.
            fixed_split_size: pages per part; the result of a request then does not depend on the rest of the batch.
            disable_split_kv: never divide a request's keys, to the same end.
            alibi_slopes: float32 [num_qo_heads] for ALIBI, by default the published ones. An array on a GPU is read in place until the
                last run, and its values are not checked; under CUDA graphs every plan brings the same one.
            sinks: float32 [num_qo_heads], natural-log logits that join each row's denominator; -inf joins nothing. On a GPU as slopes.
            head_dim_vo: width of values and outputs, by default head_dim.
            non_blocking: accepted for FlashInfer's sake; uploads never block.

        Raises:
            ArgumentError, ArgumentTypeError: a wrong argument, by name.
            WorkspaceError: a workspace is too small; nothing was changed, and a previous plan stays valid.
        """
        self._make_plan(self._request(*args, **options))

    def _request(self, *args: Any, **options: Any) -> AttentionRequest:
        return decode_request(*args, **options, kv_layout=self._kv_layout, copy_pages=self._use_cuda_graph)

    @checked_call
    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *,
        q_scale: float | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        window_left: int | None = None,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
    ) -> Any:
        """Attention of the planned batch, queued on CuPy's current stream of the arrays' device.

        Args:
            q: [batch_size, num_qo_heads, head_dim].
            paged_kv_cache: a pair (k_cache, v_cache), each [num_pages, page_size, num_kv_heads, head_dim] (NHD) or
                [num_pages, num_kv_heads, page_size, head_dim] (HND), or one array with K and V along a second dimension of size 2.
                fp8 caches may come as uint8.
            q_scale: factor of q.
            k_scale: factor of k: a positive float, or float32 [num_kv_heads], positive too. It multiplies whatever the cache's type.
                The values of an array on a GPU are not checked, which would wait for the GPU: NaN in gives NaN out.
            v_scale: factor of v, likewise.
            out: [batch_size, num_qo_heads, head_dim_vo] to write to.
            lse: float32 [batch_size, num_qo_heads] to write to.
            return_lse: also return the base-2 log-sum-exp of the scaled logits.
            window_left, logits_soft_cap, sm_scale: only `plan` sets these; a value that differs from the plan's is an error.

        Returns:
            The output as the array type of `q`; with return_lse a pair of it and float32 [batch_size, num_qo_heads].
            A request without keys gives 0 and -inf.

        Raises:
            StateError: nothing was planned, or arrays of another batch.
            ArgumentError, ArgumentTypeError: an array that does not fit the plan, by name.
        """
        as_planned = window_left is None and logits_soft_cap is None and sm_scale is None
        unscaled = q_scale is None and k_scale is None and v_scale is None
        if as_planned and unscaled and lse is None and self._runs_again(q, paged_kv_cache, out, return_lse):
            return out
        k, v = cache_views(paged_kv_cache, self._kv_layout)
        plan = self._planned()
        if not as_planned:
            self._check_fixed(window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale)
        return plan.run(q, k, v, out=out, lse=lse, return_lse=return_lse, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
