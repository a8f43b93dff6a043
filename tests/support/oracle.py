# SPDX-License-Identifier: Apache-2.0
"""What attention is: a float64 oracle, and the same formula in low precision to say how much error is honest.

Nothing here knows the library: inputs are plain arrays per request, so a mistake in planning, paging or packing cannot cancel out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_LOG2_E = 1.0 / np.log(2.0)


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """Everything besides q, k and v that changes a result. See `attention_oracle` for the formula.

    Attributes:
        causal: query i of a request sits at kv_len - qo_len + i and sees no key after that position.
        window_left: keys seen to the left of that position, -1 for all.
        sm_scale: factor of q . k; None for 1 / sqrt(head_dim_qk).
        logits_soft_cap: 0 for none.
        pos_encoding: "NONE", "ROPE_LLAMA" or "ALIBI".
        alibi_slopes: [num_qo_heads].
        rope_scale: divisor of rotation angles.
        rope_theta: base of rotation frequencies.
        sinks: [num_qo_heads], natural-log logits.
        q_scale: one factor or [num_qo_heads].
        k_scale: one factor or [num_kv_heads].
        v_scale: one factor or [num_kv_heads].
    """

    causal: bool = False
    window_left: int = -1
    sm_scale: float | None = None
    logits_soft_cap: float = 0.0
    pos_encoding: str = "NONE"
    alibi_slopes: Array | None = None
    rope_scale: float = 1.0
    rope_theta: float = 1e4
    sinks: Array | None = None
    q_scale: float | Array = 1.0
    k_scale: float | Array = 1.0
    v_scale: float | Array = 1.0


def attention_oracle(
    q: Array,
    qo_lens: Sequence[int],
    keys: Sequence[Array],
    values: Sequence[Array],
    options: AttentionOptions,
    masks: Sequence[Array] | None = None,
) -> tuple[Array, Array]:
    """Attention of a batch in float64, one (request, query head) at a time.

    Args:
        q: [num_tokens, num_qo_heads, head_dim_qk], the requests' tokens one after the other.
        qo_lens: query tokens of each request.
        keys: per request [kv_len, num_kv_heads, head_dim_qk].
        values: per request [kv_len, num_kv_heads, head_dim_vo].
        options: what changes the result.
        masks: per request bool [qo_len, kv_len]; a key is seen where it is true and causal and window allow it too.

    Returns:
        o [num_tokens, num_qo_heads, head_dim_vo] and base-2 log-sum-exp [num_tokens, num_qo_heads], float64.
    """
    o = np.zeros((*q.shape[:2], values[0].shape[-1] if values else q.shape[2]))
    lse = np.full(q.shape[:2], -np.inf)
    for tokens, head, logits, v_head in _heads(q, qo_lens, keys, values, options, masks):
        weights, lse[tokens, head] = _softmax(logits)
        o[tokens, head] = weights @ v_head
    return o, lse


def e4m3_weights_bound(
    q: Array,
    qo_lens: Sequence[int],
    keys: Sequence[Array],
    values: Sequence[Array],
    options: AttentionOptions,
    masks: Sequence[Array] | None = None,
) -> Array:
    """How far an output may lie from `attention_oracle` whose weights were rounded to e4m3, [num_tokens, num_qo_heads, head_dim_vo].

    Rounding to three bits after the leading one changes a weight by at most 1/16 of it, so an element by at most the sum of
    weight * |value| over 16. Many errors of either sign seldom add up: six standard deviations of independent errors, each uniform, are
    the bound where they are less. Weights below 2^-18 of the largest become zero. Adders of 8-bit products keep at least 13 bits and cut
    off the rest, 32 keys at a time.
    """
    bound = np.zeros((*q.shape[:2], values[0].shape[-1] if values else q.shape[2]))
    for tokens, head, logits, v_head in _heads(q, qo_lens, keys, values, options, masks):
        weights, _ = _softmax(logits)
        sums = weights @ np.abs(v_head)
        deviation = np.sqrt(weights**2 @ v_head**2 / 3)
        least = weights.max(axis=1, initial=0.0)[:, None] * np.abs(v_head).sum(axis=0) * 2.0**-18
        bound[tokens, head] = np.minimum(sums, 6 * deviation) / 16 + least + sums * logits.shape[1] / 32 * 2.0**-13
    return bound


def _heads(
    q: Array,
    qo_lens: Sequence[int],
    keys: Sequence[Array],
    values: Sequence[Array],
    options: AttentionOptions,
    masks: Sequence[Array] | None,
) -> Iterator[tuple[slice, int, Array, Array]]:
    """Of each request and query head the tokens, the head, logits [qo_len, kv_len] and values [kv_len, head_dim_vo], scaled."""
    num_qo_heads, head_dim_qk = q.shape[1:]
    sm_scale = head_dim_qk**-0.5 if options.sm_scale is None else options.sm_scale
    token_begin = 0
    for request_idx, qo_len in enumerate(qo_lens):
        tokens = slice(token_begin, token_begin + qo_len)
        token_begin += qo_len
        k, v = keys[request_idx], values[request_idx]
        kv_len, num_kv_heads = k.shape[:2]
        positions = kv_len - qo_len + np.arange(qo_len)
        visible = _visible(options, positions, kv_len, None if masks is None else masks[request_idx])
        for head in range(num_qo_heads):
            kv_head = head // (num_qo_heads // num_kv_heads)
            q_head = _rotate(options, q[tokens, head].astype(np.float64), positions)
            k_head = _rotate(options, k[:, kv_head].astype(np.float64), np.arange(kv_len)) * _per_head(options.k_scale, kv_head)
            v_head = v[:, kv_head].astype(np.float64) * _per_head(options.v_scale, kv_head)
            logits = sm_scale * _per_head(options.q_scale, head) * (q_head @ k_head.T)
            if options.logits_soft_cap > 0:
                logits = options.logits_soft_cap * np.tanh(logits / options.logits_soft_cap)
            if options.pos_encoding == "ALIBI":
                logits = logits + _slope(options, head) * (np.arange(kv_len) - positions[:, None])
            logits = np.where(visible, logits, -np.inf)
            if options.sinks is not None:
                # A sink is one more key whose value is zero.
                logits = np.concatenate([logits, np.full((qo_len, 1), float(options.sinks[head]))], axis=1)
                v_head = np.concatenate([v_head, np.zeros((1, v_head.shape[1]))])
            yield tokens, head, logits, v_head


def _softmax(logits: Array) -> tuple[Array, Array]:
    """Softmax of each row and its base-2 log-sum-exp; a row of -inf gives zeros and -inf."""
    largest = logits.max(axis=1, initial=-np.inf)
    exponentials = np.exp(logits - np.where(np.isneginf(largest), 0.0, largest)[:, None])
    total = exponentials.sum(axis=1)
    with np.errstate(divide="ignore"):
        lse = (largest + np.log(total)) * _LOG2_E
    return exponentials / np.where(total > 0, total, 1.0)[:, None], lse


def _visible(options: AttentionOptions, positions: Array, kv_len: int, mask: Array | None) -> Array:
    """Which keys each query sees, bool [qo_len, kv_len]."""
    key = np.arange(kv_len)[None, :]
    position = positions[:, None]
    visible = np.ones((len(positions), kv_len), bool)
    if options.causal:
        visible &= key <= position
    if options.window_left >= 0:
        visible &= key >= position - options.window_left
    return visible if mask is None else visible & mask


def _rotate(options: AttentionOptions, x: Array, positions: Array) -> Array:
    """Rotary embedding in the type of x: dimensions i and i + d/2 turn by position * theta^(-2i/d) / scale."""
    if options.pos_encoding != "ROPE_LLAMA":
        return x
    half = x.shape[1] // 2
    frequency = np.asarray(options.rope_theta ** (-2.0 * np.arange(half) / x.shape[1]) / options.rope_scale, x.dtype)
    angle = positions.astype(x.dtype)[:, None] * frequency
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], axis=1).astype(x.dtype)


def _slope(options: AttentionOptions, head: int) -> float:
    assert options.alibi_slopes is not None, "ALIBI needs alibi_slopes"
    return float(options.alibi_slopes[head])


def _per_head(scale: float | Array, head: int) -> float:
    per_head = np.asarray(scale, np.float64)
    return float(per_head[head] if per_head.ndim else per_head)


def low_precision_reference(
    q: Array,
    qo_lens: Sequence[int],
    keys: Sequence[Array],
    values: Sequence[Array],
    options: AttentionOptions,
    masks: Sequence[Array] | None = None,
    block_keys: int = 64,
) -> tuple[Array, Array]:
    """The formula of `attention_oracle` as a GPU could honestly compute it: its error is the yardstick for a kernel's.

    Arithmetic is float32; what a tensor core would multiply (rotated q and k, softmax weights) is rounded to 16 bits; keys are taken
    in blocks, last block first, so that the order of operations is nobody's. With fp8 queries weights are rounded to 8 bits, as
    products with fp8 values need them, and logits are summed as 8-bit products are, see `_e4m3_products`.

    Returns:
        o and base-2 log-sum-exp, shapes as `attention_oracle`, in float32: o is not rounded to the type of q yet, see `output_bound`.
    """
    num_tokens, num_qo_heads, head_dim_qk = q.shape
    sm_scale = head_dim_qk**-0.5 if options.sm_scale is None else options.sm_scale
    o = np.zeros((num_tokens, num_qo_heads, values[0].shape[-1] if values else head_dim_qk), np.float32)
    lse = np.full((num_tokens, num_qo_heads), -np.inf, np.float32)
    token_begin = 0
    for request_idx, qo_len in enumerate(qo_lens):
        tokens = slice(token_begin, token_begin + qo_len)
        token_begin += qo_len
        k, v = keys[request_idx], values[request_idx]
        kv_len, num_kv_heads = k.shape[:2]
        operand = k.dtype if k.dtype.itemsize == 2 else np.dtype(np.float16)
        weights = q.dtype if q.dtype.itemsize == 1 else operand
        positions = kv_len - qo_len + np.arange(qo_len)
        visible = _visible(options, positions, kv_len, None if masks is None else masks[request_idx])
        for head in range(num_qo_heads):
            kv_head = head // (num_qo_heads // num_kv_heads)
            q_head = _round(_rotate(options, q[tokens, head].astype(np.float32), positions), operand)
            k_head = _round(_rotate(options, k[:, kv_head].astype(np.float32), np.arange(kv_len)), operand)
            products = _e4m3_products(q_head, k_head) if weights.itemsize == 1 else q_head @ k_head.T
            logits = products * np.float32(sm_scale * _per_head(options.q_scale, head) * _per_head(options.k_scale, kv_head))
            if options.logits_soft_cap > 0:
                logits = np.float32(options.logits_soft_cap) * np.tanh(logits / np.float32(options.logits_soft_cap))
            if options.pos_encoding == "ALIBI":
                logits = logits + np.float32(_slope(options, head)) * (np.arange(kv_len) - positions[:, None]).astype(np.float32)
            logits = np.where(visible, logits, np.float32(-np.inf))
            sink = -np.inf if options.sinks is None else options.sinks[head]
            v_head = v[:, kv_head].astype(np.float32)
            rows, lse[tokens, head] = _blocked_softmax(logits, v_head, np.float32(sink), weights, block_keys)
            o[tokens, head] = rows * np.float32(_per_head(options.v_scale, kv_head))
    return o, lse


def _e4m3_products(q: Array, k: Array) -> Array:
    """q @ k.T of e4m3 values as Hopper's tensor cores sum it: the accumulator and 32 products at a time, in units of 2^-13 of the largest
    of them, each and then their sum cut off there. Log-sum-exps of an H200 differ from the oracle's by as much, to two digits."""

    def unit_exponent(largest: Array) -> Array:
        return np.where(largest > 0, np.frexp(largest)[1] - 1 - 13, 0)

    acc = np.zeros((len(q), len(k)), np.float32)
    for begin in range(0, q.shape[1], 32):
        # Summands lie along the first axis, where sums and maxima over it are fast.
        dims = slice(begin, begin + 32)
        summands = np.concatenate([q.T[dims, :, None] * k.T[dims, None, :], acc[None]])
        exponent = unit_exponent(np.maximum(summands.max(axis=0), -summands.min(axis=0)))
        summands *= np.ldexp(np.float32(1), -exponent)
        acc = np.ldexp(np.trunc(summands, out=summands).sum(axis=0), exponent)
        exponent = unit_exponent(np.abs(acc))
        acc = np.ldexp(np.trunc(np.ldexp(acc, -exponent)), exponent)
    return acc


