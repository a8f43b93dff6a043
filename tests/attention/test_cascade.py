# SPDX-License-Identifier: Apache-2.0
"""Merging attention states against float64, with empty states, any number of states, masks and strides."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyinfer.attention.cascade import merge_state, merge_state_in_place, merge_states
from cupyinfer.errors import ArgumentError, ArgumentTypeError
from tests.attention.homes import HOMES, Home
from tests.support.oracle import AttentionOptions, attention_oracle

FLOAT16, BFLOAT16, FLOAT32 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
DTYPES = pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16, FLOAT32], ids=lambda dtype: dtype.name)
# float32 arithmetic with an approximate exponential and logarithm, in units of float32 epsilon.
EPSILONS = 16 * 2.0**-23

Array = np.ndarray[Any, Any]


def random_states(shape: tuple[int, ...], dtype: np.dtype[Any], empty: float = 0.2, seed: int = 1) -> tuple[Array, Array]:
    """Values and log-sum-exps of that shape; a share `empty` of the states is (0, -inf)."""
    rng = np.random.default_rng(seed)
    s = rng.uniform(-12, 12, shape[:-1]).astype(np.float32)
    s[rng.random(s.shape) < empty] = -np.inf
    v = rng.normal(size=shape).astype(np.float32)
    return np.where(s[..., None] == -np.inf, np.float32(0), v).astype(dtype), s


def oracle_merge(v: Array, s: Array, axis: int) -> tuple[Array, Array]:
    """Merge over `axis` in float64."""
    v, s = np.moveaxis(v.astype(np.float64), axis, 0), np.moveaxis(s.astype(np.float64), axis, 0)
    weights = np.exp2(s - np.where(np.isinf(s.max(axis=0, initial=-np.inf)), 0, s.max(axis=0, initial=-np.inf)))
    total = weights.sum(axis=0)
    merged = (weights[..., None] * v).sum(axis=0) / np.where(total > 0, total, 1)[..., None]
    with np.errstate(divide="ignore"):
        return merged, np.log2(total) + np.where(total > 0, s.max(axis=0, initial=-np.inf), 0)


def assert_merged(got: tuple[Array, Array], want: tuple[Array, Array], largest: float) -> None:
    """Every value within half a unit in its own last place and 16 float32 epsilons of the largest value merged."""
    v, s = got
    assert s.dtype == np.float32 and v.shape == want[0].shape
    empty = want[1] == -np.inf
    assert (v[empty] == 0).all() and (s[empty] == -np.inf).all()
    digits = {FLOAT16: 11, BFLOAT16: 8, FLOAT32: 24}[v.dtype]
    _, exponent = np.frexp(want[0])
    bound = 0.5 * np.ldexp(1.0, np.maximum(exponent, -13 if v.dtype == FLOAT16 else -125) - digits) + EPSILONS * largest
    error = np.abs(v.astype(np.float64) - want[0])
    worst = np.unravel_index(np.argmax(error - bound), error.shape) if error.size else ()
    assert error.size == 0 or error[worst] <= bound[worst], f"{worst}: got {v[worst]}, want {want[0][worst]}, bound {bound[worst]}"
    lse_error = np.abs(s[~empty].astype(np.float64) - want[1][~empty])
    assert (lse_error <= EPSILONS * np.maximum(1, np.abs(want[1][~empty]))).all(), lse_error.max()


def fetch(home: Home, result: tuple[Any, Any]) -> tuple[Array, Array]:
    return home.get(result[0]), home.get(result[1])


@HOMES
@DTYPES
@pytest.mark.parametrize("head_dim", [1, 3, 64, 65, 96, 128, 256, 1024])
def test_merge_state(home: Home, dtype: np.dtype[Any], head_dim: int) -> None:
    """Aligned and odd rows, one lane to several passes per row."""
    v, s = random_states((2, 37, 3, head_dim), dtype)
    merged = fetch(home, merge_state(*map(home.put, (v[0], s[0], v[1], s[1]))))
    assert merged[0].dtype == dtype
    assert_merged(merged, oracle_merge(v, s, 0), np.abs(v.astype(np.float64)).max())


@HOMES
@DTYPES
@pytest.mark.parametrize("num_states", [0, 1, 2, 5, 100])
def test_merge_states(home: Home, dtype: np.dtype[Any], num_states: int) -> None:
    v, s = random_states((11, num_states, 5, 64), dtype)
    merged = fetch(home, merge_states(home.put(v), home.put(s)))
    assert_merged(merged, oracle_merge(v, s, 1), np.abs(v.astype(np.float64)).max(initial=0))


@HOMES
def test_the_base_is_two(home: Home) -> None:
    v = np.array([1, 0], np.float32).reshape(1, 2, 1, 1)
    s = np.array([3, 1], np.float32).reshape(1, 2, 1)
    merged, lse = fetch(home, merge_states(home.put(v), home.put(s)))
    assert abs(merged.item() - 8 / 10) < 1e-6
    assert abs(lse.item() - np.log2(10)) < 1e-6


@HOMES
@DTYPES
def test_empty_merged_with_empty_is_empty(home: Home, dtype: np.dtype[Any]) -> None:
    v, s = np.zeros((1, 1, 64), dtype), np.full((1, 1), -np.inf, np.float32)
    for merged, lse in (
        fetch(home, merge_state(*map(home.put, (v, s, v, s)))),
        fetch(home, merge_states(home.put(v[None]), home.put(s[None]))),
    ):
        assert (merged == 0).all() and merged.shape == v.shape
        assert lse.item() == -np.inf


@HOMES
@DTYPES
@pytest.mark.parametrize("junk", [0.0, np.nan, np.inf])
def test_empty_states_are_neutral(home: Home, dtype: np.dtype[Any], junk: float) -> None:
    """The one state with keys comes out bit for bit, whatever values the empty ones hold."""
    v, s = random_states((4, 3, 8, 128), dtype, empty=0)
    v[:, [0, 2]] = junk
    s[:] = np.array([-np.inf, 1.5, -np.inf], np.float32)[:, None]
    merged, lse = fetch(home, merge_states(home.put(v), home.put(s)))
    np.testing.assert_array_equal(merged, v[:, 1])
    assert (lse == 1.5).all()


@HOMES
def test_nan_in_a_state_with_keys_is_not_hidden(home: Home) -> None:
    v, s = random_states((2, 2, 1, 8), FLOAT32, empty=0)
    v[0, 0, 0, 3], s[1, 1, 0] = np.nan, np.nan
    merged, lse = fetch(home, merge_states(home.put(v), home.put(s)))
    assert np.isnan(merged[0, 0]).tolist() == [k == 3 for k in range(8)]
    assert np.isnan(merged[1]).all() and np.isnan(lse[1]).all()


@HOMES
@pytest.mark.parametrize("where", ["host", "with-the-values"])
@pytest.mark.parametrize("index_type", [np.int32, np.int64])
def test_any_number_of_states_per_row(home: Home, index_type: type, where: str) -> None:
    counts = np.random.default_rng(4).integers(0, 5, 600)
    counts[-1] = 0
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(index_type)
    v, s = random_states((indptr[-1], 3, 80), FLOAT16)
    merged, lse = fetch(home, merge_states(home.put(v), home.put(s), indptr if where == "host" else home.put(indptr)))
    assert merged.shape == (600, 3, 80)
    for row in range(600):
        states = slice(indptr[row], indptr[row + 1])
        assert_merged((merged[row], lse[row]), oracle_merge(v[states], s[states], 0), 6)


@HOMES
@pytest.mark.slow
def test_65536_rows_of_0_to_4_states(home: Home) -> None:
    """Rows do not leak into each other, and rows without states are empty."""
    num_rows = 65_536
    counts = np.arange(num_rows) * 7 % 5
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    v, s = random_states((indptr[-1], 8, 128), FLOAT16, empty=0.1)
    merged, lse = fetch(home, merge_states(home.put(v), home.put(s), home.put(indptr)))
    for count in range(5):
        rows = np.nonzero(counts == count)[0]
        states = indptr[rows][:, None] + np.arange(count)
        for some in np.array_split(np.arange(len(rows)), 8):
            want = oracle_merge(v[states[some]], s[states[some]], 1)
            assert_merged((merged[rows[some]], lse[rows[some]]), want, 8)


@HOMES
@DTYPES
@pytest.mark.parametrize("head_dim", [64, 65, 512])
@pytest.mark.parametrize("mask_type", [None, np.bool_, np.uint8])
def test_merge_in_place(home: Home, dtype: np.dtype[Any], head_dim: int, mask_type: type | None) -> None:
    """The same bits as `merge_state` where the mask is set, the old ones elsewhere."""
    v, s = random_states((2, 37, 3, head_dim), dtype)
    want_v, want_s = (array.copy() for array in fetch(home, merge_state(*map(home.put, (v[0], s[0], v[1], s[1])))))
    mask = np.ones(37, np.bool_) if mask_type is None else np.arange(37) % 3 > 0
    want_v[~mask], want_s[~mask] = v[0][~mask], s[0][~mask]
    arrays = [home.put(array.copy()) for array in (v[0], s[0], v[1], s[1])]
    assert merge_state_in_place(*arrays, mask=None if mask_type is None else home.put(mask.astype(mask_type))) is None
    np.testing.assert_array_equal(home.get(arrays[0]), want_v)
    np.testing.assert_array_equal(home.get(arrays[1]), want_s)
    np.testing.assert_array_equal(home.get(arrays[2]), v[1])


@HOMES
@DTYPES
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
def test_strided_states(home: Home, dtype: np.dtype[Any], offset: int) -> None:
    """Heads of a wider array, states as the outer axis, a transposed log-sum-exp, and guard elements that stay as they were."""
    wide, s = random_states((4, 9, 6, 80), dtype, empty=0.1)
    v = np.moveaxis(wide[:, :, 1:4, offset : offset + 64], 0, 1)
    s = np.moveaxis(s[:, :, 1:4], 0, 1)
    transposed = np.ascontiguousarray(np.moveaxis(s, -1, 0))
    s = np.moveaxis(transposed, 0, -1)
    want, largest = oracle_merge(v, s, 1), np.abs(v.astype(np.float64)).max()
    assert_merged(fetch(home, merge_states(home.put(v), home.put(s))), want, largest)
    pair = oracle_merge(v[:, :2], s[:, :2], 1)
    on_home = [home.put(array) for array in (v[:, 0], s[:, 0], v[:, 1], s[:, 1])]
    assert_merged(fetch(home, merge_state(*on_home)), pair, largest)
    inner = np.s_[:, 2:5, offset : offset + 64]
    guarded = np.full((9, 7, 96), 3, dtype)
    guarded[inner] = v[:, 0]
    guarded_on_home = home.put(guarded)
    merge_state_in_place(guarded_on_home[inner], *on_home[1:])
    whole = home.get(guarded_on_home)
    assert_merged((whole[inner], home.get(on_home[1])), pair, largest)
    whole[inner] = 3
    assert (whole == 3).all()


@HOMES
def test_prefix_and_suffix_equal_one_pass(home: Home) -> None:
    """64 bfloat16 queries over a shared prefix of 4096 keys and a causal suffix of 64, against all 4160 keys at once."""
    rng = np.random.default_rng(7)
    q, k, v = (rng.normal(size=(length, 4, 128)).astype(np.float32) for length in (64, 4160, 4160))
    causal, full = AttentionOptions(causal=True), AttentionOptions(causal=False)
    prefix = attention_oracle(q, [64], [k[:4096]], [v[:4096]], full)
    suffix = attention_oracle(q, [64], [k[4096:]], [v[4096:]], causal)
    want_o, want_lse = attention_oracle(q, [64], [k], [v], causal)
    parts = [home.put(array.astype(dtype)) for part in (prefix, suffix) for array, dtype in zip(part, (BFLOAT16, np.float32), strict=True)]
    merged, lse = fetch(home, merge_state(*parts))
    # Each part was rounded to bfloat16 once, and so is the result.
    assert np.abs(merged.astype(np.float64) - want_o).max() <= 3 * 2.0**-9 * max(np.abs(part[0]).max() for part in (prefix, suffix))
    assert np.abs(lse - want_lse).max() <= EPSILONS * np.abs(want_lse).max()


@HOMES
def test_no_rows(home: Home) -> None:
    v, s = home.put(np.zeros((0, 4, 64), FLOAT16)), home.put(np.zeros((0, 4), np.float32))
    merged, lse = fetch(home, merge_state(v, s, v, s))
    assert merged.shape == (0, 4, 64) and lse.shape == (0, 4)
    assert fetch(home, merge_states(v, s, home.put(np.zeros(1, np.int32))))[0].shape == (0, 4, 64)
    merge_state_in_place(v, s, v, s)


@HOMES
def test_many_rows_repeat_bit_for_bit(home: Home) -> None:
    """More (row, head) pairs than the grid has warps: it goes round twice."""
    v, s = random_states((2, 66_000, 8, 33), FLOAT16)
    arrays = [home.put(array) for array in (v[0], s[0], v[1], s[1])]
    first, second = fetch(home, merge_state(*arrays)), fetch(home, merge_state(*arrays))
    for once, again in zip(first, second, strict=True):
        np.testing.assert_array_equal(once, again)
    assert_merged(first, oracle_merge(v, s, 0), 8)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jax_in_jax_out(dtype: str) -> None:
    jax = pytest.importorskip("jax")
    v, s = random_states((2, 5, 3, 64), np.dtype(getattr(ml_dtypes, dtype, dtype)))
    values, lse = jax.numpy.asarray(v), jax.numpy.asarray(s)
    merged = merge_state(values[0], lse[0], values[1], lse[1])
    assert all(isinstance(array, jax.Array) for array in merged) and merged[0].dtype == values.dtype
    assert_merged((np.asarray(merged[0]), np.asarray(merged[1])), oracle_merge(v, s, 0), np.abs(v.astype(np.float64)).max())
    with pytest.raises(ArgumentError, match=r"^v: got a JAX array"):
        merge_state_in_place(values[0], lse[0], values[1], lse[1])


V, S = np.zeros((4, 2, 64), FLOAT16), np.zeros((4, 2), np.float32)
READ_ONLY = np.broadcast_to(FLOAT16.type(0), V.shape)[:, :, :1]


@pytest.mark.parametrize(
    ("call", "argument", "error"),
    [
        pytest.param(lambda: merge_state(V.astype(np.float64), S, V, S), "v_a", ArgumentTypeError, id="float64-values"),
        pytest.param(lambda: merge_state(V, S.astype(np.float16), V, S), "s_a", ArgumentTypeError, id="float16-lse"),
        pytest.param(lambda: merge_state(V, S, V.astype(BFLOAT16), S), "v_b", ArgumentTypeError, id="two-types"),
        pytest.param(lambda: merge_state(V, S, V[:3], S[:3]), "v_b", ArgumentError, id="other-rows"),
        pytest.param(lambda: merge_state(V, S, V, S[:, :1]), "s_b", ArgumentError, id="lse-heads"),
        pytest.param(lambda: merge_state(V[0], S, V, S), "v_a", ArgumentError, id="two-dims"),
        pytest.param(lambda: merge_state(V[..., ::2], S, V[..., ::2], S), "v_a", ArgumentError, id="head-dim-stride"),
        pytest.param(lambda: merge_state(V[..., :0], S, V[..., :0], S), "v_a", ArgumentError, id="no-head-dim"),
        pytest.param(lambda: merge_state(None, S, V, S), "v_a", ArgumentTypeError, id="no-array"),
        pytest.param(lambda: merge_state_in_place(READ_ONLY, S, READ_ONLY, S), "v", ArgumentError, id="read-only"),
        pytest.param(lambda: merge_state_in_place(V, S, V, S, np.ones(3, bool)), "mask", ArgumentError, id="mask-rows"),
        pytest.param(lambda: merge_state_in_place(V, S, V, S, np.ones(4, np.int32)), "mask", ArgumentTypeError, id="mask-type"),
        pytest.param(lambda: merge_states(V, S), "v", ArgumentError, id="no-states-axis"),
        pytest.param(lambda: merge_states(V[None], S[:, :1][None]), "s", ArgumentError, id="states-lse"),
        pytest.param(lambda: merge_states(V, S, np.array([0, 2, 5])), "indptr", ArgumentError, id="indptr-past-the-end"),
        pytest.param(lambda: merge_states(V, S, np.array([0, 3, 2, 4])), "indptr", ArgumentError, id="indptr-decreases"),
        pytest.param(lambda: merge_states(V, S, np.array([1, 4])), "indptr", ArgumentError, id="indptr-begin"),
        pytest.param(lambda: merge_states(V, S, np.zeros(0, np.int32)), "indptr", ArgumentError, id="indptr-empty"),
        pytest.param(lambda: merge_states(V, S, np.array([0.0, 4.0])), "indptr", ArgumentTypeError, id="indptr-type"),
    ],
)
def test_bad_calls_name_the_argument(call: Any, argument: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"^{argument}\b"):
        call()
