# SPDX-License-Identifier: Apache-2.0
"""From a request to sizes and plans: the functions behind every wrapper and module."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyinfer.attention.metadata import NO_VALUES
from cupyinfer.attention.options import FLOAT32_MAX, AttentionOptions, check_float32, check_positive
from cupyinfer.attention.request import AttentionRequest
from cupyinfer.attention.run_arrays import ArrayChecker, PlanMemories, PlanMemory, num_bytes
from cupyinfer.attention.user_arguments import UserValues
from cupyinfer.attention.workspaces import Workspaces
from cupyinfer.backends.arrays import OWN_PRODUCERS, RunArrays, RunScales, per_head_scale
from cupyinfer.backends.device import read_profile
from cupyinfer.backends.fa2 import Fa2Kernel, Fa2Launcher, PlanAddresses
from cupyinfer.backends.fa3 import Fa3Kernel, Fa3Launcher
from cupyinfer.backends.host_launcher import HostLauncher
from cupyinfer.backends.params import divisor
from cupyinfer.errors import ArgumentError, BackendUnavailable, StateError
from cupyinfer.interop import CPU_DEVICE, ArrayView, Device, as_view, current_stream_state, hand_back, release_after_work, use_device
from cupyinfer.schedule.counting import tuple_new
from cupyinfer.schedule.geometry import check_flag
from cupyinfer.schedule.plan_info import PlanInfo
from cupyinfer.schedule.planner import PlanDraft
from cupyinfer.schedule.profile import HOST_PROFILE, DeviceProfile

#: Fields of a plan that a captured run holds.
_CAPTURED = (
    "num_ctas", "cta_tile_q", "kv_tile", "tiles_offset", "cta_work_offset", "merge_groups_offset", "page_indices_offset",
    "values_offset", "partial_o_offset", "partial_lse_offset",
)  # fmt: skip


class Plan:
    """A planned batch, ready to run. Made by `plan_attention`.

    Attributes:
        info: what was decided, as integers.
        backend: the kernels that serve it: "fa2", "fa3" or "host".
        options: what was asked for.
        causal: what was said of it, though a custom mask takes its place.
        device: where it runs.
    """

    def __init__(
        self,
        request: AttentionRequest,
        info: PlanInfo,
        backend: str,
        device: Device,
        launcher: Fa2Launcher | HostLauncher,
        memory: PlanMemories,
    ) -> None:
        self.info = info
        self.backend = backend
        self.options = request.options
        self.causal = request.causal
        self.device = device
        self._launcher = launcher
        self._pages = request.pages
        self._values = request.values
        self._plain_scales = request.options.plain_scales
        self._checker = ArrayChecker(
            request.options, info, request.kv_layout, device, request.pages.max_page, memory, _read_in_place(request), request.kv_names
        )

    def run(
        self,
        q: Any,
        k: ArrayView,
        v: ArrayView,
        *,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        user: UserValues | None = None,
    ) -> Any:
        """Attention of the planned batch. Arguments and errors as for the wrappers' `run`; `user` holds a variant's parameters."""
        if (user is None) != (self.options.user_variant is None):
            raise StateError("plan: one of a module with a user variant runs through that module, any other one without a variant")
        if return_lse is not True and return_lse is not False:
            return_lse = check_flag(return_lse, "return_lse")
        scales = self._plain_scales
        if not (q_scale is None and k_scale is None and v_scale is None):
            scales = self._scales(q_scale, k_scale, v_scale)
        if self.device.kind == "cpu":
            return self._run(q, k, v, out, lse, return_lse, scales, None)
        with use_device(self.device.index):
            return self._run(q, k, v, out, lse, return_lse, scales, user)

    def run_again(self, q: Any, k: Any, v: Any, out: Any) -> bool:
        """Run on arrays of CuPy that are laid out as in a run before; False, and nothing done, for any others."""
        found = self._checker.addresses_again(q, k, v, out)
        if found is None:
            return False
        assert isinstance(self._launcher, Fa2Launcher), "no arrays of CuPy fit a plan of the host"
        with use_device(self.device.index):
            self._launcher.launch_at(*found, self._plain_scales)
        return True

    def run_single(self, like: Any, q: ArrayView, k: ArrayView, v: ArrayView, out: Any, lse: Any, scales: dict[str, Any]) -> Any:
        """Run on one query token whose outputs lack the token dimension, and hand them back as the array type of `like`."""
        output = as_view(out, "out")
        scores = None if lse is None else as_view(lse, "lse")
        with_token = output._replace(shape=(1, *output.shape), strides=(0, *output.strides))
        lse_with_token = None if scores is None else scores._replace(shape=(1, *scores.shape), strides=(0, *scores.strides))
        self.run(q, k, v, out=with_token, lse=lse_with_token, **scales)
        out = hand_back(out, like)
        return out if lse is None else (out, hand_back(lse, like))

    def _run(
        self, q: Any, k: ArrayView, v: ArrayView, out: Any, lse: Any, return_lse: bool, scales: RunScales, user: UserValues | None
    ) -> Any:
        made_out, made_lse = out is None, lse is None
        arrays, out, lse = self._checker.check(q, k, v, out, lse, return_lse)
        if (scales is not self._plain_scales or user is not None) and not (made_out and made_lse):
            self._check_others(arrays, scales, user)
        if user is None:
            self._launcher.launch(arrays, scales)
            if not made_out:
                self._checker.remember(arrays)
        else:
            assert isinstance(self._launcher, Fa2Launcher), "variants are planned for GPUs only"
            self._launcher.launch(arrays, scales, user.packed)
            release_after_work(user.views)
        if arrays.foreign:
            out = hand_back(out, q) if made_out else out
            lse = hand_back(lse, q) if made_lse and lse is not None else lse
            release_after_work([view for view in arrays[:5] if view is not None and view.producer not in OWN_PRODUCERS])
        if scales is not self._plain_scales:
            release_after_work([scale for scale in scales[1:] if isinstance(scale, ArrayView)])
        return (out, lse) if return_lse else out

    def _check_others(self, arrays: RunArrays, scales: RunScales, user: UserValues | None) -> None:
        """Refuse given outputs that lie over arrays of factors or of a user variant."""
        others: dict[str, ArrayView] = {}
        if user is not None and self.options.user_variant is not None:
            others |= zip((name for name, _ in self.options.user_variant.tensors), user.views, strict=True)
        others |= {name: one for name, one in zip(("k_scale", "v_scale", "q_scale"), scales[1:], strict=True) if isinstance(one, ArrayView)}
        if others:
            self._checker.check_others(arrays, others)

    def _scales(self, q_scale: Any, k_scale: Any, v_scale: Any) -> RunScales:
        per_head = self._per_head(q_scale, "q_scale", self.options.num_qo_heads)
        if per_head is not None and not self.options.fp8_queries:
            raise ArgumentError(f"q_scale: got an array, {self.options.q_dtype} queries take one float; fp8 ones may have one per head")
        sm_scale = self.options.sm_scale * (1.0 if q_scale is None or per_head is not None else check_positive(q_scale, "q_scale"))
        if sm_scale > FLOAT32_MAX:
            raise ArgumentError(f"q_scale: got {q_scale}; times sm_scale = {self.options.sm_scale} it is beyond the range of float32")
        scales = RunScales(sm_scale, self._scale(k_scale, "k_scale"), self._scale(v_scale, "v_scale"), per_head)
        if not isinstance(scales.k_scale, ArrayView) and sm_scale * scales.k_scale > FLOAT32_MAX:
            raise ArgumentError(f"k_scale: got {k_scale}; times the factors of q, {sm_scale}, it is beyond the range of float32")
        return scales

    def _scale(self, value: Any, argument: str) -> float | ArrayView:
        if value is None:
            return 1.0
        view = self._per_head(value, argument, self.options.num_kv_heads)
        if view is None:
            return check_positive(value, argument) if argument == "k_scale" else check_float32(value, argument)
        return view

    def _per_head(self, value: Any, argument: str, num_heads: int) -> ArrayView | None:
        """An array of one factor per head; None when the value is no such array."""
        if not hasattr(value, "__dlpack__") or getattr(value, "ndim", 1) == 0:
            return None
        view = per_head_scale(as_view(value, argument), argument, num_heads)
        if view.device != self.device:
            raise ArgumentError(f"{argument}: lies on {view.device}, the plan is for {self.device}")
        return view


def _read_in_place(request: AttentionRequest) -> tuple[PlanMemory, ...]:
    """The caller's contiguous arrays that every run of a plan reads where they are."""
    if request.pages.on_device is None and not request.values.device:
        return ()
    views = dict(request.values.device)
    if request.pages.on_device is not None and not request.pages.copied:
        views["indices" if request.options.decode else "paged_kv_indices"] = request.pages.on_device
    return tuple((view.ptr, view.ptr + num_bytes(view), name) for name, view in views.items())


