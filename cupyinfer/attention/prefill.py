# SPDX-License-Identifier: Apache-2.0
"""Batch prefill: any number of query tokens per request, over a paged KV cache or over ragged keys and values."""

from __future__ import annotations

from typing import Any

from cupyinfer.attention.call_errors import arguments_of, checked_call, options_of
from cupyinfer.attention.metadata import host_indices, page_table
from cupyinfer.attention.options import AttentionOptions, make_options
from cupyinfer.attention.request import AttentionRequest
from cupyinfer.attention.run_arrays import cache_views
from cupyinfer.attention.wrapper import BatchAttentionWrapper, plan_values
from cupyinfer.errors import UnsupportedError
from cupyinfer.interop import as_view
from cupyinfer.schedule.geometry import check_flag, paged_prefill_geometry, ragged_prefill_geometry
from cupyinfer.workspace import WorkspaceSize


def _options(
    masks: tuple[Any, Any],
    *,
    causal: bool = False,
    non_blocking: bool = True,
    use_fp16_qk_reduction: bool = False,
    **options: Any,
) -> AttentionOptions:
    if non_blocking is not True:
        check_flag(non_blocking, "non_blocking")
    if use_fp16_qk_reduction is not False and check_flag(use_fp16_qk_reduction, "use_fp16_qk_reduction"):
        raise UnsupportedError("use_fp16_qk_reduction: logits are always summed in float32 here")
    checked = make_options(decode=False, causal=causal, **options)
    if causal and not (masks[0] is None and masks[1] is None):
        # As in FlashInfer, a custom mask takes the place of the causal one.
        return make_options(decode=False, causal=False, **options)
    return checked


#: Options that every prefill request supplies by itself.
_SET_BY_REQUEST = ("decode", "paged", "page_size")


@options_of(_options, make_options, supplied=_SET_BY_REQUEST)
def paged_prefill_request(
    qo_indptr: Any,
    paged_kv_indptr: Any,
    paged_kv_indices: Any,
    paged_kv_last_page_len: Any,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_qk: int,
    page_size: int,
    *,
    custom_mask: Any = None,
    packed_custom_mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    kv_layout: str = "NHD",
    copy_pages: bool = False,
    **options: Any,
) -> AttentionRequest:
    """Check the arguments of a paged prefill plan; see `BatchPrefillWithPagedKVCacheWrapper.plan`."""
    checked = _options(
        (custom_mask, packed_custom_mask),
        paged=True,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim_qk,
        page_size=page_size,
        **options,
    )
    geometry = paged_prefill_geometry(
        host_indices(qo_indptr, "qo_indptr"),
        host_indices(paged_kv_indptr, "paged_kv_indptr"),
        host_indices(paged_kv_last_page_len, "paged_kv_last_page_len"),
        checked.page_size,
    )
    pages = page_table(paged_kv_indices, geometry.num_kv_entries, "paged_kv_indices", copy_pages)
    values = plan_values(checked, geometry, (custom_mask, packed_custom_mask), alibi_slopes, sinks)
    return AttentionRequest(checked, geometry, pages, values, kv_layout, causal=bool(options.get("causal", False)))


@options_of(_options, make_options, supplied=_SET_BY_REQUEST)
def ragged_prefill_request(
    qo_indptr: Any,
    kv_indptr: Any,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_qk: int,
    *,
    custom_mask: Any = None,
    packed_custom_mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    kv_layout: str = "NHD",
    **options: Any,
) -> AttentionRequest:
    """Check the arguments of a ragged prefill plan; see `BatchPrefillWithRaggedKVCacheWrapper.plan`."""
    checked = _options(
        (custom_mask, packed_custom_mask),
        paged=False,
        page_size=1,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim_qk,
        **options,
    )
    geometry = ragged_prefill_geometry(host_indices(qo_indptr, "qo_indptr"), host_indices(kv_indptr, "kv_indptr"))
    values = plan_values(checked, geometry, (custom_mask, packed_custom_mask), alibi_slopes, sinks)
    return AttentionRequest(checked, geometry, values=values, kv_layout=kv_layout, causal=bool(options.get("causal", False)))


