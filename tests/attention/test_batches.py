# SPDX-License-Identifier: Apache-2.0
"""Batches of every plain shape, sized, planned, run and compared, on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.batches import Case
from tests.support.runner import Call, run_case
from tests.support.sampling import Chooser, RandomChooser, sample_case

MIXED = (1, 17, 0, 64, 700, 65)

CASES: dict[str, Case] = {
    # Decode: head widths, types, page sizes, layouts, groups, where the page table lies.
    "decode-d64-f16-page1": Case(MIXED, head_dims=(64, 64), page_size=1),
    "decode-d64-bf16-page64-hnd": Case(MIXED, head_dims=(64, 64), page_size=64, dtype="bfloat16", layout="HND"),
    "decode-d128-f16-page3": Case(MIXED, page_size=3, layout="HND"),
    "decode-d128-bf16-page16": Case(MIXED, dtype="bfloat16", indices_on="host"),
    "decode-d256-f16-page16-hnd": Case(MIXED, head_dims=(256, 256), layout="HND"),
    "decode-d256-bf16-page3": Case(MIXED, head_dims=(256, 256), page_size=3, dtype="bfloat16"),
    "decode-group1": Case((33, 200), heads=(3, 3), dtype="bfloat16"),
    "decode-group3": Case((33, 700), heads=(9, 3), dtype="bfloat16"),
    "decode-group5": Case((33, 200), heads=(10, 2), dtype="bfloat16"),
    "decode-group6": Case((33, 200), heads=(6, 1), dtype="bfloat16"),
    "decode-group7": Case((33, 200), heads=(14, 2), dtype="bfloat16", page_size=1),
    "decode-group8": Case((33, 200), heads=(16, 2), dtype="bfloat16"),
    "decode-group12": Case((33, 200), heads=(12, 1), dtype="bfloat16"),
    "decode-group16": Case((33, 200), heads=(32, 2), dtype="bfloat16"),
    "decode-group32": Case((33, 200, 0), heads=(64, 2), page_size=3),
    "decode-group64": Case((33, 200, 0), heads=(64, 1), layout="HND"),
    "decode-group17-long": Case((3000,), heads=(17, 1)),
    "decode-empty-batch": Case(()),
    "decode-only-empty-requests": Case((0, 0, 0)),
    "decode-one-token": Case((1,), dtype="bfloat16", page_size=64),
    "decode-last-page-full-and-last-page-of-1": Case((32, 33, 16, 17)),
    "decode-one-long-request": Case((9001,), dtype="bfloat16"),
    "decode-long-among-short": Case((1, 5000, 0, 3, 2, 1), heads=(8, 8)),
    "decode-many-short": Case(tuple(range(70)), heads=(4, 1), head_dims=(64, 64)),
    "decode-fixed-split": Case((1, 1000, 0, 128, 129), fixed_split_size=8),
    "decode-fixed-split-page3": Case((1, 1000, 0), page_size=3, fixed_split_size=50),
    "decode-fixed-split-group32": Case((1000, 5), heads=(32, 1), fixed_split_size=16),
    "decode-no-split": Case((3000, 0, 5), disable_split_kv=True, dtype="bfloat16"),
    # Paged prefill.
    "paged-d64-bf16-causal": Case((200, 70, 5), (130, 70, 2), "paged", head_dims=(64, 64), dtype="bfloat16", causal=True),
    "paged-d128-f16-short-causal": Case((33, 0, 1, 20), (2, 3, 1, 4), "paged", causal=True),
    "paged-d128-f16-t64-hnd-page3": Case((100, 40), (10, 12), "paged", layout="HND", page_size=3),
    "paged-d128-f16-t64-causal": Case((100, 40, 0, 7), (10, 12, 5, 0), "paged", causal=True, page_size=1),
    "paged-d128-bf16-t128-causal": Case((300, 150), (150, 100), "paged", dtype="bfloat16", causal=True, indices_on="host"),
    "paged-d128-f16-t128-page64-hnd": Case((300, 150), (150, 100), "paged", layout="HND", page_size=64),
    "paged-d256-bf16-causal": Case((90, 300), (40, 70), "paged", head_dims=(256, 256), dtype="bfloat16", causal=True),
    "paged-kv-shorter-than-q-causal": Case((20, 1, 64), (90, 70, 65), "paged", causal=True),
    "paged-kv-shorter-than-q": Case((20, 1, 64), (90, 70, 65), "paged"),
    "paged-group1": Case((70, 30), (40, 30), "paged", heads=(2, 2), causal=True),
    "paged-group3": Case((33, 700), (7, 1), "paged", heads=(9, 3), dtype="bfloat16", causal=True),
    "paged-group5": Case((70, 30), (40, 30), "paged", heads=(10, 2), causal=True),
    "paged-group6": Case((70, 30), (40, 30), "paged", heads=(6, 1), causal=True),
    "paged-group7": Case((70, 30), (40, 30), "paged", heads=(7, 1), causal=True),
    "paged-group12": Case((70, 30), (40, 30), "paged", heads=(12, 1)),
    "paged-group16": Case((70, 30), (20, 30), "paged", heads=(16, 1), causal=True),
    "paged-group64": Case((70, 30), (5, 3), "paged", heads=(64, 1), causal=True),
    "paged-empty-batch": Case((), (), "paged"),
    "paged-no-queries": Case((7, 9), (0, 0), "paged"),
    "paged-no-keys": Case((0, 0), (4, 4), "paged", causal=True),
    "paged-one-token-requests": Case((1, 1, 1), (1, 1, 1), "paged", causal=True, dtype="bfloat16"),
    "paged-long-keys": Case((5000, 30), (20, 3), "paged", causal=True, dtype="bfloat16"),
    "paged-fixed-split": Case((1000, 30, 0), (40, 3, 2), "paged", fixed_split_size=16, causal=True),
    "paged-fixed-split-not-causal": Case((1000, 30), (4, 33), "paged", fixed_split_size=11, dtype="bfloat16"),
    "paged-no-split": Case((2000, 30), (40, 3), "paged", disable_split_kv=True, causal=True),
    # Ragged prefill.
    "ragged-d64-bf16-causal": Case((200, 70, 5), (130, 70, 2), "ragged", head_dims=(64, 64), dtype="bfloat16", causal=True),
    "ragged-d128-f16-short": Case((33, 0, 1, 20), (2, 3, 1, 4), "ragged"),
    "ragged-d128-f16-t64-hnd": Case((100, 40), (10, 12), "ragged", layout="HND", causal=True),
    "ragged-d128-f16-t128-causal": Case((300, 150), (150, 100), "ragged", causal=True),
    "ragged-d128-bf16-t128-hnd": Case((300, 150), (150, 100), "ragged", dtype="bfloat16", layout="HND"),
    "ragged-d256-bf16-causal": Case((90, 300), (40, 70), "ragged", head_dims=(256, 256), dtype="bfloat16", causal=True),
    "ragged-kv-shorter-than-q-causal": Case((20, 1, 64), (90, 70, 65), "ragged", causal=True),
    "ragged-group1": Case((70, 30), (40, 30), "ragged", heads=(2, 2), causal=True),
    "ragged-group5": Case((70, 30), (40, 30), "ragged", heads=(10, 2), causal=True),
    "ragged-group8": Case((70, 30), (40, 30), "ragged", heads=(8, 1), causal=True),
    "ragged-group64": Case((70, 30), (5, 3), "ragged", heads=(64, 1), causal=True),
    "ragged-empty-batch": Case((), (), "ragged"),
    "ragged-no-queries": Case((7, 9), (0, 0), "ragged"),
    "ragged-empty-request-between": Case((100, 100, 100), (150, 0, 150), "ragged"),
    "ragged-no-keys": Case((0, 17, 0), (2, 3, 1), "ragged"),
    "ragged-long-keys": Case((4000, 30), (20, 3), "ragged", causal=True, dtype="bfloat16"),
    "ragged-fixed-split": Case((1000, 30, 0), (40, 3, 2), "ragged", fixed_split_size=200, causal=True),
    "ragged-no-split": Case((2000, 30), (40, 3), "ragged", disable_split_kv=True),
}


@pytest.mark.parametrize("name", CASES)
def test_batch(name: str, backend: str) -> None:
    run_case(CASES[name], backend)


@pytest.mark.parametrize("name", ["decode-one-long-request", "paged-long-keys", "ragged-long-keys"])
def test_long_requests_are_shared(name: str, backend: str) -> None:
    """The table's long requests do test merging: without it, their cases would pass for nothing."""
    assert Call(CASES[name], backend).size.float_bytes > 0