def plan_attention(request: AttentionRequest, workspaces: Workspaces, profile: DeviceProfile | None = None) -> Plan:
    """Schedule a batch, place it in the workspaces, and queue the upload of its records on CuPy's current stream.

    Kernels are compiled and loaded here. Host arrays in, there is no synchronisation.

    Args:
        request: the batch.
        workspaces: where to place it; their device decides the backend.
        profile: the GPU to plan for, by default the one that holds the workspaces.

    Raises:
        WorkspaceError: a workspace is too small or missing. Nothing was written.
        BackendUnavailable: the workspaces' GPU cannot run kernels of `profile`.
        StateError: the stream is being captured.
    """
    device = workspaces.device
    if device.kind != "cuda" and request.options.user_variant is not None:
        raise BackendUnavailable(f"workspaces: lie on {device}; user variants are CUDA source and need a GPU")
    if device.kind == "cuda":
        own = read_profile(device.index)
        stream, capturing = current_stream_state(device.index)
        if capturing:
            raise StateError(f"plan: CuPy's current stream of {device} is being captured, and a plan cannot be part of a CUDA graph")
        if profile is not None and profile.arch != own.arch:
            raise BackendUnavailable(f"profile: {profile.name} has kernels of {profile.arch}, the workspaces lie on a GPU of {own.arch}")
        profile = own if profile is None else profile
    draft = request.draft(HOST_PROFILE if profile is None else profile)
    info = draft.place(*workspaces.allocators(draft))
    if request.graph_limits is not None:
        _check_launch(request, draft.shape.backend, info)
    if request.pages.on_device is not None or request.values.device:
        _check_on_device(request, device)
    if device.kind == "cpu":
        return _plan_on_host(request, draft, info, workspaces)
    return _plan_on_gpu(request, draft, info, workspaces, own, stream)


