# SPDX-License-Identifier: Apache-2.0
"""The host backend against the float64 oracle, on plans cut by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cupyinfer.backends.host import cta_segments, run_cta, run_host
from cupyinfer.backends.host_segment import HostProblem
from cupyinfer.errors import ArgumentError
from tests.support.compare import assert_attention_close
from tests.support.hand_plan import Batch, Plan, Workspaces, cut, make_batch, make_tiles, pack_masks
from tests.support.oracle import AttentionOptions, attention_oracle, low_precision_reference

Array = npt.NDArray[Any]


def merge_group(first_row: int, num_parts: int) -> list[int]:
    """A merge group's record: eight counters that nothing has arrived at, and two unused fields."""
    return [first_row, num_parts, *[0] * 10]


def make_problem(batch: Batch, options: AttentionOptions, plan: Plan, space: Workspaces, mask: Array | None = None) -> HostProblem:
    num_tokens, num_qo_heads, head_dim_qk = batch.q.shape
    return HostProblem(
        q=batch.q,
        k=batch.k,
        v=batch.v,
        o=np.full((num_tokens, num_qo_heads, batch.v.shape[-1]), np.nan, batch.q.dtype),
        lse=np.full((num_tokens, num_qo_heads), np.nan, np.float32),
        tiles=space.tiles,
        cta_work=space.cta_work,
        merge_groups=space.merge_groups,
        page_indices=batch.page_indices,
        partial_o=space.partial_o,
        partial_lse=space.partial_lse,
        cta_tile_q=plan.cta_tile_q,
        kv_tile=plan.kv_tile,
        causal=options.causal,
        window_left=options.window_left,
        sm_scale=head_dim_qk**-0.5 if options.sm_scale is None else options.sm_scale,
        logits_soft_cap=options.logits_soft_cap,
        pos_encoding=options.pos_encoding,
        alibi_slopes=options.alibi_slopes,
        rope_scale=options.rope_scale,
        rope_theta=options.rope_theta,
        sinks=options.sinks,
        k_scale=options.k_scale,
        v_scale=options.v_scale,
        mask=mask,
    )


def check(problem: HostProblem, batch: Batch, options: AttentionOptions, masks: Sequence[Array] | None = None) -> None:
    call = (batch.q, batch.qo_lens, batch.keys, batch.values, options, masks)
    assert problem.lse is not None
    assert_attention_close(problem.o, problem.lse, attention_oracle(*call), low_precision_reference(*call), batch.qo_lens)


def run_and_check(batch: Batch, options: AttentionOptions, plan: Plan, masks: Sequence[Array] | None = None) -> HostProblem:
    space = Workspaces(plan, batch.v.shape[-1])
    problem = make_problem(batch, options, plan, space, None if masks is None else pack_masks(masks)[0])
    run_host(problem)
    check(problem, batch, options, masks)
    assert not space.merge_groups[:, 2:].any(), "arrived counters must return to zero"
    assert space.guards_intact()
    assert np.isfinite(space.partial_o).all(), "every planned part is written"
    return problem


def test_whole_units_in_waves_back_and_forth() -> None:
    # 7 tiles x 2 heads on 3 CTAs: five waves, the last of two units; a unit missed or moved leaves NaN or doubles nothing.
    batch = make_batch([1] * 7, [5, 64, 65, 130, 1, 200, 17])
    plan = cut(make_tiles(batch, AttentionOptions()), 2, 3, 14)
    assert [work[3] for work in plan.cta_work] == [0, 0, 0]
    problem = run_and_check(batch, AttentionOptions(), plan)
    assert [[segment.unit for segment in cta_segments(problem, cta)] for cta in range(3)] == [
        [0, 5, 6, 11, 12],
        [1, 4, 7, 10, 13],
        [2, 3, 8, 9],
    ]


def test_one_unit_cut_across_three_ctas_by_hand() -> None:
    batch = make_batch([1], [300], num_qo_heads=3, num_kv_heads=1)
    tiles = [[0, 0, 0, 3, 0, 300, 300, 0, 1, -1, 0, 0]]
    work = [[0, 0, 0, 2, 0, 0, -1, 0], [0, 0, 2, 1, 0, 1, -1, 0], [0, 0, 3, 2, 0, 2, -1, 0]]
    plan = Plan(16, 64, tiles, work, [merge_group(0, 3)], 9)
    run_and_check(batch, AttentionOptions(), plan)
    # Only the last CTA to arrive, whichever it is, writes the output.
    space = Workspaces(plan, 64)
    problem = make_problem(batch, AttentionOptions(), plan, space)
    for arrived, cta in enumerate((2, 0), start=1):
        run_cta(problem, cta)
        assert np.isnan(problem.o).all() and space.merge_groups[0, 2] == arrived
    run_cta(problem, 1)
    check(problem, batch, AttentionOptions())


