# SPDX-License-Identifier: Apache-2.0
"""Attention as modules: plan, run and workspace_size as functions of one kernel family, with the plan as a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from cupyinfer.attention.decode import decode_request
from cupyinfer.attention.options import check_kv_layout
from cupyinfer.attention.plan import AttentionRequest, Plan, plan_attention
from cupyinfer.attention.prefill import paged_prefill_request, ragged_prefill_request
from cupyinfer.attention.run_arrays import cache_views
from cupyinfer.attention.workspaces import Workspaces, check_backend
from cupyinfer.backends.device import current_device, has_gpu, read_profile
from cupyinfer.errors import ArgumentError, BackendUnavailable
from cupyinfer.interop import as_view
from cupyinfer.schedule.profile import HOST_PROFILE, DeviceProfile, named_profile
from cupyinfer.workspace import WorkspaceSize


@dataclass(frozen=True)
class AttentionModule:
    """Attention with its element types, widths and logit rules fixed; the batch comes with each call.

    Attributes:
        request: turns arguments into a checked request.
        fixed: arguments every request gets: dtypes, widths, logit rules.
        paged: `run` takes a paged cache rather than ragged k and v.
        kv_layout: "NHD" or "HND".
        backend: "auto", "fa2", "fa3" or "host".
    """

    request: Callable[..., AttentionRequest]
    fixed: dict[str, Any] = field(hash=False)
    paged: bool
    kv_layout: str = "NHD"
    backend: str = "auto"

    def workspace_size(self, *args: Any, profile: str | DeviceProfile | None = None, **options: Any) -> WorkspaceSize:
        """Bytes that `plan` with the same arguments needs of each workspace; touches no device memory.

        Args:
            args: the batch: offsets, page table, head counts, as for the wrapper's `plan` without what this module fixes.
            profile: the GPU to size for, by default the current one, without a GPU the host backend's.
            options: further options of the wrapper's `plan`.
        """
        if profile is None:
            on_gpu = self.backend in ("fa2", "fa3") or (self.backend == "auto" and has_gpu())
            profile = read_profile(current_device()) if on_gpu else HOST_PROFILE
        return replace(self._request(*args, **options), backend=self.backend).draft(named_profile(profile)).size

    def plan(
        self, float_workspace: Any, int_workspace: Any, *args: Any, profile: str | DeviceProfile | None = None, **options: Any
    ) -> Plan:
        """Schedule a batch in two workspaces and return the plan; arguments and errors as for the wrapper's `plan`."""
        request = replace(self._request(*args, **options), backend=self.backend)
        chosen = None if profile is None else named_profile(profile)
        return plan_attention(request, Workspaces(float_workspace, int_workspace, self.backend), chosen)

    def run(self, plan: Plan, q: Any, *kv: Any, **options: Any) -> Any:
        """Run a plan of this module.

        Args:
            plan: what `plan` returned.
            q: [num_tokens, num_qo_heads, head_dim_qk].
            kv: the paged cache, or ragged k and v.
            options: out, lse, return_lse, q_scale, k_scale, v_scale, as for the wrapper's `run`.
        """
        if self.paged:
            if len(kv) != 1:
                raise ArgumentError(f"paged_kv_cache: got {len(kv)} arguments after q, expected one: a pair or a 5-D array")
            k, v = cache_views(kv[0], self.kv_layout)
        else:
            if len(kv) != 2:
                raise ArgumentError(f"k, v: got {len(kv)} arguments after q, expected two")
            k, v = as_view(kv[0], "k"), as_view(kv[1], "v")
        return plan.run(q, k, v, **options)

    def _request(self, *args: Any, **options: Any) -> AttentionRequest:
        clash = sorted(set(options) & set(self.fixed))
        if clash:
            raise ArgumentError(f"{clash[0]}: is fixed by this module as {self.fixed[clash[0]]!r}")
        return self.request(*args, **self.fixed, **options, kv_layout=self.kv_layout)


def _fixed(head_dim_qk: int, head_dim_vo: int | None, q_dtype: Any, kv_dtype: Any, options: dict[str, Any]) -> dict[str, Any]:
    return {"head_dim_vo": head_dim_vo, "q_data_type": q_dtype, "kv_data_type": kv_dtype, **options}


