# SPDX-License-Identifier: Apache-2.0
"""With a fixed split or none, how a request is computed does not depend on its neighbours; nothing ever depends on chance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyinfer.errors import ArgumentError
from cupyinfer.schedule.schedule import make_split_policy
from tests.schedule.batches import KINDS, Case, cases
from tests.schedule.simulator import Placed, place, walk

#: What decides a request's arithmetic: rows of its tile, keys of its segment, and its place in a merge.
Piece = tuple[int, int, int, int, int, int, int]


def pieces(placed: Placed, num_kv_heads: int, request: int) -> list[Piece]:
    """How one request is computed, in an order that does not depend on CTAs."""
    found = []
    for segment in walk(placed, num_kv_heads):
        tile = placed.tiles[segment.tile]
        if tile["request"] == request:
            parts = placed.merge_groups[segment.group][1] if segment.group >= 0 else 1
            found.append((segment.head, tile["row_begin"], tile["num_rows"], segment.kv_begin, segment.kv_end, segment.part, parts))
    return sorted(found)


@settings(max_examples=150)
@given(case=cases(max_batch=4, max_qo=150), fixed=st.none() | st.integers(1, 30), where=st.integers(0, 4), data=st.data())
def test_neighbours_change_nothing(case: Case, fixed: int | None, where: int, data: st.DataObject) -> None:
    case = replace(case, fixed_split_size=fixed, disable_split_kv=fixed is None)
    qo_len = 1 if case.kind == "decode" else data.draw(st.integers(1, 150))
    kv_len = data.draw(st.integers(0, 2000))
    alone = place(replace(case, qo_lens=[qo_len], kv_lens=[kv_len]).draft())
    at = min(where, len(case.qo_lens))
    together = replace(
        case,
        qo_lens=[*case.qo_lens[:at], qo_len, *case.qo_lens[at:]],
        kv_lens=[*case.kv_lens[:at], kv_len, *case.kv_lens[at:]],
    )
    placed = place(together.draft())
    assert placed.info.cta_tile_q == alone.info.cta_tile_q
    assert pieces(placed, case.num_kv_heads, at) == pieces(alone, case.num_kv_heads, 0)


@pytest.mark.parametrize("split", [{"disable_split_kv": True}, {"fixed_split_size": 64}])
def test_a_neighbour_that_grows_by_one_token(split: dict[str, Any]) -> None:
    """One row over 19802 keys beside a prompt of 9 or 10 tokens; 256 tokens alone and beside 31 short requests."""
    many = {"num_kv_heads": 2, "group_size": 7, "head_dims": (64, 64), "causal": True, **split}
    nine, ten = (place(Case("paged", [1, n], [19802, n], **many).draft()) for n in (9, 10))
    assert pieces(nine, 2, 0) == pieces(ten, 2, 0)
    alone = place(Case("paged", [256], [256], **many).draft())
    crowd = place(Case("paged", [256] + [3] * 31, [256] + [50] * 31, **many).draft())
    assert pieces(alone, 2, 0) == pieces(crowd, 2, 0)
    # The test sees what it claims to see: an automatic split does depend on the neighbours.
    many = {name: value for name, value in many.items() if name not in split}
    alone, crowd = (place(Case("paged", [256] * n, [19802] * n, **many).draft()) for n in (1, 32))
    assert pieces(alone, 2, 0) != pieces(crowd, 2, 0)


@settings(max_examples=50)
@given(case=cases(max_qo=100))
def test_the_same_batch_gives_the_same_plan(case: Case) -> None:
    one, two = place(case.draft()), place(case.draft())
    assert (one.info, one.tiles, one.cta_work, one.merge_groups) == (two.info, two.tiles, two.cta_work, two.merge_groups)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_have_the_size_that_was_asked_for(kind: str) -> None:
    """Sizes count pages, or keys of a ragged cache, and round up to whole iterations of 64 keys."""
    for size, keys in ((64, 64), (65, 128), (1000, 1024)) if kind == "ragged" else ((4, 64), (5, 128), (60, 960), (64, 1024)):
        placed = place(Case(kind, [1], [5000], fixed_split_size=size).draft())
        lengths = [tile["kv_end"] - tile["kv_begin"] for tile in sorted(placed.tiles, key=lambda tile: tile["kv_begin"])]
        assert lengths == [keys] * (5000 // keys) + ([5000 % keys] if 5000 % keys else [])


def test_a_part_longer_than_any_request_splits_nothing() -> None:
    placed = place(Case("decode", [1], [5000], fixed_split_size=2**62).draft())
    assert (placed.info.num_tiles, placed.info.num_merge_groups) == (1, 0)


def test_disabled_splitting_needs_no_float_workspace() -> None:
    size = Case("decode", [1], [131072], disable_split_kv=True).draft().size
    assert size.float_bytes == 0


def test_fixed_sizes_are_integers_of_at_least_one() -> None:
    assert make_split_policy(np.int32(3), False, 16, 64).fixed_kv == 64  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^fixed_split_size: got -3, a part has at least one page"):
        make_split_policy(-3, False, 16, 64)
