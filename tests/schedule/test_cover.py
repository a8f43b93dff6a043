# SPDX-License-Identifier: Apache-2.0
"""Every visible key of every query row is attended to exactly once, whatever the batch, the GPU and the way of splitting."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyinfer.schedule.capacity import BatchLimits
from cupyinfer.schedule.planner import PlanDraft
from cupyinfer.schedule.profile import PROFILES
from cupyinfer.schedule.schedule import partial_row_budget
from tests.schedule.batches import SMALL_GPUS, Case, cases, offsets
from tests.schedule.simulator import (
    Placed,
    Segment,
    busiest,
    check_cover,
    check_merge_groups,
    check_tiles,
    check_units,
    num_iters,
    place,
    walk,
)


def check(case: Case, draft: PlanDraft | None = None) -> tuple[Placed, list[Segment]]:
    """Place, walk and check everything but balance."""
    placed = place(case.draft() if draft is None else draft)
    segments = walk(placed, case.num_kv_heads)
    check_units(placed, segments, case.num_kv_heads)
    check_merge_groups(placed, segments)
    span = case.group_size, case.causal, case.window_left
    check_tiles(placed, offsets(case.qo_lens).tolist(), case.kv_indptr.tolist(), case.qo_lens, case.kv_lens, *span)
    check_cover(placed, segments, case.qo_lens, case.kv_lens, case.num_kv_heads, *span)
    return placed, segments


@settings(max_examples=200)
@given(case=cases())
def test_every_visible_key_is_covered_once(case: Case) -> None:
    placed, segments = check(case)
    # A launch has no CTA without work.
    assert {segment.cta for segment in segments} == set(range(placed.info.num_ctas))


@settings(max_examples=100)
@given(case=cases(max_qo=20, max_kv=400), spare=st.tuples(st.integers(0, 3), st.integers(0, 200), st.integers(0, 500)))
def test_cuda_graph_plans_cover_every_visible_key_once(case: Case, spare: tuple[int, int, int]) -> None:
    batch, tokens, keys = (
        case.limits.max_batch_size + spare[0],
        case.limits.max_num_qo_tokens + spare[1],
        (case.limits.max_kv_len or 0) + spare[2],
    )
    limits = BatchLimits(batch, batch if case.kind == "decode" else tokens, keys)
    placed, _ = check(case, case.draft(graph_limits=limits))
    config = case.shape.config(placed.info.cta_tile_q, case.profile)
    assert placed.info.num_ctas == case.profile.num_sms * config.ctas_per_sm


@settings(max_examples=150)
@given(case=cases(max_batch=12, max_qo=300, max_kv=4000))
def test_work_is_balanced(case: Case) -> None:
    """The busiest CTA does at most what an even cut into whole iterations, or into shares of at least two, gives it.

    Of 16-row tiles, every head may be cut for itself, into as many shares as all heads find CTAs for, and equal units may take 4% longer,
    or one iteration where they have just one or two each. Larger tiles may be shared
    among one CTA per SM where two would fit, since parts of 64 and 128 rows cost more: twice as much, then. They are shared only
    where that gains a seventh, counting one and a half iterations for each unit and four for merging.
    """
    case = replace(case, fixed_split_size=None, disable_split_kv=False)
    placed = place(case.draft())
    segments = walk(placed, case.num_kv_heads)
    config = case.shape.config(placed.info.cta_tile_q, case.profile, placed.info.kv_tile)
    total = sum(segment.num_iters for segment in segments)
    even = -(-total // (case.profile.num_sms * config.ctas_per_sm))
    limit = 1.02 * config.ctas_per_sm * even
    if config.cta_tile_q > 16:
        shortest = min((num_iters(tile, config.kv_tile) for tile in placed.tiles), default=1)
        limit = config.ctas_per_sm * (1.15 * (even + 1.5 * (even / shortest + 3)) + 1.02 * 4)
    elif placed.info.unit_step > 1:
        shares = case.profile.num_sms // case.num_kv_heads
        assert shares * case.num_kv_heads >= 0.96 * case.profile.num_sms
        limit = max(limit, -(-total // (case.num_kv_heads * shares)))
    if config.cta_tile_q == 16 and len({num_iters(tile, config.kv_tile) for tile in placed.tiles if tile["split_part"] == 0}) == 1:
        limit = max(1.04 * total / case.profile.num_sms, even + 1, limit)
    assert busiest(placed, segments) <= max(limit, 3)
    assert placed.info.num_partial_rows <= partial_row_budget(case.profile.num_sms, config)


@pytest.mark.parametrize("kind", ["decode", "paged", "ragged"])
def test_one_token(kind: str) -> None:
    placed, segments = check(Case(kind, [1], [1]))
    assert len(segments) == 2
    assert placed.info.num_merge_groups == 0


@pytest.mark.parametrize("kind", ["decode", "paged", "ragged"])
@pytest.mark.parametrize("split", [{}, {"fixed_split_size": 4}, {"disable_split_kv": True}])
def test_empty_batch(kind: str, split: dict[str, int]) -> None:
    case = Case(kind, [], [], **split)
    placed, segments = check(case)
    assert (placed.info.num_ctas, placed.info.num_tiles, segments) == (0, 0, [])
    assert case.draft().size.total_bytes == 0


@pytest.mark.parametrize("kind", ["paged", "ragged"])
def test_requests_without_queries_get_no_tile(kind: str) -> None:
    placed, _ = check(Case(kind, [0, 3, 0], [7, 100, 0]))
    assert {tile["request"] for tile in placed.tiles} == {1}
    assert check(Case(kind, [0, 0], [7, 9]))[0].info.num_ctas == 0


def test_requests_without_keys_still_get_their_rows_written() -> None:
    _, segments = check(Case("decode", [1, 1, 1], [0, 17, 0]))
    assert {(segment.tile, segment.head) for segment in segments} == {(tile, head) for tile in range(3) for head in range(2)}


def test_more_requests_than_a_grid_axis_holds() -> None:
    case = Case("decode", [1] * 65536, [1] * 65536, page_size=1, num_kv_heads=1, group_size=1, head_dims=(64, 64))
    placed = place(case.draft())
    segments = walk(placed, 1)
    assert sorted(segment.tile for segment in segments) == list(range(65536))
    assert placed.info.num_merge_groups == 0
    assert busiest(placed, segments) == -(-65536 // 132)


@pytest.mark.parametrize("profile", [SMALL_GPUS[0], PROFILES["h200"]])
def test_causal_with_more_queries_than_keys(profile: object) -> None:
    """The first queries see nothing: case of a prompt whose cache was dropped."""
    case = Case("ragged", [200, 33], [50, 0], causal=True, group_size=1)
    check(case)
    check(replace(case, group_size=12))


def test_window_larger_than_the_context_changes_nothing() -> None:
    case = Case("paged", [40, 7], [300, 900], causal=True)
    wide = replace(case, window_left=901)
    np.testing.assert_array_equal(case.draft().schedule.tiles, wide.draft().schedule.tiles)
    np.testing.assert_array_equal(case.draft().schedule.partition.cta_work, wide.draft().schedule.partition.cta_work)


def test_window_skips_the_keys_before_it() -> None:
    placed, _ = check(Case("decode", [1], [10000], window_left=100))
    assert sorted((tile["kv_begin"], tile["kv_end"]) for tile in placed.tiles) == [(9856, 9984), (9984, 10000)]


def test_mask_offsets_travel_with_the_tiles() -> None:
    case = Case("paged", [200, 30], [300, 900])
    placed = place(case.draft(mask_begin=np.array([0, 7500])))
    assert {(tile["request"], tile["mask_begin"]) for tile in placed.tiles} == {(0, 0), (1, 7500)}


def test_only_the_last_wave_of_equal_units_is_shared() -> None:
    """19 units of 10 iterations on 14 CTAs: 14 whole ones, and 5 shared by 10 CTAs, as many as the budget of parts allows."""
    case = Case("ragged", [128] * 19, [640] * 19, num_kv_heads=1, group_size=1, profile=SMALL_GPUS[3])
    placed, segments = check(case)
    assert placed.info.num_ctas == 14
    assert sum(segment.group < 0 for segment in segments) == 14
    assert busiest(placed, segments) == 10 + 5
    assert placed.info.num_merge_groups == 5


def test_large_tiles_of_unequal_length_are_shared_by_one_cta_per_sm() -> None:
    placed, segments = check(Case("ragged", [128, 128], [2000, 4000], num_kv_heads=1, group_size=1, profile=SMALL_GPUS[3]))
    assert placed.info.num_ctas == 7
    assert busiest(placed, segments) == -(-(32 + 63) // 7)


def test_equal_units_are_cut_into_as_many_pieces_each() -> None:
    placed, segments = check(Case("ragged", [128] * 2, [4480] * 2, num_kv_heads=1, group_size=1, profile=SMALL_GPUS[3]))
    assert placed.info.num_ctas == 14
    assert {segment.num_iters for segment in segments} == {10}
    assert placed.info.num_partial_rows == 14 * 128


def test_shares_of_less_than_two_iterations_are_not_worth_a_merge() -> None:
    placed, segments = check(Case("ragged", [128] * 19, [128] * 19, num_kv_heads=1, group_size=1, profile=SMALL_GPUS[3]))
    assert placed.info.num_merge_groups == 0
    assert busiest(placed, segments) == 4