class BatchPrefillWithPagedKVCacheWrapper(BatchAttentionWrapper):
    """Attention of several query tokens per request over a paged KV cache, such as chunked prefill.

    Construct it with two workspaces (see `BatchAttentionWrapper`), `plan` once per batch, `run` once per layer.
    `workspace_size` takes the arguments of `plan` and says how large the workspaces must be.
    """

    @arguments_of(paged_prefill_request)
    def workspace_size(self, *args: Any, **options: Any) -> WorkspaceSize:
        """Bytes that `plan` with the same arguments needs of each workspace. Changes nothing and touches no device memory.

        Errors as for `plan`.
        """
        return self._size(self._request(*args, **options))

    @arguments_of(paged_prefill_request)
    def plan(self, *args: Any, **options: Any) -> None:
        """Schedule a batch for the following runs. Names and meaning of the arguments are FlashInfer's.

        Args:
            qo_indptr: int [batch_size + 1], offsets of each request's query tokens. On a GPU it costs a synchronising copy.
            paged_kv_indptr: int [batch_size + 1], offsets of each request's pages.
            paged_kv_indices: int [paged_kv_indptr[-1]], page ids. A contiguous int32 GPU array is read in place until the last run.
            paged_kv_last_page_len: int [batch_size], keys in each request's last page, 1 to page_size.
            num_qo_heads: query heads, a multiple of num_kv_heads, at most 64 to one.
            num_kv_heads: KV heads.
            head_dim_qk: width of queries and keys: 64, 96, 128, 192 (with head_dim_vo 128) or 256.
            page_size: keys per page, at least 1.
            head_dim_vo: width of values and outputs, by default head_dim_qk.
            custom_mask: bool [sum of qo_len * kv_len], the requests' masks flattened one after the other; True sees. Values must be
                finite also where it hides them: they are multiplied with weight 0.
            packed_custom_mask: the same as bits (little-endian), each request beginning on a byte.
            causal: a query sees no key after its own position, counted from the end of the keys. Ignored with a custom mask.
            window_left: keys a query sees to the left of its own position, -1 for all. Without `causal` it sees every later key.
            q_data_type: "float16" or "bfloat16", of queries and outputs; or "float8_e4m3fn", with a cache of the same (Hopper GPUs, host).
            o_data_type: "float16" or "bfloat16", of the outputs of fp8 queries; for others the queries' type.
            pos_encoding_mode, logits_soft_cap, sm_scale, rope_scale, rope_theta, kv_data_type, fixed_split_size, disable_split_kv,
                alibi_slopes, sinks, non_blocking: as for `BatchDecodeWithPagedKVCacheWrapper.plan`.
            use_fp16_qk_reduction: refused; logits are summed in float32.

        Raises:
            ArgumentError, ArgumentTypeError: a wrong argument, by name.
            WorkspaceError: a workspace is too small; nothing was changed, and a previous plan stays valid.
        """
        self._make_plan(self._request(*args, **options))

    def _request(self, *args: Any, **options: Any) -> AttentionRequest:
        return paged_prefill_request(*args, **options, kv_layout=self._kv_layout, copy_pages=self._use_cuda_graph)

    @checked_call
    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        window_left: int | None = None,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        causal: bool | None = None,
    ) -> Any:
        """Attention of the planned batch, queued on CuPy's current stream of the arrays' device.

        Args:
            q: [qo_indptr[-1], num_qo_heads, head_dim_qk]; fp8 queries may come as uint8.
            q_scale: factor of q: a positive float; for fp8 queries also float32 [num_qo_heads], positive too.
            paged_kv_cache, k_scale, v_scale, out, lse, return_lse: as for `BatchDecodeWithPagedKVCacheWrapper.run`, with one output row
                per query token.
            window_left, logits_soft_cap, sm_scale, causal: only `plan` sets these; a value that differs from what it was given is an error.

        Returns:
            The output as the array type of `q`; with return_lse a pair of it and float32 [num_tokens, num_qo_heads].

        Raises:
            StateError: nothing was planned, or arrays of another batch.
            ArgumentError, ArgumentTypeError: an array that does not fit the plan, by name.
        """
        as_planned = window_left is None and logits_soft_cap is None and sm_scale is None and causal is None
        unscaled = q_scale is None and k_scale is None and v_scale is None
        if as_planned and unscaled and lse is None and self._runs_again(q, paged_kv_cache, out, return_lse):
            return out
        k, v = cache_views(paged_kv_cache, self._kv_layout)
        plan = self._planned()
        if not as_planned:
            self._check_fixed(window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, causal=causal)
        return plan.run(q, k, v, out=out, lse=lse, return_lse=return_lse, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)