def get_batch_decode_module(
    q_dtype: Any,
    kv_dtype: Any,
    head_dim_qk: int,
    head_dim_vo: int | None = None,
    *,
    kv_layout: str = "NHD",
    backend: str = "auto",
    **options: Any,
) -> AttentionModule:
    """Batch decode over a paged cache as a module.

    Args:
        q_dtype: element type of queries and outputs.
        kv_dtype: element type of the cache.
        head_dim_qk: width of queries and keys.
        head_dim_vo: width of values and outputs, by default head_dim_qk.
        kv_layout: "NHD" or "HND".
        backend: "auto", "fa2" or "host".
        options: options of `BatchDecodeWithPagedKVCacheWrapper.plan` to fix, such as pos_encoding_mode.

    Returns:
        A module whose `plan` takes, after the two workspaces, ``indptr, indices, last_page_len, num_qo_heads, num_kv_heads, page_size``.
    """

    def request(
        indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int, num_kv_heads: int, page_size: int, **rest: Any
    ) -> AttentionRequest:
        return decode_request(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim_qk, page_size, **rest)

    fixed = _fixed(head_dim_qk, head_dim_vo, q_dtype, kv_dtype, options)
    return AttentionModule(request, fixed, True, check_kv_layout(kv_layout), check_backend(backend))


def get_batch_prefill_module(
    q_dtype: Any,
    kv_dtype: Any,
    head_dim_qk: int,
    head_dim_vo: int | None = None,
    *,
    paged: bool = True,
    kv_layout: str = "NHD",
    backend: str = "auto",
    **options: Any,
) -> AttentionModule:
    """Batch prefill as a module, over a paged cache or over ragged keys and values.

    Args:
        q_dtype, kv_dtype, head_dim_qk, head_dim_vo, kv_layout, backend: as for `get_batch_decode_module`.
        paged: whether keys and values are paged.
        options: options of the prefill wrappers' `plan` to fix, such as causal.

    Returns:
        A module whose `plan` takes, after the two workspaces, ``qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
        num_qo_heads, num_kv_heads, page_size`` (paged) or ``qo_indptr, kv_indptr, num_qo_heads, num_kv_heads`` (ragged).
    """

    def paged_request(
        qo_indptr: Any, indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int, num_kv_heads: int, page_size: int, **rest: Any
    ) -> AttentionRequest:
        return paged_prefill_request(qo_indptr, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim_qk, page_size, **rest)

    def ragged_request(qo_indptr: Any, kv_indptr: Any, num_qo_heads: int, num_kv_heads: int, **rest: Any) -> AttentionRequest:
        return ragged_prefill_request(qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, **rest)

    fixed = _fixed(head_dim_qk, head_dim_vo, q_dtype, kv_dtype, options)
    request = paged_request if paged else ragged_request
    return AttentionModule(request, fixed, paged, check_kv_layout(kv_layout), check_backend(backend))


@dataclass(frozen=True)
class UnavailableModule:
    """A kernel family that is not shipped: it cannot be sized, planned or run.

    Attributes:
        name: the family.
        workspace_size: None, which tells callers that there is nothing to size.
    """

    name: str
    workspace_size: None = None

    def plan(self, *args: Any, **options: Any) -> None:
        """Raise BackendUnavailable."""
        raise BackendUnavailable(f"{self.name}: these are closed binaries for Blackwell GPUs that cupyinfer does not ship; use fa2")

    def run(self, *args: Any, **options: Any) -> None:
        """Raise BackendUnavailable."""
        self.plan()


def get_trtllm_gen_decode_module(*args: Any, **options: Any) -> UnavailableModule:
    """The trtllm-gen decode family: not shipped; its `workspace_size` is None."""
    return UnavailableModule("trtllm-gen decode")


def get_trtllm_gen_prefill_module(*args: Any, **options: Any) -> UnavailableModule:
    """The trtllm-gen prefill family: not shipped; its `workspace_size` is None."""
    return UnavailableModule("trtllm-gen prefill")