def _check_launch(request: AttentionRequest, backend: str, info: PlanInfo) -> None:
    """Note what a captured run holds of its plan; refuse a later plan for the same CUDA graph that differs in it."""
    now = {"backend": backend, **{name: getattr(info, name) for name in _CAPTURED}}
    first = request.graph_launch
    if not first:
        first.update(now)
    for name, value in now.items():
        if value != first[name]:
            raise ArgumentError(f"plan: {name} is {value}, but {first[name]} in the first plan of this object's CUDA graph, which keeps it")


def _check_on_device(request: AttentionRequest, device: Device) -> None:
    given = dict(request.values.device)
    if request.pages.on_device is not None:
        given["indices"] = request.pages.on_device
    for name, view in given.items():
        if view.device != device:
            raise ArgumentError(f"{name}: lies on {view.device}, the workspaces on {device}")


def _fill(request: AttentionRequest, draft: PlanDraft, info: PlanInfo, records: npt.NDArray[np.uint8]) -> None:
    """Write everything the int workspace holds to its beginning, `records`, which may be longer than the plan needs."""
    draft.write_records(info, records)
    pages = request.pages.on_host
    if pages is not None:
        np.ndarray(len(pages), np.int32, records, info.page_indices_offset)[:] = pages
    if request.values.blocks:
        request.values.write(records[info.values_offset :])


