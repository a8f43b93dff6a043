# SPDX-License-Identifier: Apache-2.0
"""Checks the arrays of a run against its plan, and names every mismatch."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from cupyinfer.attention.options import AttentionOptions
from cupyinfer.backends.arrays import OWN_PRODUCERS, ROW_ALIGNMENT, KvStrides, RunArrays, check_row_alignment, row_strides
from cupyinfer.dtypes import FP8_TYPES, itemsize
from cupyinfer.errors import ArgumentError, ArgumentTypeError, StateError
from cupyinfer.interop import ArrayView, Device, as_view, element_type, empty_output, memory_is_shared, overlaps_itself, require_writable
from cupyinfer.schedule.plan_info import PlanInfo

_CacheViews = tuple[ArrayView, ArrayView]
#: What errors call K and V: they begin with the argument of `run`.
_PAGED_NAMES = "paged_kv_cache (K)", "paged_kv_cache (V)"
_RAGGED_NAMES = "k", "v"


def cache_views(cache: Any, kv_layout: str) -> _CacheViews:
    """The K and V caches of a ``(k_cache, v_cache)`` pair, or of one 5-dimensional array with K and V along its second dimension.

    Raises:
        ArgumentTypeError: neither.
        ArgumentError: another number of dimensions.
    """
    if isinstance(cache, (tuple, list)) and not isinstance(cache, ArrayView):
        if len(cache) != 2:
            raise ArgumentTypeError(f"paged_kv_cache: got {len(cache)} arrays, expected a pair (k_cache, v_cache) or one 5-D array")
        views = k, v = as_view(cache[0], _PAGED_NAMES[0]), as_view(cache[1], _PAGED_NAMES[1])
        if len(k.shape) == 4 == len(v.shape):
            return views
    else:
        both = as_view(cache, "paged_kv_cache")
        if len(both.shape) != 5 or both.shape[1] != 2:
            raise ArgumentError(f"paged_kv_cache: one array has shape {both.shape}, expected [num_pages, 2, ...] in {kv_layout} order")
        k = both._replace(shape=(both.shape[0], *both.shape[2:]), strides=(both.strides[0], *both.strides[2:]))
        views = k, k._replace(ptr=k.ptr + both.strides[1] * _itemsize(both.dtype))
    for view, name in zip(views, _PAGED_NAMES, strict=True):
        if len(view.shape) != 4:
            raise ArgumentError(f"{name}: got shape {view.shape}, expected four dimensions in {kv_layout} order")
    return views


@cache
def _itemsize(dtype: str) -> int:
    return int(element_type(dtype).itemsize)


def num_bytes(view: ArrayView) -> int:
    """Bytes from the first element of an array without negative strides to past its last, gaps included."""
    if 0 in view.shape:
        return 0
    return (1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))) * _itemsize(view.dtype)


#: The part of a workspace, or another contiguous array, that a plan uses: the addresses where it begins and ends, equal when it uses
#: none, and a name for messages.
PlanMemory = tuple[int, int, str]


class CheckedArrays(NamedTuple):
    """Arrays that fit a plan's options, as one value, since runs may come from several threads.

    Attributes:
        seen: shape, strides, element type and device of q, k, v and out (None: it is made).
        strides: all steps in the order of the kernel's parameters.
        reach: bytes that q, k, v and out reach over.
    """

    seen: tuple[Any, ...] | None
    strides: tuple[int, ...]
    reach: tuple[int, ...]


_NOTHING_CHECKED = CheckedArrays(None, (), ())


class KeptArrays:
    """What the last run of some options had, in one layout of the cache and on one device: as views, and as CuPy arrays say it."""

    __slots__ = ("last", "last_cupy")

    def __init__(self) -> None:
        self.last = self.last_cupy = _NOTHING_CHECKED


def kept_arrays(kept: dict[tuple[str, str, int], KeptArrays], kv_layout: str, device: Device) -> KeptArrays:
    """Those of a layout and device."""
    key = kv_layout, device.kind, device.index
    return kept.get(key) or kept.setdefault(key, KeptArrays())


def _cupy_layout(q: Any, k: Any, v: Any, out: Any) -> tuple[Any, ...]:
    """Everything of CuPy arrays that checks look at, but their addresses."""
    return (
        type(q),
        *(q.shape, k.shape, v.shape, out.shape, q.strides, k.strides, v.strides, out.strides, q.dtype, k.dtype, v.dtype, out.dtype),
        *(q.data.device_id, k.data.device_id, v.data.device_id, out.data.device_id),
    )


#: Those of the float and of the int workspace.
PlanMemories = tuple[PlanMemory, PlanMemory]


class ArrayChecker:
    """Checks the arrays of runs of one plan.

    Shapes that its last run had are not checked again, and those that the last run of another plan of the same options had only
    against the batch.

    Args:
        options: what was planned.
        info: the plan.
        kv_layout: "NHD" or "HND".
        device: where the plan runs.
        max_page: largest page id where the host knows it, else -1.
        memory: the workspaces, which a run must not write over as outputs.
        held: the caller's arrays that runs read though they are not given them, likewise.
        kv_names: what errors call K and V, by default the arguments of `run`.
    """

    def __init__(
        self,
        options: AttentionOptions,
        info: PlanInfo,
        kv_layout: str,
        device: Device,
        max_page: int,
        memory: PlanMemories,
        held: tuple[PlanMemory, ...] = (),
        kv_names: tuple[str, str] | None = None,
    ) -> None:
        self._options = options
        self._info = info
        self._kv_layout = kv_layout
        self._device = device
        self._max_page = max_page
        self._memory, self._held = memory, held
        (self._float_begin, self._float_end, _), (self._int_begin, self._int_end, _) = memory
        self._kv_names = kv_names or (_PAGED_NAMES if options.paged else _RAGGED_NAMES)
        # What the last run of any plan of these options brought, and the last one of this plan.
        self._kept = kept_arrays(options.checked_arrays, kv_layout, device)
        self._last = _NOTHING_CHECKED
        # The same of CuPy arrays as those say it, and whether this plan has seen them.
        self._last_cupy, self._is_new = self._kept.last_cupy, True

    def check(self, q: Any, k: ArrayView, v: ArrayView, out: Any, lse: Any, return_lse: bool) -> tuple[RunArrays, Any, Any]:
        """Return the arrays of a run, the output and the LSE array; the latter two are made if None was given.

        Raises:
            ArgumentError, ArgumentTypeError: an array that does not fit the plan, by name.
            StateError: arrays of another batch than the planned one.
        """
        query = as_view(q, "q")
        output = None if out is None else as_view(out, "out")
        seen = (query[1:5], k[1:5], v[1:5], None if output is None else output[1:5])
        last_seen, strides, reach = self._last
        if seen != last_seen:
            self._last = _, strides, reach = self._checked(seen, query, k, v, output)
        given = output is not None
        if output is None:
            out = empty_output((*query.shape[:2], self._options.head_dim_vo), self._options.o_dtype, self._device)
            output = as_view(out, "out")
        elif not output.writable:
            require_writable(output, "out")
        q_at, k_at, v_at, o_at = query.ptr, k.ptr, v.ptr, output.ptr
        if (q_at | k_at | v_at | o_at) % ROW_ALIGNMENT:
            for view, name in ((query, "q"), (k, self._kv_names[0]), (v, self._kv_names[1]), (output, "out")):
                check_row_alignment(view, name)
        scores = None
        if lse is not None:
            scores = as_view(lse, "lse")
            self._check_lse(scores, query)
            begin, end = scores.ptr, scores.ptr + 4 * scores.shape[0] * scores.shape[1]
            if self._is_near(begin, end, q_at, k_at, v_at, reach) or (begin < o_at + reach[3] and o_at < end):
                self._check_apart(scores, "lse", (query, k, v, output))
        elif return_lse:
            lse = empty_output(query.shape[:2], "float32", self._device)
            scores = as_view(lse, "lse")
        if given and self._is_near(o_at, o_at + reach[3], q_at, k_at, v_at, reach):
            self._check_apart(output, "out", (query, k, v))
        own = OWN_PRODUCERS
        foreign = (
            query.producer not in own
            or k.producer not in own
            or v.producer not in own
            or output.producer not in own
            or (scores is not None and scores.producer not in own)
        )
        return RunArrays(query, k, v, output, scores, strides, foreign), out, lse

    def remember(self, arrays: RunArrays) -> None:
        """Note the layout of checked arrays for `addresses_again`, where all are CuPy's and none is part of a larger one."""
        if self._last_cupy.strides is arrays.strides or arrays.foreign or arrays.q.producer != "cupy":
            return
        views = arrays[:4]
        owners: list[Any] = [view.owner for view in views]
        kind = type(owners[0])
        if all(type(owner) is kind and owner.shape == view.shape for owner, view in zip(owners, views, strict=True)):
            reach = num_bytes(views[0]), num_bytes(views[1]), num_bytes(views[2]), num_bytes(views[3])
            self._last_cupy = self._kept.last_cupy = CheckedArrays(_cupy_layout(*owners), arrays.strides, reach)

    def addresses_again(self, q: Any, k: Any, v: Any, out: Any) -> tuple[tuple[int, ...], tuple[Any, ...], tuple[int, ...]] | None:
        """Addresses, shapes and strides, as a launch takes them, of CuPy arrays that are laid out as those of a run before.

        None for all others, and also where addresses alone do not tell that a run may write there: `check` looks closer.

        Raises:
            ArgumentError, StateError: as `check`, for a plan's first run on arrays that fit another plan of these options.
        """
        layout, strides, reach = self._last_cupy
        if layout is None or not layout[0] is type(q) is type(k) is type(v) is type(out) or _cupy_layout(q, k, v, out) != layout:
            return None
        if self._is_new:
            self._check_batch(q, k, v)
            self._is_new = False
        q_at, k_at, v_at, o_at = q.data.ptr, k.data.ptr, v.data.ptr, out.data.ptr
        if (q_at | k_at | v_at | o_at) % ROW_ALIGNMENT or self._is_near(o_at, o_at + reach[3], q_at, k_at, v_at, reach):
            return None
        return (q_at, k_at, v_at, o_at, 0), layout[1:5], strides

    def _checked(self, seen: tuple[Any, ...], q: ArrayView, k: ArrayView, v: ArrayView, out: ArrayView | None) -> CheckedArrays:
        """Check arrays that this plan has not seen. Whether they fit its options, the last run of another plan may have found out."""
        kept = self._kept.last
        if seen == kept.seen:
            self._check_batch(q, k, v)
        else:
            kept = self._kept.last = CheckedArrays(seen, *self._check_all(q, k, v, out))
        return kept

    def _check_all(self, q: ArrayView, k: ArrayView, v: ArrayView, out: ArrayView | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Check everything; returns strides and reach as CheckedArrays has them."""
        self._check_query(q)
        k_name, v_name = self._kv_names
        kv_strides = *self._check_cache(k, k_name, self._options.head_dim_qk), *self._check_cache(v, v_name, self._options.head_dim_vo)
        if k.shape[:-1] != v.shape[:-1]:
            raise ArgumentError(f"{v_name}: got shape {v.shape}, {k_name} has {k.shape}; they may differ in the last dimension only")
        self._check_batch(q, k, v)
        head_dim_vo = self._options.head_dim_vo
        if out is None:  # then it will be made, and contiguous
            out_strides, out_bytes = (q.shape[1] * head_dim_vo, head_dim_vo), 2 * q.shape[0] * q.shape[1] * head_dim_vo
        else:
            self._check_output(out, q)
            out_strides, out_bytes = (out.strides[0], out.strides[1]), num_bytes(out)
        return (*q.strides[:2], *kv_strides, *out_strides), (num_bytes(q), num_bytes(k), num_bytes(v), out_bytes)

    def _check_batch(self, q: Any, k: Any, v: Any) -> None:
        """Check that arrays which fit the options are as long as the planned batch needs."""
        info, num_tokens = self._info, q.shape[0]
        # A CUDA graph's arrays are as long as its largest batch.
        if num_tokens < info.num_qo_tokens or (num_tokens > info.num_qo_tokens and not info.cuda_graph):
            raise StateError(f"q: has {num_tokens} query tokens, the planned batch has {info.num_qo_tokens}")
        at = 0 if self._options.paged or self._kv_layout == "NHD" else 1
        for view, name in ((k, self._kv_names[0]), (v, self._kv_names[1])):
            if self._options.paged:
                if view.shape[0] <= self._max_page:
                    raise ArgumentError(f"{name}: has {view.shape[0]} pages, the page table refers to page {self._max_page}")
            elif view.shape[at] < info.num_kv_entries:
                raise StateError(f"{name}: has {view.shape[at]} keys, the planned batch has {info.num_kv_entries}")

    def _is_near(self, begin: int, end: int, q_at: int, k_at: int, v_at: int, reach: tuple[int, ...]) -> bool:
        """Whether addresses alone do not tell that a range is apart from what the run reads and from its plan. This is in every run."""
        return (
            (begin < q_at + reach[0] and q_at < end)
            or (begin < k_at + reach[1] and k_at < end)
            or (begin < v_at + reach[2] and v_at < end)
            or (begin < self._float_end and self._float_begin < end)
            or (begin < self._int_end and self._int_begin < end)
            or (bool(self._held) and any([begin < held_end and held < end for held, held_end, _ in self._held]))
        )

    def _check_apart(self, written: ArrayView, name: str, others: tuple[ArrayView, ...]) -> None:
        """Refuse to write over what the run reads, or over its plan."""
        begin, end = written.ptr, written.ptr + num_bytes(written)
        for other, other_name in zip(others, ("q", *self._kv_names, "out"), strict=False):
            if begin < other.ptr + num_bytes(other) and other.ptr < end and memory_is_shared(written, other):
                raise ArgumentError(f"{name}: shares memory with {other_name}; a run would write over what it reads or writes")
        for held, held_end, held_name in (*self._memory, *self._held):
            if begin < held_end and held < end:
                raise ArgumentError(f"{name}: shares memory with {held_name}; a run would write over its plan or partial results")

    def check_others(self, arrays: RunArrays, others: dict[str, ArrayView]) -> None:
        """Refuse outputs over further arrays that a run is given: per-head factors, and tensors of a user variant."""
        for written, name in ((arrays.o, "out"), (arrays.lse, "lse")):
            if written is None:
                continue
            begin, end = written.ptr, written.ptr + num_bytes(written)
            for other_name, other in others.items():
                if begin < other.ptr + num_bytes(other) and other.ptr < end and memory_is_shared(written, other):
                    raise ArgumentError(f"{name}: shares memory with {other_name}; a run would write over what it reads or writes")

    def _check_device(self, view: ArrayView, name: str) -> None:
        if view.device != self._device:
            raise ArgumentError(f"{name}: lies on {view.device}, the plan is for {self._device}")

    def _check_query(self, q: ArrayView) -> None:
        options = self._options
        allowed = (options.q_dtype, "uint8") if options.fp8_queries else (options.q_dtype,)
        if q.dtype not in allowed:
            raise ArgumentTypeError(f"q: got {q.dtype}, the plan is for {' or '.join(allowed)}")
        if len(q.shape) != 3 or q.shape[1:] != (options.num_qo_heads, options.head_dim_qk):
            raise ArgumentError(
                f"q: got shape {q.shape}, expected (num_tokens, num_qo_heads = {options.num_qo_heads}, head_dim = {options.head_dim_qk})"
            )
        self._check_device(q, "q")
        row_strides(q, "q", itemsize(options.q_dtype))

    def _check_cache(self, view: ArrayView, name: str, head_dim: int) -> KvStrides:
        options = self._options
        allowed = (options.kv_dtype, "uint8") if options.kv_dtype in FP8_TYPES else (options.kv_dtype,)
        if view.dtype not in allowed:
            raise ArgumentTypeError(f"{name}: got {view.dtype}, the plan is for {' or '.join(allowed)}")
        self._check_device(view, name)
        bytes_per_element = itemsize(options.kv_dtype)
        if options.paged:
            tokens_first = (options.page_size, options.num_kv_heads)
            expected: tuple[int, ...] = tokens_first if self._kv_layout == "NHD" else tokens_first[::-1]
            if len(view.shape) != 4 or view.shape[1:] != (*expected, head_dim):
                raise ArgumentError(f"{name}: got shape {view.shape}, expected (num_pages, {', '.join(map(str, (*expected, head_dim)))})")
            page, first, second = row_strides(view, name, bytes_per_element)
            return KvStrides(page, first, second) if self._kv_layout == "NHD" else KvStrides(page, second, first)
        tokens_at = 0 if self._kv_layout == "NHD" else 1
        if len(view.shape) != 3 or view.shape[1 - tokens_at] != options.num_kv_heads or view.shape[2] != head_dim:
            order = "(num_keys, num_kv_heads, head_dim)" if tokens_at == 0 else "(num_kv_heads, num_keys, head_dim)"
            raise ArgumentError(f"{name}: got shape {view.shape}, expected {order} with {options.num_kv_heads} heads of width {head_dim}")
        strides = row_strides(view, name, bytes_per_element)
        return KvStrides(0, strides[tokens_at], strides[1 - tokens_at])

    def _check_output(self, out: ArrayView, q: ArrayView) -> None:
        options = self._options
        if out.dtype != options.o_dtype:
            like = " like q" if options.o_dtype == options.q_dtype else ", as the plan says"
            raise ArgumentTypeError(f"out: got {out.dtype}, expected {options.o_dtype}{like}")
        expected = (*q.shape[:2], options.head_dim_vo)
        if out.shape != expected:
            raise ArgumentError(f"out: got shape {out.shape}, expected {expected}")
        self._check_device(out, "out")
        require_writable(out, "out")
        row_strides(out, "out", 2)
        if overlaps_itself(out.shape, out.strides):
            raise ArgumentError(f"out: strides {out.strides} make rows overlap for shape {out.shape}")

    def _check_lse(self, lse: ArrayView, q: ArrayView) -> None:
        if lse.dtype != "float32":
            raise ArgumentTypeError(f"lse: got {lse.dtype}, expected float32")
        if lse.shape != q.shape[:2]:
            raise ArgumentError(f"lse: got shape {lse.shape}, expected {q.shape[:2]}")
        self._check_device(lse, "lse")
        require_writable(lse, "lse")
        contiguous = (lse.shape[1], 1)
        if 0 not in lse.shape and any(
            have != want and size > 1 for have, want, size in zip(lse.strides, contiguous, lse.shape, strict=True)
        ):
            raise ArgumentError(f"lse: got strides {lse.strides}, expected a contiguous array")
