# SPDX-License-Identifier: Apache-2.0
"""What a plan fixes besides the batch: heads, widths, element types and the rules of the logits, checked once."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, wraps
from inspect import Signature
from typing import Any, ParamSpec, TypeVar

import numpy as np

from cupyinfer.backends.arrays import RunScales
from cupyinfer.dtypes import FP8_QUERY_TYPE, FP8_TYPES, HALF_TYPES, canonical_dtype, itemsize
from cupyinfer.errors import ArgumentError, ArgumentTypeError
from cupyinfer.jit.user_variant import UserVariant
from cupyinfer.jit.variant import POS_ENCODINGS, AttentionVariant
from cupyinfer.schedule.geometry import check_flag, check_heads, check_int
from cupyinfer.schedule.planner import PlanShape
from cupyinfer.schedule.tiles import check_head_dims
from cupyinfer.schedule.tiling import KeySpan

KV_LAYOUTS = ("NHD", "HND")
MAX_GROUP_SIZE = 64
FLOAT32_MAX = float(np.finfo(np.float32).max)
#: Different sets of options that are kept checked.
MAX_KEPT_OPTIONS = 256

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _kept(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Keep results by arguments and their types (True is no 1 here); arguments that cannot be hashed are checked every time."""
    cached = lru_cache(maxsize=MAX_KEPT_OPTIONS, typed=True)(function)

    @wraps(function, updated=())
    def call(*args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        try:
            return cached(*args, **options)  # type: ignore[arg-type]
        except TypeError:
            pass  # either it cannot be hashed, or the next line says once more what is wrong
        return function(*args, **options)

    call.kept = cached  # type: ignore[attr-defined]
    return call


def check_kv_layout(kv_layout: Any) -> str:
    """Return `kv_layout`; raise ArgumentError unless it is "NHD" or "HND"."""
    if not isinstance(kv_layout, str) or kv_layout not in KV_LAYOUTS:
        raise ArgumentError(f"kv_layout: got {kv_layout!r}, expected 'NHD' or 'HND'")
    return str(kv_layout)


def check_float(value: Any, argument: str) -> float:
    """A finite number; raise ArgumentTypeError or ArgumentError otherwise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(f"{argument}: got {value!r}, expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ArgumentError(f"{argument}: got {value}, must be finite")
    return number


def check_float32(value: Any, argument: str) -> float:
    """A number that float32 can hold; raise ArgumentTypeError or ArgumentError otherwise."""
    checked = check_float(value, argument)
    if abs(checked) > FLOAT32_MAX:
        raise ArgumentError(f"{argument}: got {value}, beyond the range of float32")
    return checked


def check_positive(value: Any, argument: str) -> float:
    """A finite number above zero; raise ArgumentTypeError or ArgumentError otherwise."""
    checked = check_float32(value, argument)
    if checked <= 0:
        raise ArgumentError(f"{argument}: got {value}, must be positive")
    return checked


@dataclass(frozen=True)
class AttentionOptions:
    """Everything a plan fixes besides the batch. Made by `make_options`, which checks it.

    Attributes:
        decode: one query token per request.
        paged: K and V are reached through a page table.
        num_qo_heads: query heads.
        num_kv_heads: KV heads.
        head_dim_qk: width of queries and keys.
        head_dim_vo: width of values and outputs.
        page_size: keys per page, 1 for ragged caches.
        q_dtype: element type of queries, and of outputs unless that is fp8.
        kv_dtype: element type of the cache.
        causal: a query sees no key after its own position.
        window_left: keys it sees to the left of its position, -1 for all.
        sm_scale: factor of ``q . k``.
        logits_soft_cap: 0 for none.
        pos_encoding_mode: "NONE", "ROPE_LLAMA" or "ALIBI".
        rope_scale: divisor of rotation angles.
        rope_theta: base of rotation frequencies.
        fixed_split_size: pages (ragged: keys) per part, or None.
        disable_split_kv: keep every unit in one CTA.
        user_variant: CUDA source that changes the attention, or None.
        o_dtype: element type of outputs.
    """

    decode: bool
    paged: bool
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    page_size: int
    q_dtype: str
    kv_dtype: str
    causal: bool
    window_left: int
    sm_scale: float
    logits_soft_cap: float
    pos_encoding_mode: str
    rope_scale: float
    rope_theta: float
    fixed_split_size: int | None
    disable_split_kv: bool
    user_variant: UserVariant | None = None
    o_dtype: str = ""

    def __post_init__(self) -> None:
        if not self.o_dtype:
            object.__setattr__(self, "o_dtype", self.q_dtype)

    @property
    def fp8_queries(self) -> bool:
        """Whether queries are 8-bit, and so the cache too."""
        return self.q_dtype == FP8_QUERY_TYPE

    @cached_property
    def shape(self) -> PlanShape:
        """What of this the schedule depends on, for fa2."""
        return PlanShape(
            self.decode,
            self.num_qo_heads,
            self.num_kv_heads,
            self.head_dim_qk,
            self.head_dim_vo,
            itemsize(self.kv_dtype),
            self.page_size,
            KeySpan(self.causal, self.window_left),
            self.fixed_split_size,
            self.disable_split_kv,
            transforms_logits=self.logits_soft_cap > 0 or self.pos_encoding_mode != "NONE" or self.user_variant is not None,
        )

    @cached_property
    def fa3_shape(self) -> PlanShape:
        """The same for fa3."""
        return replace(self.shape, backend="fa3")

    @cached_property
    def plain_scales(self) -> RunScales:
        """Factors of runs that do not bring any; always the same object."""
        return RunScales(self.sm_scale, 1.0, 1.0)

    @cached_property
    def by_kernel(self) -> dict[tuple[str, int, int, bool, int], Any]:
        """What the launch backends keep for these options: by backend, rows and keys per tile, custom mask and device."""
        return {}

    @cached_property
    def fa3_problems(self) -> dict[tuple[str, bool], str | None]:
        """What `fa3_problem` found about these options, by arch and whether there is a custom mask."""
        return {}

    @cached_property
    def checked_arrays(self) -> dict[tuple[str, str, int], Any]:
        """What the last run of these options brought, by layout of the cache and device; see `ArrayChecker`."""
        return {}

    def variant(self, cta_tile_q: int, custom_mask: bool, backend: str = "fa2", kv_tile: int | None = None) -> AttentionVariant:
        """The kernel that serves this; `kv_tile` is for fa3."""
        return AttentionVariant(
            self.q_dtype,
            self.kv_dtype,
            self.head_dim_qk,
            self.head_dim_vo,
            cta_tile_q,
            self.paged,
            custom_mask,
            self.logits_soft_cap > 0,
            self.pos_encoding_mode,
            self.user_variant,
            backend,
            kv_tile,
            self.o_dtype,
        )


def _check_rope(rope_scale: float, rope_theta: float) -> None:
    """Refuse rotations whose angles float32 cannot hold at every position: they would make every output NaN."""
    slowest = FLOAT32_MAX / 2**31
    if 1 / rope_scale > slowest:
        raise ArgumentError(f"rope_scale: got {rope_scale}, its reciprocal times a position is beyond the range of float32")
    if max(1.0, 1 / rope_theta) / rope_scale > slowest:
        raise ArgumentError(f"rope_theta: got {rope_theta} with rope_scale {rope_scale}, angles are beyond the range of float32")


@_kept
def make_options(
    decode: bool,
    paged: bool,
    num_qo_heads: Any,
    num_kv_heads: Any,
    head_dim_qk: Any,
    head_dim_vo: Any = None,
    page_size: Any = 1,
    q_data_type: Any = "float16",
    kv_data_type: Any = None,
    causal: Any = False,
    window_left: Any = -1,
    sm_scale: Any = None,
    logits_soft_cap: Any = None,
    pos_encoding_mode: Any = "NONE",
    rope_scale: Any = None,
    rope_theta: Any = None,
    fixed_split_size: Any = None,
    disable_split_kv: Any = False,
    o_data_type: Any = None,
) -> AttentionOptions:
    """Check a plan's arguments and fill in defaults: ``sm_scale = 1 / sqrt(head_dim_qk)``, rope_scale 1, rope_theta 10000.

    Raises:
        ArgumentError: a value out of range or an unsupported head_dim; the message lists what is supported.
        ArgumentTypeError: a value of the wrong kind, or an element type that is not supported.
    """
    num_qo_heads = check_int(num_qo_heads, "num_qo_heads", 1)
    num_kv_heads = check_int(num_kv_heads, "num_kv_heads", 1)
    group_size = check_heads(num_qo_heads, num_kv_heads)
    if group_size > MAX_GROUP_SIZE:
        raise ArgumentError(f"num_qo_heads: got {num_qo_heads} for {num_kv_heads} KV heads, at most {MAX_GROUP_SIZE} query heads share one")
    head_dim_qk = check_int(head_dim_qk, "head_dim", 1)
    head_dim_vo = head_dim_qk if head_dim_vo is None else check_int(head_dim_vo, "head_dim_vo", 1)
    check_head_dims(head_dim_qk, head_dim_vo)
    q_dtype, kv_dtype, o_dtype = _element_types(decode, q_data_type, kv_data_type, o_data_type)
    if not isinstance(pos_encoding_mode, str) or pos_encoding_mode not in POS_ENCODINGS:
        raise ArgumentError(f"pos_encoding_mode: got {pos_encoding_mode!r}, expected one of {', '.join(POS_ENCODINGS)}")
    window_left = check_int(window_left, "window_left", -1)
    cap = 0.0 if logits_soft_cap is None else check_float32(logits_soft_cap, "logits_soft_cap")
    if cap < 0:
        raise ArgumentError(f"logits_soft_cap: got {cap}, must not be negative; 0 or None is no cap")
    scale = 1 / math.sqrt(head_dim_qk) if sm_scale is None else check_positive(sm_scale, "sm_scale")
    rope = {
        "rope_scale": 1.0 if rope_scale is None else check_positive(rope_scale, "rope_scale"),
        "rope_theta": 1e4 if rope_theta is None else check_positive(rope_theta, "rope_theta"),
    }
    _check_rope(rope["rope_scale"], rope["rope_theta"])
    options = AttentionOptions(
        decode=decode,
        paged=paged,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        page_size=check_int(page_size, "page_size", 1),
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        causal=check_flag(causal, "causal"),
        window_left=window_left,
        sm_scale=scale,
        logits_soft_cap=cap,
        pos_encoding_mode=pos_encoding_mode,
        fixed_split_size=int(fixed_split_size) if isinstance(fixed_split_size, np.integer) else fixed_split_size,
        disable_split_kv=check_flag(disable_split_kv, "disable_split_kv"),
        rope_scale=rope["rope_scale"],
        rope_theta=rope["rope_theta"],
        o_dtype=o_dtype,
    )
    options.shape  # noqa: B018 - checks the split arguments
    return options


def _element_types(decode: bool, q_data_type: Any, kv_data_type: Any, o_data_type: Any) -> tuple[str, str, str]:
    """Types of queries, cache and outputs, each as it defaults to."""
    q_dtype = canonical_dtype(q_data_type, "q_data_type", HALF_TYPES if decode else (*HALF_TYPES, FP8_QUERY_TYPE))
    kv_dtype = q_dtype if kv_data_type is None else canonical_dtype(kv_data_type, "kv_data_type", (*HALF_TYPES, *FP8_TYPES))
    if q_dtype == FP8_QUERY_TYPE:
        if kv_dtype != q_dtype:
            raise ArgumentTypeError(f"kv_data_type: got {kv_dtype} for {q_dtype} queries; they need a cache of their own type")
        if o_data_type is None:
            raise ArgumentTypeError(f"o_data_type: got None for {q_dtype} queries, whose outputs are {' or '.join(HALF_TYPES)}; name one")
        return q_dtype, kv_dtype, canonical_dtype(o_data_type, "o_data_type", HALF_TYPES)
    if kv_dtype in HALF_TYPES and kv_dtype != q_dtype:
        raise ArgumentTypeError(f"kv_data_type: got {kv_dtype} for {q_dtype} queries; a 16-bit cache has the queries' type")
    if o_data_type is not None and canonical_dtype(o_data_type, "o_data_type", HALF_TYPES) != q_dtype:
        raise ArgumentTypeError(f"o_data_type: got {o_data_type} for {q_dtype} queries, whose outputs are {q_dtype} too")
    return q_dtype, kv_dtype, q_dtype


def _named_only(signature: Signature) -> Signature:
    return signature.replace(parameters=[one.replace(kind=one.KEYWORD_ONLY) for one in signature.parameters.values()])


# Those who pass options on take them by name only; taking them by position too is for the sake of time.
make_options.__signature__ = _named_only(inspect.signature(make_options))  # type: ignore[attr-defined]


@_kept
def with_user_variant(options: AttentionOptions, user_variant: UserVariant) -> AttentionOptions:
    """The same options under a user's variant; the same object for the same arguments, since backends keep kernels in it."""
    return replace(options, user_variant=user_variant)
