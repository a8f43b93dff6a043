# SPDX-License-Identifier: Apache-2.0
"""Lines of 16-row tiles: every head is cut alike where that leaves few SMs idle, and neighbouring CTAs then read the same tokens."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyinfer.schedule.capacity import BatchLimits
from cupyinfer.schedule.planner import bound
from cupyinfer.schedule.profile import PROFILES, DeviceProfile
from tests.schedule.batches import SMALL_GPUS, Case
from tests.schedule.simulator import busiest, check_cover, check_merge_groups, check_units, place, walk

UNEVEN = Case("decode", [1] * 40, list(range(100, 4100, 100)), num_kv_heads=8)


@st.composite
def uneven_cases(draw: st.DrawFn) -> Case:
    """Batches of 16-row tiles on GPUs whose SMs the heads divide evenly, or almost."""
    profile, num_kv_heads = draw(
        st.sampled_from(
            [*((SMALL_GPUS[4], heads) for heads in (2, 4, 8)), (PROFILES["h200"], 8), (PROFILES["h20"], 4), (PROFILES["a30"], 28)]
        )
    )
    batch = draw(st.integers(1, 8))
    kv_len = st.one_of(st.integers(0, 3000), st.sampled_from([1, 64, 65, 128]))
    kind = draw(st.sampled_from(["decode", "ragged"]))
    qo_lens = [1] * batch if kind == "decode" else draw(st.lists(st.integers(0, 8), min_size=batch, max_size=batch))
    kv_lens = draw(st.lists(kv_len, min_size=batch, max_size=batch))
    return Case(kind, qo_lens, kv_lens, num_kv_heads=num_kv_heads, group_size=2, causal=draw(st.booleans()), profile=profile)


@settings(max_examples=150)
@given(case=uneven_cases(), graph=st.booleans())
def test_every_head_is_cut_alike(case: Case, graph: bool) -> None:
    draft = case.draft(graph_limits=case.limits if graph and case.kind == "decode" else None)
    placed = place(draft)
    heads = case.num_kv_heads
    segments = walk(placed, heads)
    check_units(placed, segments, heads)
    check_merge_groups(placed, segments)
    check_cover(placed, segments, case.qo_lens, case.kv_lens, heads, case.group_size, case.causal, -1)
    assert placed.info.unit_step == heads
    largest = bound(case.shape, case.limits, case.profile)
    assert draft.size.float_bytes <= largest.float_bytes
    assert draft.size.int_bytes <= largest.int_bytes
    if not any(work[3] for work in placed.cta_work):
        return  # whole units, or pieces
    by_cta = defaultdict(list)
    for segment in segments:
        assert segment.head == segment.cta % heads
        group = segment.group if segment.group < 0 else segment.group - segment.head
        by_cta[segment.cta].append((segment.tile, segment.iter_begin, segment.num_iters, group, segment.part))
    assert all(by_cta[cta] == by_cta[cta - cta % heads] for cta in by_cta)
    total, shares = sum(segment.num_iters for segment in segments) // heads, len(by_cta) // heads
    assert shares == min(case.profile.num_sms // heads, total // 2)
    assert busiest(placed, segments) == -(-total // shares)
    parts = sum(segment.group >= 0 for segment in segments)
    assert parts <= 2 * heads * (shares - 1)


@pytest.mark.parametrize(
    ("name", "heads", "step"),
    [
        ("h200", 1, 1), ("h200", 2, 2), ("h200", 8, 8), ("h200", 32, 32), ("h200", 5, 5), ("h200", 7, 1),
        ("h20", 8, 1), ("a100", 8, 8), ("a100", 16, 1), ("l40s", 8, 1), ("b200", 8, 8),
    ],
)  # fmt: skip
def test_where_heads_are_cut_alike(name: str, heads: int, step: int) -> None:
    """At most 4% of the time of all SMs may go unused by that."""
    placed = place(replace(UNEVEN, num_kv_heads=heads, group_size=1, profile=PROFILES[name]).draft())
    assert placed.info.unit_step == step
    num_sms = PROFILES[name].num_sms
    assert placed.info.num_ctas == (num_sms // heads * heads if step > 1 else num_sms)


def test_larger_tiles_form_one_line() -> None:
    info = place(Case("ragged", [128, 128], [2000, 4000], num_kv_heads=2, group_size=1, profile=SMALL_GPUS[3]).draft()).info
    assert (info.cta_tile_q, info.unit_step, info.num_ctas) == (128, 1, 7)


@pytest.mark.parametrize("kv_lens", [[8192], [100], [64] * 256, [2048] * 256])
def test_equal_batches_that_fill_the_gpu_share_nothing_else(kv_lens: list[int]) -> None:
    """Pieces and whole units are what they are without the step."""
    case = replace(UNEVEN, qo_lens=[1] * len(kv_lens), kv_lens=kv_lens)
    placed = place(case.draft())
    assert not any(work[3] for work in placed.cta_work)
    check_units(placed, walk(placed, 8), 8)


def test_as_many_heads_as_sms_share_nothing() -> None:
    profile = DeviceProfile("8 SMs", "sm_80", 8, 164 * 1024, 163 * 1024)
    case = replace(UNEVEN, profile=profile)
    placed = place(case.draft())
    segments = walk(placed, 8)
    check_units(placed, segments, 8)
    assert placed.info.num_merge_groups == 0
    assert busiest(placed, segments) * 8 == sum(segment.num_iters for segment in segments)
    assert bound(case.shape, case.limits, profile).float_bytes == 0


def test_a_graph_keeps_the_step() -> None:
    limits = BatchLimits(64, 64)
    infos = [
        place(replace(UNEVEN, qo_lens=[1] * len(kv), kv_lens=kv).draft(graph_limits=limits)).info
        for kv in ([], [8192], [9, 8192], [2048] * 64, list(range(64, 128)))
    ]
    assert {(info.unit_step, info.num_ctas, info.partial_lse_offset) for info in infos} == {(8, 132, infos[0].partial_lse_offset)}
