# SPDX-License-Identifier: Apache-2.0
"""The host backend's problem record, and its attention over one segment: rows of a tile times a span of keys, in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupyinfer.errors import ArgumentError

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]

NO_GROUP = -1
LOG2_E = np.float32(1.4426950408889634)
#: Keys whose logits exist at once; bounds memory at long contexts without Python work per key.
_BLOCK_KEYS = 2048


class Tile(NamedTuple):
    """One record of the `tiles` region."""

    request: int
    q_begin: int
    row_begin: int
    num_rows: int
    kv_begin: int
    kv_end: int
    kv_len: int
    kv_base: int
    qo_len: int
    split_group: int
    split_part: int
    mask_begin: int


@dataclass(frozen=True, eq=False)
class HostProblem:
    """Everything one run of the host backend reads and writes.

    Element types: q and o are float16 or bfloat16; k and v are the same or float8_e4m3fn, float8_e5m2. Or q is float8_e4m3fn like k and v.

    Attributes:
        q: [num_tokens, num_qo_heads, head_dim_qk].
        k: paged [num_pages, page_size, num_kv_heads, head_dim_qk] (a view, whatever the layout);
            ragged [num_keys, num_kv_heads, head_dim_qk].
        v: the same with head_dim_vo.
        o: [num_tokens, num_qo_heads, head_dim_vo], written.
        lse: float32 [num_tokens, num_qo_heads], base 2, written; None to leave it out.
        tiles: int32 [num_tiles, 12], a view of the int workspace.
        cta_work: int32 [num_ctas, 8], a view of the int workspace.
        merge_groups: int32 [num_groups, 12], a view of the int workspace; only its first counter is written.
        page_indices: int32 page table; None for ragged k and v.
        partial_o: float32 [num_partial_rows, head_dim_vo], a view of the float workspace, written.
        partial_lse: float32 [num_partial_rows], a view of the float workspace, written.
        cta_tile_q: most packed rows a tile may have.
        kv_tile: keys per iteration.
        unit_step: from one unit of a CTA's share to the next.
        causal: a query sees no key after its own position.
        window_left: keys a query sees to the left of its own position; -1 for no window.
        sm_scale: factor of q . k.
        logits_soft_cap: 0 for none.
        pos_encoding: "NONE", "ROPE_LLAMA" or "ALIBI".
        alibi_slopes: [num_qo_heads]; needed by "ALIBI".
        rope_scale: divisor of rotation angles.
        rope_theta: base of rotation frequencies.
        sinks: [num_qo_heads], natural-log logits that join the denominator only.
        k_scale: factor of k, one value or [num_kv_heads].
        v_scale: factor of v, one value or [num_kv_heads].
        q_scale: factor of q, [num_qo_heads]; None where it is in sm_scale.
        mask: uint8, one packed bit per (query, key) of each request, little-endian within a byte.
    """

    q: npt.NDArray[Any]
    k: npt.NDArray[Any]
    v: npt.NDArray[Any]
    o: npt.NDArray[Any]
    lse: FloatArray | None
    tiles: IntArray
    cta_work: IntArray
    merge_groups: IntArray
    page_indices: IntArray | None
    partial_o: FloatArray
    partial_lse: FloatArray
    cta_tile_q: int
    kv_tile: int
    causal: bool
    window_left: int
    sm_scale: float
    logits_soft_cap: float = 0.0
    pos_encoding: str = "NONE"
    alibi_slopes: FloatArray | None = None
    rope_scale: float = 1.0
    rope_theta: float = 1e4
    sinks: FloatArray | None = None
    k_scale: float | FloatArray = 1.0
    v_scale: float | FloatArray = 1.0
    q_scale: FloatArray | None = None
    mask: npt.NDArray[np.uint8] | None = None
    unit_step: int = 1

    def __post_init__(self) -> None:
        if self.pos_encoding == "ALIBI" and self.alibi_slopes is None:
            raise ArgumentError("alibi_slopes: got None, ALIBI needs one slope per query head")

    @property
    def num_kv_heads(self) -> int:
        """KV heads, from the shape of k."""
        return int(self.k.shape[-2])

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return int(self.q.shape[1]) // self.num_kv_heads

    @property
    def value_type(self) -> np.dtype[Any]:
        """Element type tensor cores multiply in: that of the cache, or float16 for an fp8 cache."""
        return self.k.dtype if self.k.dtype.itemsize == 2 else np.dtype(np.float16)

    def scale_of(self, scale: float | FloatArray, kv_head: int) -> np.float32:
        """The factor of one KV head out of a per-tensor or per-head scale."""
        per_head = np.asarray(scale, np.float32)
        return np.float32(per_head[kv_head] if per_head.ndim else per_head)


def tile_rows(problem: HostProblem, tile: Tile, kv_head: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Token (in q) and query head of each packed row of a unit, [num_rows] each."""
    packed = tile.row_begin + np.arange(tile.num_rows)
    return tile.q_begin + packed // problem.group_size, kv_head * problem.group_size + packed % problem.group_size