class BatchPrefillWithRaggedKVCacheWrapper(BatchAttentionWrapper):
    """Attention of several query tokens per request over keys and values that lie one request after the other.

    Construct it with two workspaces (see `BatchAttentionWrapper`), `plan` once per batch, `run` once per layer.
    `workspace_size` takes the arguments of `plan` and says how large the workspaces must be.
    """

    @arguments_of(ragged_prefill_request)
    def workspace_size(self, *args: Any, **options: Any) -> WorkspaceSize:
        """Bytes that `plan` with the same arguments needs of each workspace. Changes nothing and touches no device memory.

        Errors as for `plan`.
        """
        return self._size(self._request(*args, **options))

    @arguments_of(ragged_prefill_request)
    def plan(self, *args: Any, **options: Any) -> None:
        """Schedule a batch for the following runs. Names and meaning of the arguments are FlashInfer's.

        Args:
            qo_indptr: int [batch_size + 1], offsets of each request's query tokens. On a GPU it costs a synchronising copy.
            kv_indptr: int [batch_size + 1], offsets of each request's keys.
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, custom_mask, packed_custom_mask, causal, window_left and the rest: as
                for `BatchPrefillWithPagedKVCacheWrapper.plan`; fixed_split_size counts keys here.

        Raises:
            ArgumentError, ArgumentTypeError: a wrong argument, by name.
            WorkspaceError: a workspace is too small; nothing was changed, and a previous plan stays valid.
        """
        self._make_plan(self._request(*args, **options))

    def _request(self, *args: Any, **options: Any) -> AttentionRequest:
        return ragged_prefill_request(*args, **options, kv_layout=self._kv_layout)

    @checked_call
    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        window_left: int | None = None,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        causal: bool | None = None,
    ) -> Any:
        """Attention of the planned batch, queued on CuPy's current stream of the arrays' device.

        Args:
            q: [qo_indptr[-1], num_qo_heads, head_dim_qk].
            k: [kv_indptr[-1] or more, num_kv_heads, head_dim_qk] (NHD), or heads first (HND).
            v: the same with head_dim_vo.
            q_scale, k_scale, v_scale, out, lse, return_lse, window_left, logits_soft_cap, sm_scale, causal: as for
                `BatchPrefillWithPagedKVCacheWrapper.run`.

        Returns:
            The output as the array type of `q`; with return_lse a pair of it and float32 [num_tokens, num_qo_heads].

        Raises:
            StateError: nothing was planned, or arrays of another batch.
            ArgumentError, ArgumentTypeError: an array that does not fit the plan, by name.
        """
        as_planned = window_left is None and logits_soft_cap is None and sm_scale is None and causal is None
        unscaled = q_scale is None and k_scale is None and v_scale is None
        if as_planned and unscaled and lse is None and self._runs_again(q, (k, v), out, return_lse):
            return out
        keys, values = as_view(k, "k"), as_view(v, "v")
        plan = self._planned()
        if not as_planned:
            self._check_fixed(window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, causal=causal)
        return plan.run(q, keys, values, out=out, lse=lse, return_lse=return_lse, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
