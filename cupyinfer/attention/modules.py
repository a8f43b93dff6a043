# SPDX-License-Identifier: Apache-2.0
"""Attention as modules: plan, run and workspace_size as functions of one kernel family, with the plan as a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from cupyinfer.attention.call_errors import checked_call, misfit, options_of
from cupyinfer.attention.decode import decode_request
from cupyinfer.attention.options import check_kv_layout
from cupyinfer.attention.plan import Plan, plan_attention
from cupyinfer.attention.prefill import paged_prefill_request, ragged_prefill_request
from cupyinfer.attention.request import AttentionRequest
from cupyinfer.attention.run_arrays import cache_views
from cupyinfer.attention.workspaces import Workspaces, check_backend
from cupyinfer.backends.device import current_device, has_gpu, read_profile
from cupyinfer.dtypes import FP8_TYPES, HALF_TYPES, canonical_dtype
from cupyinfer.errors import ArgumentError, ArgumentTypeError, BackendUnavailable, CupyInferError
from cupyinfer.interop import ArrayView, as_view
from cupyinfer.schedule.geometry import check_flag, check_int
from cupyinfer.schedule.profile import HOST_PROFILE, DeviceProfile, named_profile
from cupyinfer.schedule.tiles import check_head_dims
from cupyinfer.workspace import WorkspaceSize

#: The argument of the request functions that a module supplies.
_SUPPLIED = ("kv_layout", "copy_pages")


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
        return self._request(*args, **options).draft(named_profile(profile)).size

    @checked_call
    def plan(
        self, float_workspace: Any, int_workspace: Any, *args: Any, profile: str | DeviceProfile | None = None, **options: Any
    ) -> Plan:
        """Schedule a batch in two workspaces and return the plan; arguments as for the wrapper's `plan`.

        Raises:
            ArgumentError: bad offsets, options or lengths, or an option that this module fixes.
            ArgumentTypeError: a value of the wrong kind, or an element type that is not supported.
            UnsupportedError: this module's backend does not serve what is asked for.
            WorkspaceError: a buffer is missing, unaligned or too small.
            BackendUnavailable: this machine cannot run the backend.
            CompileError: NVRTC is missing or refused the kernel.
        """
        request = self._request(*args, **options)
        chosen = None if profile is None else named_profile(profile)
        return plan_attention(request, Workspaces(float_workspace, int_workspace, self.backend), chosen)

    @checked_call
    def run(
        self,
        plan: Plan,
        q: Any,
        *kv: Any,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> Any:
        """Run a plan of this module.

        Args:
            plan: what `plan` returned.
            q: [num_tokens, num_qo_heads, head_dim_qk].
            kv: the paged cache, or ragged k and v.
            out, lse, return_lse, q_scale, k_scale, v_scale: as for the wrapper's `run`.

        Raises:
            ArgumentError: shapes, strides or devices that do not fit the plan, or not the arrays this module takes.
            ArgumentTypeError: not a plan, or not the planned element types.
            StateError: arrays of another batch than the planned one.
        """
        if not isinstance(plan, Plan):
            raise ArgumentTypeError(f"plan: got {type(plan).__name__}, expected what this module's plan returned")
        k, v = self._kv_views(kv)
        return plan.run(q, k, v, out=out, lse=lse, return_lse=return_lse, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)

    def _kv_views(self, kv: tuple[Any, ...]) -> tuple[ArrayView, ArrayView]:
        if self.paged:
            if len(kv) != 1:
                raise ArgumentError(f"paged_kv_cache: got {len(kv)} arguments after q, expected one: a pair or a 5-D array")
            return cache_views(kv[0], self.kv_layout)
        if len(kv) != 2:
            raise ArgumentError(f"k, v: got {len(kv)} arguments after q, expected two")
        return as_view(kv[0], "k"), as_view(kv[1], "v")

    def _request(self, *args: Any, **options: Any) -> AttentionRequest:
        clash = sorted(set(options) & set(self.fixed))
        if clash:
            raise ArgumentError(f"{clash[0]}: is fixed by this module as {self.fixed[clash[0]]!r}")
        given = {**self.fixed, **options}
        try:
            request = self.request(*args, **given, kv_layout=self.kv_layout)
        except TypeError as error:
            wrong = None if isinstance(error, CupyInferError) else misfit(signature(self.request), type(self).__name__, args, given)
            if wrong is None:
                raise
            raise wrong from None
        request.backend = self.backend
        return request


def _fixed(head_dim_qk: int, head_dim_vo: int | None, q_dtype: Any, kv_dtype: Any, options: dict[str, Any]) -> dict[str, Any]:
    """What every request of a module gets, of which types and widths are checked before there is one."""
    q_type = canonical_dtype(q_dtype, "q_dtype", HALF_TYPES)
    kv_type = q_type if kv_dtype is None else canonical_dtype(kv_dtype, "kv_dtype", (*HALF_TYPES, *FP8_TYPES))
    if kv_type in HALF_TYPES and kv_type != q_type:
        raise ArgumentTypeError(f"kv_dtype: got {kv_type} for {q_type} queries; a 16-bit cache has the queries' type")
    width = check_int(head_dim_qk, "head_dim_qk", 1)
    check_head_dims(width, width if head_dim_vo is None else check_int(head_dim_vo, "head_dim_vo", 1))
    return {"head_dim_vo": head_dim_vo, "q_data_type": q_dtype, "kv_data_type": kv_dtype, **options}


@checked_call
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
        backend: "auto", "fa2" or "host"; "fa3" too for prefill, which it alone serves.
        options: options of `BatchDecodeWithPagedKVCacheWrapper.plan` to fix, such as pos_encoding_mode; `plan` checks them.

    Returns:
        A module whose `plan` takes, after the two workspaces, ``indptr, indices, last_page_len, num_qo_heads, num_kv_heads, page_size``.

    Raises:
        ArgumentTypeError: an element type that is not supported, or widths that are no integers.
        ArgumentError: widths that no kernel serves, or an unknown layout or backend.
    """

    @options_of(decode_request, supplied=_SUPPLIED)
    def request(
        indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int, num_kv_heads: int, page_size: int, **rest: Any
    ) -> AttentionRequest:
        return decode_request(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim_qk, page_size, **rest)

    fixed = _fixed(head_dim_qk, head_dim_vo, q_dtype, kv_dtype, options)
    return AttentionModule(request, fixed, True, check_kv_layout(kv_layout), check_backend(backend))


@checked_call
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

    Raises:
        ArgumentError, ArgumentTypeError: as for `get_batch_decode_module`.
    """

    @options_of(paged_prefill_request, supplied=_SUPPLIED)
    def paged_request(
        qo_indptr: Any, indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int, num_kv_heads: int, page_size: int, **rest: Any
    ) -> AttentionRequest:
        return paged_prefill_request(qo_indptr, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim_qk, page_size, **rest)

    @options_of(ragged_prefill_request, supplied=_SUPPLIED)
    def ragged_request(qo_indptr: Any, kv_indptr: Any, num_qo_heads: int, num_kv_heads: int, **rest: Any) -> AttentionRequest:
        return ragged_prefill_request(qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, **rest)

    fixed = _fixed(head_dim_qk, head_dim_vo, q_dtype, kv_dtype, options)
    request = paged_request if check_flag(paged, "paged") else ragged_request
    return AttentionModule(request, fixed, bool(paged), check_kv_layout(kv_layout), check_backend(backend))


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