def test_a_cta_spanning_three_units_by_hand() -> None:
    # Units of 3, 1 and 4 iterations. CTA 0 does 2; CTA 1 the tail of unit 0, unit 1 and the head of unit 2; CTA 2 the rest.
    batch = make_batch([1, 1, 1], [150, 20, 256], num_qo_heads=2, num_kv_heads=1, page_size=4)
    tiles = [[r, r, 0, 2, 0, n, n, base, 1, -1, 0, 0] for r, (n, base) in enumerate(zip(batch.kv_lens, batch.kv_bases, strict=True))]
    work = [[0, 0, 0, 2, 0, 0, -1, 0], [0, 0, 2, 3, 0, 1, 1, 0], [0, 2, 1, 3, 1, 1, -1, 0]]
    run_and_check(batch, AttentionOptions(), Plan(16, 64, tiles, work, [merge_group(0, 2), merge_group(4, 2)], 8))


@pytest.mark.parametrize("cuts", [(0, 0, 17), (1, 2, 3), (5, 5, 12), (16, 17, 17)])
def test_uneven_and_empty_shares(cuts: tuple[int, ...]) -> None:
    batch = make_batch([2, 1, 3], [150, 64, 190], num_qo_heads=2, num_kv_heads=2)
    plan = cut(make_tiles(batch, AttentionOptions()), 2, 4, 1, cuts)
    run_and_check(batch, AttentionOptions(), plan)


def test_a_cta_without_a_share_does_nothing() -> None:
    batch = make_batch([1], [100], num_qo_heads=2, num_kv_heads=1)
    plan = cut(make_tiles(batch, AttentionOptions()), 1, 5, 0)
    empty = [cta for cta, work in enumerate(plan.cta_work) if work[3] == 0]
    assert len(empty) == 3
    space = Workspaces(plan, 64)
    problem = make_problem(batch, AttentionOptions(), plan, space)
    before = space.int_bytes.tobytes(), space.float_bytes.tobytes(), problem.o.tobytes()
    for cta in empty:
        run_cta(problem, cta)
    assert (space.int_bytes.tobytes(), space.float_bytes.tobytes(), problem.o.tobytes()) == before


@pytest.mark.parametrize("causal", [False, True])
def test_zero_length_requests(causal: bool) -> None:
    options = AttentionOptions(causal=causal)
    batch = make_batch([2, 0, 3, 1, 0], [0, 9, 70, 0, 0])
    problem = run_and_check(batch, options, cut(make_tiles(batch, options), 2, 3, 0))
    assert problem.lse is not None
    assert not problem.o[[0, 1, 5]].any() and np.isneginf(problem.lse[[0, 1, 5]]).all()


def test_an_empty_batch_writes_nothing() -> None:
    batch = make_batch([], [])
    run_and_check(batch, AttentionOptions(), cut(make_tiles(batch, AttentionOptions()), 2, 3, 0))


@pytest.mark.parametrize(("split_size", "num_whole_units"), [(64, None), (128, None), (128, 5)])
def test_fixed_split_chunks_merge_per_kv_head(split_size: int, num_whole_units: int | None) -> None:
    options = AttentionOptions(causal=True)
    batch = make_batch([1, 9, 2], [500, 130, 40], num_qo_heads=6, num_kv_heads=2)
    plan = make_tiles(batch, options, split_size=split_size)
    assert {tile[9] for tile in plan.tiles} >= {-1, 0, 2}
    num_units = 2 * len(plan.tiles)
    # Cuts at unit borders only: a chunk is never cut again.
    plan = cut(plan, 2, 4, num_units) if num_whole_units is None else _cut_at_units(plan, num_units, num_whole_units)
    run_and_check(batch, options, plan)


