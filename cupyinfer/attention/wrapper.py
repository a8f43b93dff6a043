# SPDX-License-Identifier: Apache-2.0
"""What the three batch wrappers share: buffers, CUDA-graph capacity, sizing, planning and running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Never, SupportsIndex

from cupyinfer.attention.call_errors import checked_call
from cupyinfer.attention.metadata import NO_VALUES, PlanValues, alibi_slopes
from cupyinfer.attention.options import AttentionOptions, check_float, check_kv_layout
from cupyinfer.attention.plan import Plan, plan_attention
from cupyinfer.attention.request import AttentionRequest
from cupyinfer.attention.workspaces import Workspaces, check_backend
from cupyinfer.backends.device import current_device, read_profile
from cupyinfer.errors import ArgumentError, ArgumentTypeError, StateError
from cupyinfer.schedule.capacity import BatchLimits
from cupyinfer.schedule.geometry import BatchGeometry, check_flag, check_int
from cupyinfer.schedule.plan_info import PlanInfo
from cupyinfer.schedule.profile import HOST_PROFILE, DeviceProfile, named_profile
from cupyinfer.workspace import WorkspaceSize


def plan_values(options: AttentionOptions, geometry: BatchGeometry, masks: tuple[Any, Any], slopes: Any, sinks: Any) -> PlanValues:
    """Take in a plan's custom mask, ALiBi slopes (the published ones by default) and attention sinks.

    Raises:
        ArgumentError: slopes without ALIBI, or an array that does not fit.
    """
    if masks[0] is None and masks[1] is None and slopes is None and sinks is None and options.pos_encoding_mode != "ALIBI":
        return NO_VALUES
    values = PlanValues()
    if slopes is not None and options.pos_encoding_mode != "ALIBI":
        raise ArgumentError(f"alibi_slopes: given with pos_encoding_mode {options.pos_encoding_mode!r}, they need 'ALIBI'")
    if options.pos_encoding_mode == "ALIBI":
        values.add_per_head("alibi_slopes", alibi_slopes(options.num_qo_heads) if slopes is None else slopes, options.num_qo_heads)
    if sinks is not None:
        values.add_per_head("sinks", sinks, options.num_qo_heads)
    if not (masks[0] is None and masks[1] is None):
        values.add_mask(geometry, *masks)
    return values


def _window(value: Any, argument: str) -> int:
    return check_int(value, argument, -1)


#: How run reads the options that only a plan sets.
_RUN_OPTIONS: dict[str, Callable[[Any, str], Any]] = {
    "window_left": _window,
    "logits_soft_cap": check_float,
    "sm_scale": check_float,
    "causal": check_flag,
}


def _check_same_values(first: dict[str, str], now: dict[str, str]) -> None:
    """Refuse masks and per-head values that a captured run, which has the addresses of the first plan, would not find."""
    # First what came or went, which moves what lies behind it.
    for name in sorted({**first, **now}, key=lambda name: (name in first) == (name in now)):
        before, after = first.get(name, "not given"), now.get(name, "not given")
        if before != after:
            argument = "custom_mask" if name == "mask" else name
            raise ArgumentError(f"{argument}: {after}, but {before} in the first plan of this object's CUDA graph, which keeps addresses")


class GraphLayout(NamedTuple):
    """What the first plan for CUDA graphs fixes for all later ones: a captured run would not see it change.

    Attributes:
        limits: of every batch.
        num_pages: page-table entries there is room for.
        options: what was planned.
        values: where masks and per-head values lie, as `PlanValues.places` says.
        launch: the kernel, its grid and every offset; empty until the first plan is made.
    """

    limits: BatchLimits
    num_pages: int
    options: AttentionOptions
    values: dict[str, str]
    launch: dict[str, Any]


class BatchAttentionWrapper:
    """Buffers, capacity and the current plan of one wrapper. The subclasses turn their arguments into an AttentionRequest.

    Args:
        float_workspace_buffer: memory for partial results: any contiguous array, 16-byte aligned. May be set later, or never
            when `workspace_size` says 0 bytes.
        int_workspace_buffer: memory for the plan's records, likewise.
        kv_layout: "NHD" (tokens before heads) or "HND".
        use_cuda_graph: keep the grid and every offset the same from plan to plan, so that a captured `run` stays valid.
        backend: "auto", "fa2" (GPU), "fa3" (Hopper GPU, prefill) or "host" (NumPy).
        profile: GPU to size and plan for, by name or as a DeviceProfile; by default the one that holds the workspaces, for
            sizing without any the current one, and without a GPU the host backend's.
        max_batch_size: requests a CUDA graph must hold; by default those of the first plan.
        max_num_qo_tokens: query tokens it must hold (prefill); by default those of the first plan.
        max_num_pages: page-table entries it must hold; by default those of the first plan.
        max_kv_len: keys of its longest request; needed with fixed_split_size, by default that of the first plan.
    """

    @checked_call
    def __init__(
        self,
        float_workspace_buffer: Any = None,
        int_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        *,
        use_cuda_graph: bool = False,
        backend: str = "auto",
        profile: str | DeviceProfile | None = None,
        max_batch_size: int | None = None,
        max_num_qo_tokens: int | None = None,
        max_num_pages: int | None = None,
        max_kv_len: int | None = None,
    ) -> None:
        self._kv_layout = check_kv_layout(kv_layout)
        self._backend = check_backend(backend)
        self._profile = None if profile is None else named_profile(profile)
        self._use_cuda_graph = check_flag(use_cuda_graph, "use_cuda_graph")
        capacity = {
            "max_batch_size": max_batch_size,
            "max_num_qo_tokens": max_num_qo_tokens,
            "max_num_pages": max_num_pages,
            "max_kv_len": max_kv_len,
        }
        self._capacity = tuple(None if value is None else check_int(value, name, 0) for name, value in capacity.items())
        self._graph: GraphLayout | None = None
        self._plan: Plan | None = None
        self.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Never:
        """Refuse `copy` and `pickle`: a copy would plan and run in addresses that belong to this wrapper, or to another process.

        Raises:
            ArgumentTypeError: always.
        """
        raise ArgumentTypeError(
            f"{type(self).__name__}: cannot be copied or pickled, for its plan lies in its workspaces; make another wrapper"
        )

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans keep their launch and offsets for CUDA graphs."""
        return self._use_cuda_graph

    @property
    def plan_info(self) -> PlanInfo:
        """The current plan as a value.

        Raises:
            StateError: nothing was planned.
        """
        return self._planned().info

    @property
    def plan_backend(self) -> str:
        """The kernels that serve the current plan: "fa2", "fa3" or "host", however `backend` asked for them.

        Raises:
            StateError: nothing was planned.
        """
        return self._planned().backend

    @checked_call
    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        """Exchange both workspaces. The next call must be `plan`.

        Raises:
            WorkspaceError: a buffer is strided, unaligned, read-only, or of the wrong kind of device for the backend.
        """
        self._workspaces = Workspaces(float_workspace_buffer, int_workspace_buffer, self._backend)
        self._plan = None

    def _sizing_profile(self) -> DeviceProfile:
        if self._profile is not None:
            return self._profile
        if self._backend == "host" or (self._backend == "auto" and self._workspaces.device.kind == "cpu"):
            return HOST_PROFILE
        return read_profile(self._workspaces.device.index if self._workspaces.int_bytes is not None else current_device())

    def _size(self, request: AttentionRequest) -> WorkspaceSize:
        self._within_graph(request)
        return request.draft(self._sizing_profile()).size

    def _make_plan(self, request: AttentionRequest) -> None:
        graph = self._within_graph(request)
        self._plan = plan_attention(request, self._workspaces, self._profile)
        self._graph = graph

    def _within_graph(self, request: AttentionRequest) -> GraphLayout | None:
        """Give the request this object's backend and the limits of its CUDA graph, which the first plan fixes; returns the latter."""
        request.backend = self._backend
        if not self._use_cuda_graph:
            return None
        graph = self._graph
        if graph is None:
            geometry = request.geometry
            batch, tokens, pages, kv_len = self._capacity
            batch = geometry.batch_size if batch is None else batch
            tokens = batch if request.options.decode else geometry.num_qo_tokens if tokens is None else tokens
            kv_len = geometry.longest_kv if kv_len is None and request.options.fixed_split_size is not None else kv_len
            limits = BatchLimits(batch, tokens, kv_len)
            pages = geometry.num_kv_entries if pages is None else pages
            graph = GraphLayout(limits, pages, request.options, request.values.places(), {})
        elif graph.options != request.options:
            raise ArgumentError(f"plan: a CUDA graph keeps the options of its first plan, {graph.options}; got {request.options}")
        elif graph.values or request.values is not NO_VALUES:
            _check_same_values(graph.values, request.values.places())
        request.graph_limits, request.graph_pages, request.graph_launch = graph.limits, graph.num_pages, graph.launch
        return graph

    def _runs_again(self, q: Any, cache: Any, out: Any, return_lse: Any) -> bool:
        """Run on these arrays alone if they are laid out as in a run of this plan before, as most are; False, and nothing done, if not."""
        plan = self._plan
        if plan is None or out is None or return_lse is not False or type(cache) not in (tuple, list) or len(cache) != 2:
            return False
        return plan.run_again(q, cache[0], cache[1], out)

    def _planned(self) -> Plan:
        if self._plan is None:
            raise StateError("run: nothing is planned; call plan first, and again after reset_workspace_buffer")
        return self._plan

    def _check_fixed(self, **fixed: Any) -> None:
        """Refuse options that only a plan sets, unless they agree with it."""
        plan = self._planned()
        for name, value in fixed.items():
            planned = plan.causal if name == "causal" else getattr(plan.options, name)
            if value is not None and _RUN_OPTIONS[name](value, name) != planned:
                raise ArgumentError(f"{name}: got {value} at run, the plan has {planned}; options are fixed by plan")