def _plan_on_host(request: AttentionRequest, draft: PlanDraft, info: PlanInfo, workspaces: Workspaces) -> Plan:
    floats, ints = (np.empty(0, np.uint8) if buffer is None else buffer for buffer in (workspaces.float_bytes, workspaces.int_bytes))
    _fill(request, draft, info, ints)
    options = request.options
    offsets = request.values.offsets()

    def value(name: str, dtype: Any) -> Any:
        if name not in offsets:
            return None
        begin = info.values_offset + offsets[name]
        return ints[begin : begin + request.values.blocks[name].nbytes].view(dtype)

    pages = None
    if request.pages.on_host is not None:
        pages = ints[info.page_indices_offset : info.page_indices_offset + request.pages.on_host.nbytes].view(np.int32)
    fixed = {
        "page_indices": pages,
        "causal": options.causal,
        "window_left": options.window_left,
        "logits_soft_cap": options.logits_soft_cap,
        "pos_encoding": options.pos_encoding_mode,
        "rope_scale": options.rope_scale,
        "rope_theta": options.rope_theta,
        "alibi_slopes": value("alibi_slopes", np.float32),
        "sinks": value("sinks", np.float32),
        "mask": value("mask", np.uint8),
    }
    heads_first = request.kv_layout == "HND"
    launcher = HostLauncher(info, floats, ints, fixed, options.q_dtype, options.kv_dtype, heads_first, options.head_dim_vo)
    return Plan(request, info, "host", CPU_DEVICE, launcher, workspaces.memory(info))


def _planned_kernel(
    options: AttentionOptions, backend: str, info: PlanInfo, custom_mask: bool, profile: DeviceProfile, device_id: int
) -> Fa2Kernel:
    """The kernel of a plan, loaded once for the same options; what follows from the options alone is in its parameters already."""
    key = (backend, info.cta_tile_q, info.kv_tile, custom_mask, device_id)
    kernel: Fa2Kernel | None = options.by_kernel.get(key)
    if kernel is None:
        group_size = options.num_qo_heads // options.num_kv_heads
        fields = {
            "num_qo_heads": options.num_qo_heads,
            "num_kv_heads": options.num_kv_heads,
            "group_size": group_size,
            "page_size": options.page_size,
            "by_group_size": divisor(group_size),
            "by_num_kv_heads": divisor(options.num_kv_heads),
            "by_page_size": divisor(options.page_size),
            "causal": options.causal,
            "window_left": options.window_left,
            "logits_soft_cap": options.logits_soft_cap,
            "rope_rcp_scale": 1 / options.rope_scale,
            "rope_log2_theta": np.log2(options.rope_theta),
        }
        make = Fa3Kernel if backend == "fa3" else Fa2Kernel
        variant = options.variant(info.cta_tile_q, custom_mask, backend, info.kv_tile if backend == "fa3" else None)
        kernel = options.by_kernel[key] = make(variant, profile, device_id, fields, options.plain_scales)
    return kernel


def _plan_on_gpu(
    request: AttentionRequest, draft: PlanDraft, info: PlanInfo, workspaces: Workspaces, profile: DeviceProfile, stream: int
) -> Plan:
    device, values = workspaces.device, request.values
    backend = draft.shape.backend
    kernel = _planned_kernel(request.options, backend, info, values.mask_begin is not None, profile, device.index)
    floats, ints = workspaces.float_address, workspaces.int_address
    pages, copied = request.pages.on_device, request.pages.copied
    addresses = tuple_new(
        PlanAddresses,
        (
            ints + info.tiles_offset,
            ints + info.cta_work_offset,
            ints + info.merge_groups_offset,
            pages.ptr if pages is not None and not copied else ints + info.page_indices_offset if info.page_indices_offset >= 0 else 0,
            floats + info.partial_o_offset,
            floats + info.partial_lse_offset,
        ),
    )
    per_head = {} if values is NO_VALUES else values.addresses(ints + info.values_offset)
    make = Fa3Launcher if isinstance(kernel, Fa3Kernel) else Fa2Launcher
    num_entries = request.pages.num_entries
    steps = draft.counts.num_tiles, info.unit_step, num_entries, num_entries // max(1, info.num_tiles)
    launcher = make(kernel, addresses, steps, per_head, info.num_ctas, (workspaces, request.pages, values))  # type: ignore[arg-type]
    if info.int_bytes:
        launcher.upload(partial(_fill, request, draft, info), info.int_bytes, ints, stream)
    if pages is not None and copied:
        launcher.copy(pages.ptr, 4 * request.pages.num_entries, addresses.page_indices)
    return Plan(request, info, backend, device, launcher, workspaces.memory(info))
