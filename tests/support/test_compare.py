# SPDX-License-Identifier: Apache-2.0
"""The comparison itself: it accepts the honest, names the dishonest, and never accepts NaN."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from tests.support.compare import assert_attention_close, output_bound, unit_in_last_place
from tests.support.oracle import AttentionOptions, attention_oracle, low_precision_reference

Array = npt.NDArray[Any]
QO_LENS = (2, 0, 3)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def make_case(q_dtype: np.dtype[Any] = BFLOAT16) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    q = rng.standard_normal((5, 4, 64)).astype(q_dtype)
    keys, values = ([rng.standard_normal((n, 2, 64)).astype(q_dtype) for n in (40, 3, 2)] for _ in range(2))
    call = (q, QO_LENS, keys, values, AttentionOptions(causal=True))
    oracle, reference = attention_oracle(*call), low_precision_reference(*call)
    # With 3 queries over 2 keys, causal, the first query of the last request sees none.
    return {
        "o": oracle[0].astype(q_dtype),
        "lse": oracle[1].astype(np.float32),
        "oracle": oracle,
        "reference": reference,
        "qo_lens": QO_LENS,
    }


def test_a_rounded_oracle_and_the_reference_pass() -> None:
    case = make_case()
    assert_attention_close(**case)
    assert_attention_close(**{**case, "o": case["reference"][0].astype(BFLOAT16), "lse": case["reference"][1]})
    assert_attention_close(**{**case, "lse": None})


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e-6])
@pytest.mark.parametrize(("token", "request_idx", "query"), [(1, 0, 1), (2, 2, 0), (4, 2, 2)])
def test_one_bad_output_is_named(token: int, request_idx: int, query: int, value: float) -> None:
    case = make_case()
    if value == 1e-6 and token != 2:
        value = 2.0 + float(case["o"][token, 3, 7])
    case["o"][token, 3, 7] = value
    with pytest.raises(
        AssertionError, match=rf"o: 1 of 1280 .* requests \[{request_idx}\].*request {request_idx}, its query {query}, head 3"
    ):
        assert_attention_close(**case)


@pytest.mark.parametrize("value", [np.nan, 0.0, np.inf, -np.inf])
@pytest.mark.parametrize("token", [0, 2])
def test_a_bad_lse_is_named(token: int, value: float) -> None:
    case = make_case()
    if np.isneginf(case["oracle"][1][token, 1]) and np.isneginf(value):
        value = -1e30
    case["lse"][token, 1] = value
    with pytest.raises(AssertionError, match=r"^lse: 1 of 20 elements"):
        assert_attention_close(**case)


def test_an_lse_in_the_wrong_base_fails() -> None:
    case = make_case()
    case["lse"] = case["lse"] * np.float32(np.log(2))
    with pytest.raises(AssertionError, match=r"^lse: 16 of 20"):
        assert_attention_close(**case)


def test_the_bound_is_two_reference_errors_and_two_half_units() -> None:
    oracle = np.array([[[1.0, -3.0]], [[0.0, 0.0]]])
    reference = np.array([[[1.25, -3.0]], [[0.0, 0.0]]], np.float16)
    np.testing.assert_array_equal(output_bound(oracle, reference, np.dtype(np.float16)), [[0.5 + 2.0**-9], [0.0]])


def test_rounding_hides_no_error_of_the_reference() -> None:
    unit = 2.0**-9
    oracle = np.array([[[3.0, 0.0]]])
    for error in (0.4 * unit, 0.6 * unit):
        bound = output_bound(oracle, np.array([[[3.0 + error, 0.0]]], np.float32), np.dtype(np.float16))
        np.testing.assert_allclose(bound, 2 * max(error, round(error / unit) * unit) + unit, rtol=1e-4)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16])
def test_units_in_the_last_place(dtype: np.dtype[Any]) -> None:
    for x in (1.0, 1.5, 0.7, 300.0, 0.0, 1e-7):
        at = np.asarray(x).astype(dtype)
        following = (at.view(np.uint16) + np.uint16(1)).view(dtype)
        assert unit_in_last_place(at.astype(np.float64), dtype) == float(following) - float(at)


def test_a_reference_that_is_not_finite_bounds_nothing() -> None:
    case = make_case()
    case["reference"][0][0, 0, 0] = np.nan
    with pytest.raises(AssertionError, match="not finite"):
        assert_attention_close(**case)


def test_the_oracle_on_a_case_done_by_hand() -> None:
    # Two keys with logits 0 and ln 3: weights 1/4 and 3/4; a sink of ln 4 halves them.
    q = np.array([[[1.0, 0.0]]])
    keys, values = [np.array([[[0.0, 0.0]], [[np.log(3.0), 0.0]]])], [np.array([[[4.0, 0.0]], [[0.0, 8.0]]])]
    o, lse = attention_oracle(q, [1], keys, values, AttentionOptions(sm_scale=1.0))
    np.testing.assert_allclose(o, [[[1.0, 6.0]]])
    np.testing.assert_allclose(lse, [[2.0]])
    o, lse = attention_oracle(q, [1], keys, values, AttentionOptions(sm_scale=1.0, sinks=np.array([np.log(4.0)])))
    np.testing.assert_allclose(o, [[[0.5, 3.0]]])
    np.testing.assert_allclose(lse, [[3.0]])
    # A quarter turn apart, q . k of equal vectors is cos(position difference).
    turned = AttentionOptions(sm_scale=1.0, pos_encoding="ROPE_LLAMA", rope_scale=2.0 / np.pi)
    keys = [np.array([[[1.0, 0.0]], [[1.0, 0.0]]])]
    o, _ = attention_oracle(q, [1], keys, values, turned)
    np.testing.assert_allclose(o, [[[4.0 / (1.0 + np.e), 8.0 * np.e / (1.0 + np.e)]]])