class Drawn(Chooser):
    """Choices made by Hypothesis, which then looks for the smallest batch that fails."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return int(self._draw(st.integers(low, high)))


@st.composite
def cases(draw: Any) -> Case:
    return sample_case(Drawn(draw), max_requests=4, max_kv_len=300, max_qo_len=40)


@pytest.mark.decode
@pytest.mark.parametrize("kv_lens", [(1000,), (300,) * 4, (4096,) * 4, (1000, 40, 700)], ids=str)
@pytest.mark.parametrize(("head_dim", "kv_dtype"), [(64, None), (128, "float8_e4m3fn")])
@pytest.mark.parametrize("page_size", [32, 48, 80, 112])
def test_pages_that_end_within_a_block_of_keys(
    page_size: int, head_dim: int, kv_dtype: str | None, kv_lens: tuple[int, ...], backend: str
) -> None:
    """Decode copies short rows by 32 keys: whether these reach into another page differs from block to block, and from piece to piece."""
    run_case(Case(kv_lens, head_dims=(head_dim, head_dim), page_size=page_size, dtype="bfloat16", kv_dtype=kv_dtype), backend)


@settings(max_examples=100)
@given(cases())
def test_random_small_batches(case: Case) -> None:
    run_case(case, "host")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_random_batches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    run_case(sample_case(RandomChooser(rng), max_requests=12, max_kv_len=3000, max_qo_len=150), "fa2")