def _blocked_softmax(logits: Array, values: Array, sink: np.float32, operand: np.dtype[Any], block_keys: int) -> tuple[Array, Array]:
    """Softmax-weighted values of float32 logits, one block of keys after the other from the last to the first."""
    num_rows, kv_len = logits.shape
    largest = np.full(num_rows, sink, np.float32)
    total = np.where(np.isneginf(largest), np.float32(0), np.float32(1))
    acc = np.zeros((num_rows, values.shape[1]), np.float32)
    # The largest weight becomes 2^8 where the type ends at 448, to keep as many small ones as it can.
    lift = np.float32(256 if operand.itemsize == 1 else 1)
    for begin in reversed(range(0, kv_len, block_keys)):
        block = logits[:, begin : begin + block_keys]
        new_largest = np.maximum(largest, block.max(axis=1))
        shift = np.where(np.isneginf(new_largest), np.float32(0), new_largest)
        exponentials = np.exp(block - shift[:, None])
        decay = np.exp(largest - shift)
        acc = acc * decay[:, None] + _round(exponentials * lift, operand) / lift @ values[begin : begin + block_keys]
        total = total * decay + exponentials.sum(axis=1)
        largest = new_largest
    with np.errstate(divide="ignore"):
        lse = (largest + np.log(total)) * np.float32(_LOG2_E)
    return acc / np.where(total > 0, total, np.float32(1))[:, None], lse


def _round(x: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore"):
        return x.astype(dtype).astype(np.float32)
