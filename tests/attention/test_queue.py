# SPDX-License-Identifier: Apache-2.0
"""Batches of so many prefill units that CTAs take the later ones from a queue: every unit is done once, run after run."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.batches import Case
from tests.support.runner import Call, assert_same_bits, run_case

pytestmark = pytest.mark.gpu

_rng = np.random.default_rng(5)
LENGTHS = tuple(int(n) for n in _rng.integers(66, 200, 110))
HALVES = tuple(n // 2 + 2 for n in LENGTHS)

CASES: dict[str, Case] = {
    "ragged": Case(LENGTHS, LENGTHS, "ragged", heads=(8, 8), dtype="bfloat16", causal=True),
    "ragged-equal": Case((100,) * 110, (100,) * 110, "ragged", heads=(8, 8), dtype="bfloat16"),
    "ragged-d64": Case(LENGTHS, LENGTHS, "ragged", heads=(8, 8), head_dims=(64, 64), dtype="bfloat16", causal=True),
    "paged": Case(LENGTHS, HALVES, "paged", heads=(8, 8), causal=True),
    "paged-fp8": Case(LENGTHS, HALVES, "paged", heads=(8, 8), kv_dtype="float8_e4m3fn", causal=True),
    "paged-pieces": Case(LENGTHS, HALVES, "paged", heads=(8, 8), fixed_split_size=8, page_size=16),
    "paged-64-rows": Case(LENGTHS, HALVES, "paged", heads=(8, 8), head_dims=(256, 256), window_left=70),
    "graph": Case(LENGTHS, HALVES, "paged", heads=(8, 8), graph=True, causal=True),
}


@pytest.mark.parametrize("name", CASES)
def test_every_unit_once(name: str) -> None:
    run_case(CASES[name], "fa2")


@pytest.mark.parametrize("name", ["ragged", "ragged-d64", "paged-fp8"])
def test_runs_leave_the_queue_as_the_plan_set_it(name: str) -> None:
    call = Call(CASES[name], "fa2")
    call.plan()
    info, case = call.wrapper.plan_info, call.case
    assert info.num_tiles * case.heads[1] > 3 * info.num_ctas
    planned = call.ints.contents()
    want = call.run()
    for _ in range(20):
        assert_same_bits(call.run(), want)
        np.testing.assert_array_equal(call.ints.contents(), planned)