def _cut_at_units(plan: Plan, num_units: int, num_whole_units: int) -> Plan:
    iters = [max(1, -(-(plan.tiles[u // 2][5] - plan.tiles[u // 2][4]) // plan.kv_tile)) for u in range(num_whole_units, num_units)]
    ends = np.cumsum(iters).tolist()
    return cut(plan, 2, 3, num_whole_units, (ends[0], ends[3]))


SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
SINKS = np.array([2.0, -1.0, 30.0, -np.inf], np.float32)
OPTIONS = {
    "plain": AttentionOptions(),
    "causal": AttentionOptions(causal=True),
    "window": AttentionOptions(window_left=40),
    "window-causal": AttentionOptions(causal=True, window_left=70),
    "window-of-one": AttentionOptions(causal=True, window_left=0),
    "scale": AttentionOptions(sm_scale=0.3),
    "soft-cap": AttentionOptions(logits_soft_cap=3.0),
    "alibi": AttentionOptions(pos_encoding="ALIBI", alibi_slopes=SLOPES),
    "alibi-causal-cap": AttentionOptions(causal=True, logits_soft_cap=5.0, pos_encoding="ALIBI", alibi_slopes=SLOPES),
    "rope": AttentionOptions(causal=True, pos_encoding="ROPE_LLAMA"),
    "rope-scaled": AttentionOptions(pos_encoding="ROPE_LLAMA", rope_scale=4.0, rope_theta=5e5),
    "sinks": AttentionOptions(causal=True, sinks=SINKS),
    "sinks-window-cap": AttentionOptions(window_left=33, logits_soft_cap=8.0, sinks=SINKS),
    "v-scale": AttentionOptions(v_scale=np.array([0.5, 2.0]), k_scale=0.7),
}


@pytest.mark.parametrize("q_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_on_cut_units(name: str, q_dtype: str) -> None:
    # qo_len below, at and above kv_len, and no keys at all.
    options = OPTIONS[name]
    batch = make_batch([3, 70, 20, 2], [400, 70, 11, 0], head_dims=(128, 128), q_dtype=q_dtype, q_factor=2.0)
    plan = cut(make_tiles(batch, options, cta_tile_q=64, kv_tile=16), 2, 7, 3)
    assert plan.groups, "the case is about shared units"
    run_and_check(batch, options, plan)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_span_wider_than_the_rows_see_changes_nothing(name: str) -> None:
    options = OPTIONS[name]
    batch = make_batch([3, 5], [300, 90])
    plan = make_tiles(batch, AttentionOptions())
    for tile in plan.tiles:
        assert tile[4:6] == [0, tile[6]]
        tile[5] += 3  # into the unused slots of the last page
    run_and_check(batch, options, cut(plan, 2, 6, 0))


def test_keys_left_of_every_window_stay_unread() -> None:
    # Their pages may have been given away: the span of a tile starts at a multiple of kv_tile, the window of its first row later.
    options = AttentionOptions(causal=True, window_left=20)
    batch = make_batch([1, 4], [190, 300], layout="RAGGED")
    for base, qo_len, kv_len in zip(batch.kv_bases, batch.qo_lens, batch.kv_lens, strict=True):
        batch.k[base : base + kv_len - qo_len - 20] = np.nan
        batch.v[base : base + kv_len - qo_len - 20] = np.nan
    plan = make_tiles(batch, options)
    assert [tile[4] for tile in plan.tiles] == [128, 256]
    run_and_check(batch, options, cut(plan, 2, 3, 1))


def test_a_sink_counts_once_whatever_the_split_and_alone_without_keys() -> None:
    options = AttentionOptions(causal=True, window_left=10, sinks=SINKS)
    batch = make_batch([1, 2], [300, 0])
    whole = run_and_check(batch, options, cut(make_tiles(batch, AttentionOptions()), 2, 1, 4))
    split = run_and_check(batch, options, cut(make_tiles(batch, AttentionOptions()), 2, 9, 0))
    assert whole.lse is not None and split.lse is not None
    np.testing.assert_allclose(split.lse, whole.lse, rtol=1e-6)
    np.testing.assert_allclose(split.lse[1], SINKS / np.log(2), rtol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_custom_mask_of_odd_lengths(causal: bool) -> None:
    rng = np.random.default_rng(5)
    options = AttentionOptions(causal=causal)
    batch = make_batch([3, 2, 7], [5, 7, 131])
    masks = [rng.random((qo_len, kv_len)) < 0.6 for qo_len, kv_len in zip(batch.qo_lens, batch.kv_lens, strict=True)]
    masks[2][4] = False  # one query sees nothing
    plan = make_tiles(batch, options, mask_begins=pack_masks(masks)[1])
    assert [tile[11] for tile in plan.tiles] == [0, 2, 4]
    problem = run_and_check(batch, options, cut(plan, 2, 4, 0), masks)
    assert not problem.o[9].any()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("group", [1, 5, 6])
def test_groups_pages_and_layouts(group: int, page_size: int, layout: str) -> None:
    options = AttentionOptions(causal=True)
    batch = make_batch([1, 8, 4], [150, 97, 4], num_qo_heads=2 * group, num_kv_heads=2, page_size=page_size, layout=layout)
    assert np.isnan(batch.k.astype(np.float32)).any()
    run_and_check(batch, options, cut(make_tiles(batch, options), 2, 4, 2))


@pytest.mark.parametrize("head_dims", [(64, 64), (192, 128), (256, 256)])
def test_ragged_keys_between_nan(head_dims: tuple[int, int]) -> None:
    options = AttentionOptions(causal=True)
    batch = make_batch([90, 1, 30], [120, 65, 30], head_dims=head_dims, layout="RAGGED", q_dtype="bfloat16")
    run_and_check(batch, options, cut(make_tiles(batch, options, cta_tile_q=128), 2, 4, 1))


@pytest.mark.parametrize("layout", ["NHD", "RAGGED"])
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("q_dtype", ["float16", "bfloat16"])
def test_fp8_cache_with_scales_per_kv_head(q_dtype: str, kv_dtype: str, layout: str) -> None:
    options = AttentionOptions(causal=True, k_scale=np.array([0.25, 1.5]), v_scale=np.array([0.5, 3.0]))
    batch = make_batch([1, 6], [200, 75], layout=layout, q_dtype=q_dtype, kv_dtype=kv_dtype)
    run_and_check(batch, options, cut(make_tiles(batch, options), 2, 3, 1))


def test_a_context_longer_than_one_block_of_keys() -> None:
    options = AttentionOptions(causal=True)
    batch = make_batch([1, 3], [5000, 2049], page_size=64)
    run_and_check(batch, options, cut(make_tiles(batch, options), 2, 1, 4))


def test_results_do_not_depend_on_cta_order_nor_on_what_buffers_held() -> None:
    options = AttentionOptions(causal=True, sinks=SINKS)
    batch = make_batch([1, 40, 2], [700, 300, 90])
    plan = cut(make_tiles(batch, options), 2, 7, 2)
    results = []
    for dirt, seed in ((0xFF, 0), (0x00, 1), (0x7F, 2)):
        space = Workspaces(plan, 64, dirt)
        problem = make_problem(batch, options, plan, space)
        for _ in range(2):
            for cta in np.random.default_rng(seed).permutation(7).tolist():
                run_cta(problem, cta)
            assert problem.lse is not None and not space.merge_groups[:, 2:].any()
            results.append(problem.o.tobytes() + problem.lse.tobytes())
    assert len(set(results)) == 1
    check(problem, batch, options)


def test_without_lse() -> None:
    batch = make_batch([1], [70])
    plan = cut(make_tiles(batch, AttentionOptions()), 2, 2, 0)
    with_lse = run_and_check(batch, AttentionOptions(), plan)
    fields = {name: getattr(with_lse, name) for name in HostProblem.__dataclass_fields__}
    without = HostProblem(**{**fields, "lse": None, "o": np.zeros_like(with_lse.o)})
    run_host(without)
    assert without.o.tobytes() == with_lse.o.tobytes()


def test_alibi_needs_slopes() -> None:
    batch = make_batch([1], [70])
    plan = cut(make_tiles(batch, AttentionOptions()), 2, 1, 2)
    with pytest.raises(ArgumentError, match="alibi_slopes"):
        make_problem(batch, AttentionOptions(pos_encoding="ALIBI"), plan, Workspaces(plan, 64))


TILE_FAULTS = {"q_begin": (1, 1), "row_begin": (2, 16), "num_rows": (3, -1), "kv_begin": (4, 64), "kv_end": (5, -1), "kv_base": (7, 1)}


@pytest.mark.parametrize("fault", TILE_FAULTS)
def test_a_wrong_tile_record_gives_a_wrong_result(fault: str) -> None:
    options = AttentionOptions(causal=True)
    batch = make_batch([20, 20], [150, 160])
    plan = cut(make_tiles(batch, options), 2, 3, len(make_tiles(batch, options).tiles) * 2)
    column, change = TILE_FAULTS[fault]
    plan.tiles[0][column] += change
    problem = make_problem(batch, options, plan, Workspaces(plan, 64))
    run_host(problem)
    with pytest.raises(AssertionError, match="out of bounds, in requests"):
        check(problem, batch, options)


@pytest.mark.parametrize("fault", ["part", "first_row", "iter_begin", "num_parts"])
def test_a_wrong_share_gives_a_wrong_result(fault: str) -> None:
    batch = make_batch([1], [400])
    plan = cut(make_tiles(batch, AttentionOptions()), 2, 4, 0)
    assert plan.groups == [merge_group(0, 2), merge_group(4, 2)]
    if fault == "part":
        plan.cta_work[1][5] = 0
    elif fault == "first_row":
        # The first unit's merge reads rows of the second, which still hold dirt.
        plan.groups[0][0] = 2
    elif fault == "iter_begin":
        plan.cta_work[1][2] -= 1
        plan.cta_work[1][3] -= 1
    else:
        plan.groups[0][1] = 3
    space = Workspaces(plan, 64)
    problem = make_problem(batch, AttentionOptions(), plan, space)
    if fault == "first_row":
        order = [0, 2, 1, 3]
        for cta in order:
            run_cta(problem, cta)
    else:
        run_host(problem)
    with pytest.raises(AssertionError, match="out of bounds"):
        check(problem, batch, AttentionOptions())
