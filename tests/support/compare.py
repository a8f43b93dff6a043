# SPDX-License-Identifier: Apache-2.0
"""The one tolerance of the test suite: twice the error of an honest low-precision computation, plus two output roundings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: Rounding allowance of a log-sum-exp, in units of float32 epsilon at its own magnitude: the approximate exponential and logarithm
#: of a GPU and the truncating adders of its tensor cores each cost a few, which the reference does not model.
_LSE_EPSILONS = 16


def assert_attention_close(
    o: Array,
    lse: Array | None,
    oracle: tuple[Array, Array],
    reference: tuple[Array, Array],
    qo_lens: Sequence[int],
    label: str = "",
    weights_bound: Array | None = None,
) -> None:
    """Fail unless a result is as close to the oracle as a low-precision computation can be expected to be.

    Bound of every element of an output row (one token, one head):
    ``2 * max over the row |reference - oracle| + 2 * (half a unit in the last place at the row's largest |oracle|)``.
    It is taken over the row, not per element: an element's error is the rounding of weights times *all* values of its column, so it
    follows the row's magnitude, not what the element happens to cancel to; and the reference's error at one element may be 0 by luck.
    With 8-bit weights, where the reference's errors are few and large and another order of keys has others, an element's bound is
    ``weights_bound`` plus the same two output roundings.
    Bound of a log-sum-exp: ``2 * max over the request |reference - oracle| + 16 float32 epsilons of max(1, |oracle|)``. With fp8 queries
    the reference sums logits in as few bits as 8-bit products do, which is nearly all of its error.
    Rows whose oracle is exactly 0 (no keys) must be exactly 0, a log-sum-exp of -inf exactly -inf; NaN never passes.

    Args:
        o: [num_tokens, num_qo_heads, head_dim_vo], in the output type, which gives the unit in the last place.
        lse: float32 [num_tokens, num_qo_heads], or None when it was not asked for.
        oracle: what `attention_oracle` returned.
        reference: what `low_precision_reference` returned for the same call.
        qo_lens: query tokens of each request, to name the request of the worst element.
        label: put in front of the message.
        weights_bound: what `e4m3_weights_bound` returned for the same call with fp8 queries, else None.
    """
    messages = [_output_mismatch(o, oracle[0], reference[0], qo_lens, weights_bound)]
    if lse is not None:
        messages.append(_lse_mismatch(lse, oracle[1], reference[1], qo_lens))
    found = [message for message in messages if message]
    if found:
        raise AssertionError("\n".join([label, *found] if label else found))


def output_bound(oracle_o: Array, reference_o: Array, output_type: np.dtype[Any]) -> Array:
    """Largest permitted |o - oracle| of each row, [num_tokens, num_qo_heads] float64; see `assert_attention_close`.

    The reference's error is the larger of those before and after it is rounded to the output type. Rounding usually adds to the error of
    the arithmetic, but it may hide it from a whole row: where one key counts, all elements of a row share one relative error, few
    values (of fp8, say) times one weight, and the rounding of the largest of them may point the other way.
    """
    rounded = _rounded(reference_o, output_type)
    reference_error = np.maximum(np.abs(rounded - oracle_o), np.abs(reference_o.astype(np.float64) - oracle_o)).max(axis=-1, initial=0.0)
    largest = np.abs(oracle_o).max(axis=-1, initial=0.0)
    return np.where(largest > 0, 2 * reference_error + 2 * (0.5 * unit_in_last_place(largest, output_type)), 0.0)


def _rounded(x: Array, output_type: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore"):
        return np.asarray(x.astype(output_type).astype(np.float64))


def unit_in_last_place(x: Array, dtype: np.dtype[Any]) -> Array:
    """Distance between neighbouring values of float16 or bfloat16 at the magnitude of x, float64."""
    smallest_exponent, mantissa_bits = (-14, 10) if dtype == np.float16 else (-126, 7)
    exponent: Array = np.where(x == 0, smallest_exponent, np.maximum(np.frexp(x)[1] - 1, smallest_exponent))
    return np.asarray(np.ldexp(np.ones_like(x, np.float64), exponent - mantissa_bits))


def _output_mismatch(o: Array, oracle_o: Array, reference_o: Array, qo_lens: Sequence[int], weights_bound: Array | None) -> str:
    _check_shapes("o", o, oracle_o, reference_o)
    if not np.isfinite(_rounded(reference_o, o.dtype)).all():
        raise AssertionError("o: the low-precision reference itself is not finite, so it bounds nothing")
    if weights_bound is None:
        bound = np.broadcast_to(output_bound(oracle_o, reference_o, o.dtype)[..., None], oracle_o.shape)
    else:
        largest = np.abs(oracle_o).max(axis=-1, initial=0.0)
        bound = np.where(largest > 0, unit_in_last_place(largest, o.dtype), 0.0)[..., None] + weights_bound
    return _report("o", o.astype(np.float64), oracle_o, reference_o.astype(np.float64), bound, qo_lens)


def _lse_mismatch(lse: Array, oracle_lse: Array, reference_lse: Array, qo_lens: Sequence[int]) -> str:
    _check_shapes("lse", lse, oracle_lse, reference_lse)
    if not np.array_equal(np.isfinite(oracle_lse), np.isfinite(reference_lse)):
        raise AssertionError("lse: oracle and low-precision reference disagree on which rows are empty")
    finite = np.isfinite(oracle_lse)
    reference_error = np.abs(np.where(finite, reference_lse, 0) - np.where(finite, oracle_lse, 0))
    bound = _LSE_EPSILONS * float(np.finfo(np.float32).eps) * np.maximum(1.0, np.abs(np.where(finite, oracle_lse, 0)))
    begin = 0
    for qo_len in qo_lens:
        tokens = slice(begin, begin + qo_len)
        bound[tokens] += 2 * reference_error[tokens].max(initial=0.0)
        begin += qo_len
    return _report("lse", lse.astype(np.float64), oracle_lse, reference_lse.astype(np.float64), bound, qo_lens)


def _check_shapes(name: str, got: Array, oracle: Array, reference: Array) -> None:
    if not got.shape == oracle.shape == reference.shape:
        raise AssertionError(f"{name}: shape {got.shape}, oracle {oracle.shape}, reference {reference.shape}")


def _report(name: str, got: Array, oracle: Array, reference: Array, bound: Array, qo_lens: Sequence[int]) -> str:
    """One paragraph about the elements out of bounds, or an empty string."""
    with np.errstate(invalid="ignore"):
        # Equal infinities have no distance; every other meeting of infinities or NaN is as wrong as can be.
        error = np.where(got == oracle, 0.0, np.abs(got - oracle))
    error = np.where(np.isnan(error), np.inf, error)
    wrong = ~(error <= bound)
    if not wrong.any():
        return ""
    excess = np.where(wrong, error - bound, -1.0)
    worst = np.unravel_index(int(excess.argmax()), excess.shape)
    token_idx = int(worst[0])
    ends = np.cumsum(qo_lens)
    request_idx = int(np.searchsorted(ends, token_idx, side="right"))
    query_idx = token_idx - int(ends[request_idx] - qo_lens[request_idx])
    requests = np.unique(np.searchsorted(ends, np.nonzero(wrong)[0], side="right"))
    return (
        f"{name}: {int(wrong.sum())} of {wrong.size} elements out of bounds, in requests {requests.tolist()}; "
        f"worst at {tuple(map(int, worst))} (request {request_idx}, its query {query_idx}, head {int(worst[1])}): "
        f"got {got[worst]:.9g}, oracle {oracle[worst]:.9g}, error {error[worst]:.3g}, bound {bound[worst]:.3g}, "
        f"low-precision reference {reference[worst]:.9g}"
    )
