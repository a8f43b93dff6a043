# SPDX-License-Identifier: Apache-2.0
"""Batches as host integers: lengths follow from offsets, and every wrong array is named with what it got and needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyinfer.errors import ArgumentError, ArgumentTypeError, CupyInferError
from cupyinfer.schedule.geometry import (
    MAX_KV_LEN,
    BatchGeometry,
    check_heads,
    decode_geometry,
    host_integers,
    paged_prefill_geometry,
    ragged_prefill_geometry,
)
from cupyinfer.schedule.planner import PlanShape, draft_plan
from cupyinfer.schedule.profile import PROFILES
from tests.schedule.batches import offsets


def ints(*values: int) -> Any:
    return np.array(values, np.int64)


@given(pages=st.lists(st.integers(0, 5), max_size=8), page_size=st.integers(1, 20), data=st.data())
def test_paged_lengths(pages: list[int], page_size: int, data: st.DataObject) -> None:
    last = [data.draw(st.integers(1 if count else 0, page_size)) for count in pages]
    expected = [(count - 1) * page_size + rest if count else 0 for count, rest in zip(pages, last, strict=True)]
    geometry = decode_geometry(offsets(pages), ints(*last), page_size)
    assert geometry.kv_len.tolist() == expected
    assert geometry.qo_len.tolist() == [1] * len(pages)
    assert geometry.q_begin.tolist() == list(range(len(pages)))
    assert geometry.kv_base.tolist() == offsets(pages).tolist()[:-1]
    assert (geometry.batch_size, geometry.num_qo_tokens, geometry.num_kv_entries) == (len(pages), len(pages), sum(pages))
    prefill = paged_prefill_geometry(offsets([2] * len(pages)), offsets(pages), ints(*last), page_size)
    assert prefill.kv_len.tolist() == expected
    for made in (geometry, prefill):
        assert (made.shortest_kv, made.longest_kv) == (min(expected, default=0), max(expected, default=0))
    assert prefill.num_qo_tokens == 2 * len(pages)
    assert prefill.uniform_qo_len is None


@given(lens=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8))
def test_ragged_lengths(lens: list[tuple[int, int]]) -> None:
    qo_lens, kv_lens = [qo for qo, _ in lens], [kv for _, kv in lens]
    geometry = ragged_prefill_geometry(offsets(qo_lens), offsets(kv_lens))
    assert (geometry.qo_len.tolist(), geometry.kv_len.tolist()) == (qo_lens, kv_lens)
    assert geometry.q_begin.tolist() == offsets(qo_lens).tolist()[:-1]
    assert geometry.kv_base.tolist() == offsets(kv_lens).tolist()[:-1]
    assert (geometry.num_qo_tokens, geometry.num_kv_entries) == (sum(qo_lens), sum(kv_lens))


def decode(indptr: Any, last: Any, page_size: int = 16) -> BatchGeometry:
    return decode_geometry(indptr, last, page_size)


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: decode(ints(), ints()), "^indptr: is empty, a batch of n requests has n [+] 1 offsets$"),
    (lambda: decode(ints(1, 2), ints(1)), "^indptr: begins with 1, offsets begin with 0$"),
    (lambda: decode(ints(-1, 2), ints(1)), "^indptr: begins with -1"),
    (lambda: decode(ints(0, 3, 2, 5), ints(1, 1, 1)), "^indptr: decreases from 3 to 2 at entry 2$"),
    (lambda: decode(ints(0, 2**31), ints(1), 1), f"^indptr: ends at {2**31}, the largest supported offset is {2**31 - 1}$"),
    (lambda: decode(ints(0, 2**31 - 1), ints(1), 1), f"^indptr: request 0 has {2**31 - 1} keys, supported are up to {MAX_KV_LEN}$"),
    (lambda: decode(ints(0, 2, 2**27), ints(1, 1), 64), f"^indptr: request 1 has [0-9]+ keys, supported are up to {MAX_KV_LEN}$"),
    (lambda: decode(ints(0, 1, 2), ints(1)), "^last_page_len: has 1 entries, indptr describes 2 requests$"),
    (lambda: decode(ints(0, 1), ints(1, 1)), "^last_page_len: has 2 entries, indptr describes 1 requests$"),
    (lambda: decode(ints(0, 1), ints(0)), "^last_page_len: request 0 has 0, expected 1 to page_size = 16$"),
    (lambda: decode(ints(0, 1), ints(17)), "^last_page_len: request 0 has 17, expected 1 to page_size = 16$"),
    (lambda: decode(ints(0, 1), ints(-1)), "^last_page_len: request 0 has -1, expected 1 to page_size = 16$"),
    (lambda: decode(ints(0, 1, 1), ints(16, 17)), "^last_page_len: request 1 has 17, expected 0 to page_size = 16$"),
    (lambda: decode(ints(0, 0, 1), ints(-1, 1)), "^last_page_len: request 0 has -1, expected 0 to page_size = 16$"),
    (lambda: decode(ints(0, 1), ints(1), 0), "^page_size: got 0, a page holds at least 1 key$"),
    (lambda: decode(ints(0, 1), ints(1), -16), "^page_size: got -16"),
    (
        lambda: paged_prefill_geometry(ints(0, 1, 2, 3, 4), ints(0), ints(1, 1, 1, 1), 16),
        "^paged_kv_indptr: has 1 entries, qo_indptr has 5; both need batch_size [+] 1$",
    ),
    (lambda: paged_prefill_geometry(ints(0, 5, 3), ints(0, 1, 2), ints(1, 1), 16), "^qo_indptr: decreases from 5 to 3 at entry 2$"),
    (lambda: paged_prefill_geometry(ints(0, 1), ints(0, -1), ints(1), 16), "^paged_kv_indptr: decreases from 0 to -1 at entry 1$"),
    (lambda: paged_prefill_geometry(ints(0, 1), ints(0, 1), ints(17), 16), "^paged_kv_last_page_len: request 0 has 17"),
    (
        lambda: paged_prefill_geometry(ints(0, 1), ints(0, 1), ints(), 16),
        "^paged_kv_last_page_len: has 0 entries, paged_kv_indptr describes 1",
    ),
    (lambda: ragged_prefill_geometry(ints(0, 1), ints(0, 1, 2)), "^kv_indptr: has 3 entries, qo_indptr has 2; both need batch_size [+] 1$"),
    (lambda: ragged_prefill_geometry(ints(0, 1), ints(0, 2**31 - 1)), f"^kv_indptr: request 0 has {2**31 - 1} keys, supported"),
    (lambda: ragged_prefill_geometry(ints(0, 1, 2), ints(0, 9, 4)), "^kv_indptr: decreases from 9 to 4 at entry 2$"),
    (lambda: ragged_prefill_geometry(ints(), ints()), "^qo_indptr: is empty"),
    (lambda: check_heads(6, 4), "^num_qo_heads: got 6, which is not a multiple of num_kv_heads = 4$"),
    (lambda: check_heads(0, 1), "^num_qo_heads, num_kv_heads: got 0 and 1"),
    (lambda: check_heads(4, -1), "^num_qo_heads, num_kv_heads: got 4 and -1"),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_batches_name_what_is_wrong(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert type(caught.value) is ArgumentError


def test_a_request_without_pages_may_have_any_last_page_length() -> None:
    assert decode(ints(0, 0, 1, 1), ints(16, 16, 0)).kv_len.tolist() == [0, 16, 0]


def test_packed_rows_fit_32_bits() -> None:
    wide = PlanShape(False, 64, 1, 128, 128)
    with pytest.raises(
        ArgumentError,
        match=r"^qo_indptr: request 1 has 40000000 query tokens of 64 heads per KV head, supported are up to 33553407 tokens$",
    ):
        draft_plan(ragged_prefill_geometry(ints(0, 1, 40000001), ints(0, 1, 2)), wide, PROFILES["h200"])


def test_the_longest_request() -> None:
    assert decode(ints(0, MAX_KV_LEN), ints(1), 1).kv_len.tolist() == [MAX_KV_LEN]
    assert ragged_prefill_geometry(ints(0, 1), ints(0, MAX_KV_LEN)).kv_len.tolist() == [MAX_KV_LEN]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64])
def test_integers_of_any_width(dtype: Any) -> None:
    array = np.array([0, 3, 7], dtype)
    result = host_integers(array, "indptr")
    assert result.dtype == np.int64
    assert result.tolist() == [0, 3, 7]
    array[:] = 1
    assert result.tolist() == [0, 3, 7]


def test_lists_and_strided_arrays() -> None:
    assert host_integers([0, 3], "indptr").tolist() == [0, 3]
    assert host_integers(np.arange(6)[::2], "indptr").tolist() == [0, 2, 4]
    assert host_integers([], "last_page_len").dtype == np.int64


@pytest.mark.parametrize("values", [[0.0, 1.0], np.zeros(2, np.float32), np.zeros(2, bool), ["a"], [None]])
def test_only_integers(values: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^indptr: got .*, expected int32 or int64$") as caught:
        host_integers(values, "indptr")
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("values", [np.zeros((2, 2), np.int32), np.int64(3), 3, np.zeros((0, 4), np.int32)])
def test_only_one_dimension(values: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^indptr: got shape \(.*\), expected one dimension$"):
        host_integers(values, "indptr")


@pytest.mark.parametrize("wide", [[0, 2**61 + 1, 5], [0, -(2**62), 5], [0, 2**31 + 1], [2**63 - 1, -(2**63)]])
def test_offsets_too_wide_for_products_of_them(wide: list[int]) -> None:
    """Times a page size of 16 the first of these would wrap around to lengths that look right."""
    with pytest.raises(ArgumentError, match=r"^indptr: holds -?[0-9]+, the largest supported offset is 2147483647$"):
        host_integers(np.array(wide), "indptr")


@pytest.mark.parametrize("values", [[[1, 2], [3]], np.array([0, 2**64 - 1], np.uint64)])
def test_what_is_no_array_of_64_bit_integers(values: Any) -> None:
    with pytest.raises(CupyInferError, match=r"^indptr: "):
        host_integers(values, "indptr")