def attend(problem: HostProblem, tile: Tile, kv_head: int, key_begin: int, key_end: int) -> tuple[FloatArray, FloatArray]:
    """Attention of a unit's rows over keys [key_begin, key_end) of their request.

    Returns:
        Rows divided by their own denominator, [num_rows, head_dim_vo], and base-2 log-sum-exp, [num_rows].
        A row without visible keys is 0 and -inf.
    """
    tokens, heads = tile_rows(problem, tile, kv_head)
    positions = tile.kv_len - tile.qo_len + (tokens - tile.q_begin)
    first, last = _visible_interval(problem, tile, positions)
    acc: FloatArray = np.zeros((tile.num_rows, problem.v.shape[-1]), np.float32)
    row_max = np.full(tile.num_rows, -np.inf, np.float32)
    row_sum = np.zeros(tile.num_rows, np.float32)
    # Keys no row sees stay unread: there, a weight of 0 would still meet the NaN of an unused slot.
    key_begin = max(key_begin, int(first.min(initial=tile.kv_len)))
    key_end = min(key_end, int(last.max(initial=-1)) + 1)
    if key_begin < key_end:
        q = _rounded(problem, _rotated(problem, problem.q[tokens, heads].astype(np.float32), positions))
    for block_begin in range(key_begin, key_end, _BLOCK_KEYS):
        keys = np.arange(block_begin, min(key_end, block_begin + _BLOCK_KEYS))
        k, v = _gather(problem, tile, kv_head, keys)
        logits = _logits(problem, q, _rounded(problem, _rotated(problem, k, keys)), heads, kv_head)
        if problem.pos_encoding == "ALIBI" and problem.alibi_slopes is not None:
            distance = (keys[None, :] - positions[:, None]).astype(np.float32)
            logits += problem.alibi_slopes[heads].astype(np.float32)[:, None] * distance
        logits *= LOG2_E
        if keys[0] < first.max() or keys[-1] > last.min():
            logits[(keys < first[:, None]) | (keys > last[:, None])] = -np.inf
        if problem.mask is not None:
            logits[~_mask_bits(problem.mask, tile, tokens - tile.q_begin, keys)] = -np.inf
        new_max = np.maximum(row_max, logits.max(axis=1))
        # A row that has seen no key yet would subtract -inf from -inf.
        shift = np.where(new_max == -np.inf, np.float32(0), new_max)
        p = np.exp2(logits - shift[:, None])
        decay = np.exp2(row_max - shift)
        acc = acc * decay[:, None] + _rounded(problem, p) @ v
        row_sum = row_sum * decay + p.sum(axis=1)
        row_max = new_max
    acc /= np.where(row_sum > 0, row_sum, np.float32(1))[:, None]
    return acc, row_max + np.log2(row_sum)


def _visible_interval(
    problem: HostProblem, tile: Tile, positions: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First and last key each row sees, [num_rows] each; the last is below the first for a row that sees none."""
    last = np.full_like(positions, tile.kv_len - 1)
    if problem.causal:
        last = np.minimum(last, positions)
    first = np.zeros_like(positions) if problem.window_left < 0 else np.maximum(0, positions - problem.window_left)
    return first, last


def _gather(problem: HostProblem, tile: Tile, kv_head: int, keys: npt.NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
    """K and V rows of the given keys of a request, as float32 [num_keys, head_dim]."""
    if problem.page_indices is None:
        rows = slice(tile.kv_base + int(keys[0]), tile.kv_base + int(keys[-1]) + 1)
        return problem.k[rows, kv_head].astype(np.float32), problem.v[rows, kv_head].astype(np.float32)
    page_size = problem.k.shape[1]
    pages, slots = problem.page_indices[tile.kv_base + keys // page_size], keys % page_size
    return problem.k[pages, slots, kv_head].astype(np.float32), problem.v[pages, slots, kv_head].astype(np.float32)


def _logits(problem: HostProblem, q: FloatArray, k: FloatArray, heads: npt.NDArray[np.int64], kv_head: int) -> FloatArray:
    scale = np.float32(problem.sm_scale) * problem.scale_of(problem.k_scale, kv_head)
    logits: FloatArray = (q @ k.T) * scale
    if problem.q_scale is not None:
        logits *= problem.q_scale[heads][:, None]
    if problem.logits_soft_cap > 0:
        cap = np.float32(problem.logits_soft_cap)
        logits = cap * np.tanh(logits / cap)
    return logits


def _rotated(problem: HostProblem, x: FloatArray, positions: npt.NDArray[np.int64]) -> FloatArray:
    """Rotary embedding of rows at the given positions; dimension i turns together with i + head_dim / 2."""
    if problem.pos_encoding != "ROPE_LLAMA":
        return x
    half = x.shape[1] // 2
    exponents = np.arange(half, dtype=np.float32) * np.float32(-2.0 / x.shape[1])
    frequencies = np.exp2(exponents * np.float32(np.log2(problem.rope_theta))) * np.float32(1.0 / problem.rope_scale)
    angles = positions.astype(np.float32)[:, None] * frequencies
    cos, sin = np.cos(angles), np.sin(angles)
    low, high = x[:, :half], x[:, half:]
    return np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=1)


def _rounded(problem: HostProblem, x: FloatArray) -> FloatArray:
    """What is left of float32 values once they are operands of a tensor core."""
    return x.astype(problem.value_type).astype(np.float32)


def _mask_bits(
    mask: npt.NDArray[np.uint8], tile: Tile, queries: npt.NDArray[np.int64], keys: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Mask bits of (query, key) pairs of a request, [num_queries, num_keys]."""
    bits = queries[:, None] * tile.kv_len + keys
    visible: npt.NDArray[np.bool_] = (mask[tile.mask_begin + (bits >> 3)] >> (bits & 7).astype(np.uint8) & 1).astype(np.bool_)
    return visible
