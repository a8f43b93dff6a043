# SPDX-License-Identifier: Apache-2.0
"""Equal units of 16-row tiles: equal pieces that are tiles of their own, or whole units dealt out evenly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyinfer.schedule.capacity import BatchLimits
from cupyinfer.schedule.planner import bound
from cupyinfer.schedule.profile import PROFILES
from cupyinfer.schedule.schedule import partial_row_budget
from tests.schedule.batches import GROUP_SIZES, SMALL_GPUS, Case, offsets
from tests.schedule.simulator import busiest, check_cover, check_merge_groups, check_tiles, check_units, place, walk

ONE_PROMPT = Case("decode", [1], [8192], num_kv_heads=8)


@st.composite
def equal_cases(draw: st.DrawFn) -> Case:
    """Requests that all have the same number of keys, and few enough rows for one tile of 16 each."""
    kind = draw(st.sampled_from(["decode", "paged", "ragged"]))
    batch = draw(st.integers(1, 5))
    group_size = draw(st.sampled_from([size for size in GROUP_SIZES if size <= 16]))
    qo_len = 1 if kind == "decode" else draw(st.integers(1, 16 // group_size))
    return Case(
        kind,
        [qo_len] * batch,
        [draw(st.integers(0, 3000))] * batch,
        page_size=draw(st.sampled_from([1, 16])),
        num_kv_heads=draw(st.integers(1, 3)),
        group_size=group_size,
        head_dims=(64, 64),
        causal=draw(st.booleans()),
        window_left=draw(st.sampled_from([-1, -1, 0, 64, 700, 2000])),
        profile=draw(st.sampled_from([*SMALL_GPUS, PROFILES["h200"]])),
    )


@settings(max_examples=200)
@given(case=equal_cases(), spare=st.none() | st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_pieces_cover_every_key_once_and_stay_within_every_bound(case: Case, spare: tuple[int, int] | None) -> None:
    limits = case.limits
    if spare is not None:
        tokens = case.limits.max_num_qo_tokens + spare[0] + (0 if case.kind == "decode" else spare[1])
        limits = BatchLimits(case.limits.max_batch_size + spare[0], tokens)
    draft = case.draft(graph_limits=None if spare is None else limits)
    placed = place(draft)
    segments = walk(placed, case.num_kv_heads)
    check_units(placed, segments, case.num_kv_heads)
    check_merge_groups(placed, segments)
    span = case.group_size, case.causal, case.window_left
    check_tiles(placed, offsets(case.qo_lens).tolist(), case.kv_indptr.tolist(), case.qo_lens, case.kv_lens, *span)
    check_cover(placed, segments, case.qo_lens, case.kv_lens, case.num_kv_heads, *span)

    config = draft.schedule.config
    grid = case.profile.num_sms * config.ctas_per_sm
    largest = bound(case.shape, limits, case.profile)
    assert draft.size.float_bytes <= largest.float_bytes
    assert draft.size.int_bytes <= largest.int_bytes
    assert placed.info.num_partial_rows <= partial_row_budget(case.profile.num_sms, config)
    if all(tile["split_group"] < 0 for tile in placed.tiles):
        return
    # One piece per CTA; all of a unit's are equal but for a shorter last one, and none is too short for eight warps.
    assert len(placed.tiles) * case.num_kv_heads == len({segment.cta for segment in segments}) <= grid
    longest = max(tile["kv_end"] - tile["kv_begin"] for tile in placed.tiles)
    assert longest >= 128
    for segment in segments:
        parts = placed.merge_groups[segment.group][1]
        assert segment.kv_end - segment.kv_begin == longest or segment.part == parts - 1
    total = sum(segment.num_iters for segment in segments)
    assert longest <= 128 or busiest(placed, segments) * grid <= 1.04 * total


def test_one_prompt_is_cut_into_sixteen_pieces_per_head() -> None:
    placed = place(ONE_PROMPT.draft())
    segments = walk(placed, 8)
    assert placed.info.num_ctas == len(segments) == 128
    assert {segment.kv_end - segment.kv_begin for segment in segments} == {512}
    assert [group[1] for group in placed.merge_groups] == [16] * 8
    assert sorted(tile["kv_begin"] for tile in placed.tiles) == list(range(0, 8192, 512))
    assert placed.info.num_partial_rows == 128 * 4


@pytest.mark.parametrize(("kv_len", "lengths"), [(64, [64]), (129, [1, 128]), (693, [53] + [128] * 5), (2048, [128] * 16)])
def test_short_prompts_are_cut_into_pieces_of_two_iterations(kv_len: int, lengths: list[int]) -> None:
    placed = place(replace(ONE_PROMPT, kv_lens=[kv_len]).draft())
    assert sorted(tile["kv_end"] - tile["kv_begin"] for tile in placed.tiles) == lengths
    check_units(placed, walk(placed, 8), 8)


def test_pieces_that_leave_many_sms_idle_are_not_made() -> None:
    """72 units fill 132 SMs neither whole nor in halves: an even cut does."""
    placed = place(replace(ONE_PROMPT, qo_lens=[1] * 9, kv_lens=[8192] * 9).draft())
    assert all(tile["split_group"] < 0 for tile in placed.tiles)
    assert placed.info.num_ctas == 128
    assert busiest(placed, walk(placed, 8)) == -(-9 * 128 // 16)


def test_pieces_begin_where_the_window_does() -> None:
    placed = place(replace(ONE_PROMPT, window_left=4090).draft())
    assert len(placed.tiles) > 1
    assert min(tile["kv_begin"] for tile in placed.tiles) == 4096
    assert max(tile["kv_end"] for tile in placed.tiles) == 8192


def test_pieces_are_not_made_where_a_request_must_not_depend_on_the_gpu() -> None:
    whole = place(replace(ONE_PROMPT, disable_split_kv=True).draft())
    assert [(tile["kv_begin"], tile["kv_end"], tile["split_group"]) for tile in whole.tiles] == [(0, 8192, -1)]
    assert (whole.info.num_ctas, whole.info.num_merge_groups, whole.info.float_bytes) == (8, 0, 0)
    plans = [place(replace(ONE_PROMPT, fixed_split_size=60, profile=PROFILES[name]).draft()) for name in ("h200", "l4")]
    for placed in plans:
        assert sorted(tile["kv_end"] - tile["kv_begin"] for tile in placed.tiles) == [8192 - 8 * 960] + [960] * 8
    assert plans[0].tiles == plans[1].tiles


def test_graphs_have_room_for_pieces() -> None:
    """One request needs 16 tile records for its pieces, and 64 different ones need theirs; nothing moves in between."""
    limits = BatchLimits(64, 64)
    infos = []
    for kv_lens in ([8192], [8192, 100], list(range(64, 128)), [2048] * 4, []):
        draft = replace(ONE_PROMPT, qo_lens=[1] * len(kv_lens), kv_lens=kv_lens).draft(graph_limits=limits)
        infos.append(place(draft).info)
    assert [info.num_tiles for info in infos] == [16, 2, 64, 16, 0]
    assert len({(info.num_ctas, info.cta_work_offset, info.merge_groups_offset, info.partial_lse_offset) for info in infos}) == 1
    # More pieces than the graph has requests.
    small = place(ONE_PROMPT.draft(graph_limits=BatchLimits(1, 1))).info
    assert small.num_tiles == 16
    assert small.cta_work_offset - small.tiles_offset == 16 * 48


@pytest.mark.parametrize(
    ("changes", "num_ctas", "most"),
    [
        # Nine equal units of 16 rows: five CTAs with two each, but for one.
        ({"kv_lens": [128] * 9}, 5, 4),
        # Units of 2 and 1 iterations: with as few CTAs as that, one would get 3.
        ({"kv_lens": [128] * 3 + [64] * 5}, 7, 2),
        # Larger tiles are two to an SM, and the second is faster alone: every SM is used.
        ({"kind": "ragged", "qo_lens": [128] * 16, "kv_lens": [64] * 16}, 14, 2),
    ],
)
def test_ctas_of_whole_units(changes: dict[str, Any], num_ctas: int, most: int) -> None:
    case = Case("decode", [1] * len(changes["kv_lens"]), [], num_kv_heads=1, group_size=1, disable_split_kv=True, profile=SMALL_GPUS[3])
    placed = place(replace(case, **changes).draft())
    segments = walk(placed, 1)
    assert placed.info.num_ctas == num_ctas
    assert busiest(placed, segments) == most
