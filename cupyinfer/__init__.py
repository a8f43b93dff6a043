# SPDX-License-Identifier: Apache-2.0
"""LLM-serving attention for CuPy, JAX and every array that speaks DLPack, with workspaces sized to the byte beforehand."""

from cupyinfer.attention.cascade import merge_state, merge_state_in_place, merge_states
from cupyinfer.attention.decode import BatchDecodeWithPagedKVCacheWrapper
from cupyinfer.attention.modules import (
    get_batch_decode_module,
    get_batch_prefill_module,
    get_trtllm_gen_decode_module,
    get_trtllm_gen_prefill_module,
)
from cupyinfer.attention.page import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens
from cupyinfer.attention.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from cupyinfer.attention.single import single_decode_with_kv_cache, single_prefill_with_kv_cache
from cupyinfer.attention.user_modules import get_batch_decode_jit_module, get_batch_prefill_jit_module
from cupyinfer.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendUnavailable,
    CompileError,
    CupyInferError,
    StateError,
    UnsupportedError,
    WorkspaceError,
)
from cupyinfer.jit.user_variant import UserVariant
from cupyinfer.schedule.bounds import WorkspaceLimits, workspace_bound
from cupyinfer.schedule.plan_info import DecodePlanInfo, PlanInfo, PrefillPlanInfo
from cupyinfer.schedule.profile import PROFILES, DeviceProfile
from cupyinfer.workspace import AlignedAllocator, WorkspaceSize

__version__ = "0.1.0"

__all__ = [
    "PROFILES",
    "AlignedAllocator",
    "ArgumentError",
    "ArgumentTypeError",
    "BackendUnavailable",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "CompileError",
    "CupyInferError",
    "DecodePlanInfo",
    "DeviceProfile",
    "PlanInfo",
    "PrefillPlanInfo",
    "StateError",
    "UnsupportedError",
    "UserVariant",
    "WorkspaceError",
    "WorkspaceLimits",
    "WorkspaceSize",
    "get_batch_decode_jit_module",
    "append_paged_kv_cache",
    "get_batch_decode_module",
    "get_batch_indices_positions",
    "get_batch_prefill_jit_module",
    "get_batch_prefill_module",
    "get_seq_lens",
    "get_trtllm_gen_decode_module",
    "get_trtllm_gen_prefill_module",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "workspace_bound",
]
