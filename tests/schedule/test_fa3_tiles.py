# SPDX-License-Identifier: Apache-2.0
"""Keys per tile of fa3: which batches get the longer tiles, and that schedules with them are complete and sized exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyinfer.attention.options import make_options
from cupyinfer.errors import ArgumentError, UnsupportedError
from cupyinfer.jit.ahead import fa3_variants
from cupyinfer.jit.variant import AttentionVariant
from cupyinfer.schedule.bounds import WorkspaceLimits, workspace_bound
from cupyinfer.schedule.capacity import BatchLimits
from cupyinfer.schedule.profile import PROFILES
from cupyinfer.schedule.tiles import FA3_TILES, fa3_kv_tile, fa3_kv_tiles, fa3_tile_config, fa3_tile_qs
from tests.schedule.batches import Case, cases
from tests.schedule.simulator import Placed, busiest, num_iters, place, walk
from tests.schedule.test_cover import check


def fa3_case(kind: str, qo_lens: list[int], kv_lens: list[int], page_size: int = 16, **changed: Any) -> Case:
    """A batch that fa3 serves, of 8 KV heads and head_dim 128 unless changed."""
    return Case(kind, qo_lens, kv_lens, page_size, **{"num_kv_heads": 8, "backend": "fa3", **changed})


def long(length: int, count: int = 1, **changed: Any) -> Case:
    """`count` requests of as many queries as keys."""
    return fa3_case("ragged", [length] * count, [length] * count, **changed)


def kv_tile(case: Case, **draft: Any) -> int:
    return place(case.draft(**draft)).info.kv_tile


@pytest.mark.parametrize("causal", [False, True])
def test_long_rows_get_long_tiles(causal: bool) -> None:
    for kv_itemsize, tile in ((2, 160), (1, 192)):
        lengths = (128, 1024, 16384, 131072)
        assert [kv_tile(long(length, causal=causal, kv_itemsize=kv_itemsize)) for length in lengths] == [128, 128, tile, tile]
        assert kv_tile(fa3_case("ragged", [512], [16896], causal=causal, kv_itemsize=kv_itemsize)) == tile


def test_padding_decides() -> None:
    # Rows that end just past a tile of 160 keys pad most of it, rows that end with one pad nothing.
    keys = np.full(10, 480, np.int32)
    assert fa3_kv_tile((128, 160), keys) == 160
    assert fa3_kv_tile((128, 160), keys + 1) == 128
    assert fa3_kv_tile((128, 160), np.full(10, 161, np.int32)) == 128
    assert fa3_kv_tile((128, 160), np.zeros(3, np.int32)) in (128, 160)
    assert fa3_kv_tile((128,), keys) == 128
    # 3200 keys fill tiles of either, 5200 take 41 tiles of 128 or 33 of 160, which pad 0.6% more, 4096 take 32 or 26, 1.6% more, and 3700
    # take 29 or 24, 3.4% more. Both types are faster per key with 160, fp8 by more.
    for length, tiles in ((3200, [160, 160]), (5200, [160, 160]), (4096, [128, 160]), (3700, [128, 128])):
        assert [fa3_kv_tile((128, 160), np.array([length]), kv_itemsize) for kv_itemsize in (2, 1)] == tiles
    # The longest tiles of fp8 are the fastest per key: 5% more padding than 128 keys have is too much for them, 3% more than 160 have.
    for length, tile in ((1920, 192), (1152, 192), (1024, 128), (640, 160), (5280, 192), (2720, 160)):
        assert fa3_kv_tile((128, 160, 192), np.array([length]), 1) == tile


PAGES = {1: (128, 160), 8: (128, 160), 16: (128, 160), 32: (128, 160), 640: (128, 160), 64: (128,), 128: (128,), 256: (128,),
         40: (160,), 80: (160,), 160: (160,), 12: (), 48: (), 96: ()}  # fmt: skip
#: Of fp8, whose tiles of 192 keys pages of 24, 48, 64 and 96 fit too.
FP8_PAGES = {**{page_size: (*tiles, 192) for page_size, tiles in PAGES.items() if 128 in tiles and page_size <= 64}, 128: (128,),
             40: (160,), 80: (160,), 160: (160,), 24: (192,), 48: (192,), 96: (192,), 384: (128, 192), 12: ()}  # fmt: skip


@pytest.mark.parametrize(("page_size", "tiles"), PAGES.items())
def test_pages_must_fit_the_tile(page_size: int, tiles: tuple[int, ...]) -> None:
    assert fa3_kv_tiles(128, 128, 128, page_size, False) == tiles
    assert fa3_kv_tiles(128, 128, 128, page_size, True) == tuple(tile for tile in tiles if tile == 128)
    if tiles and page_size > 1:
        case = fa3_case("paged", [16384], [16384], page_size, num_kv_heads=1)
        assert kv_tile(case) == tiles[-1]
        assert kv_tile(replace(case, disable_split_kv=True)) == tiles[0]


@pytest.mark.parametrize(("page_size", "tiles"), FP8_PAGES.items())
def test_pages_of_fp8_must_fit_the_tile(page_size: int, tiles: tuple[int, ...]) -> None:
    assert fa3_kv_tiles(128, 128, 128, page_size, False, 1) == tiles
    assert fa3_tile_qs(128, 128, page_size, False, 1) == ((128,) if tiles else ())
    if tiles and page_size > 1:
        case = fa3_case("paged", [16384], [16384], page_size, num_kv_heads=1, kv_itemsize=1)
        assert kv_tile(case) == tiles[-1]
        assert kv_tile(replace(case, disable_split_kv=True)) == tiles[0]


@pytest.mark.parametrize("changed", [{"disable_split_kv": True}, {"fixed_split_size": 4096}, {"transforms_logits": True}], ids=str)
def test_what_must_not_depend_on_the_batch_takes_the_first_tile(changed: dict[str, Any]) -> None:
    assert kv_tile(long(16384, kv_itemsize=1, **changed)) == 128
    assert kv_tile(long(16384, kv_itemsize=1), graph_limits=BatchLimits(1, 16384, 16384)) == 128


def test_options_say_whether_logits_are_transformed() -> None:
    def tiles(**changed: Any) -> tuple[int, ...]:
        return make_options(decode=False, paged=False, num_qo_heads=8, num_kv_heads=2, head_dim_qk=128, **changed).fa3_shape.kv_tiles(128)

    assert tiles() == tiles(logits_soft_cap=0.0) == (128, 160)
    assert tiles(logits_soft_cap=30.0) == tiles(pos_encoding_mode="ALIBI") == (128,)


def test_the_tile_is_part_of_a_kernel() -> None:
    first = AttentionVariant("float16", "float16", 128, 128, 128, True, backend="fa3")
    assert first == replace(first, kv_tile=128) != replace(first, kv_tile=160)
    assert str(first) != str(replace(first, kv_tile=160))
    assert {variant.kv_tile for variant in fa3_variants() if variant.head_dim_qk == 128 and variant.q_dtype == "float16"} == {128, 160}
    with pytest.raises(ArgumentError, match=r"kv_tile: got 160, .* soft cap"):
        replace(first, kv_tile=160, soft_cap=True)
    with pytest.raises(UnsupportedError, match="kv_tile: got 96"):
        replace(first, kv_tile=96)
    with pytest.raises(ArgumentError, match="kv_tile: got 128, fa2"):
        AttentionVariant("float16", "float16", 128, 128, 128, True, kv_tile=128)


def test_every_tile_fits_shared_memory() -> None:
    for kv_itemsize, widths in FA3_TILES.items():
        for (qk, vo), rows in widths.items():
            for tile_q, kv_tiles in rows.items():
                assert all(fa3_tile_config(tile_q, qk, vo, tile, kv_itemsize).smem_bytes <= 227 * 1024 for tile in kv_tiles)


def test_fp8_has_most_tiles_of_16_bits() -> None:
    """But for 256 rows, and other keys at head_dim 128."""
    assert fa3_tile_qs(64, 64, 32, False, 1) == (128, 192) and fa3_tile_qs(64, 64, 32, True, 1) == (128,)
    assert fa3_tile_qs(64, 64, 32, False, 2) == (128, 192, 256) and fa3_tile_qs(64, 64, 32, True, 2) == (128,)
    assert fa3_kv_tiles(128, 192, 128, 16, False, 1) == (128,)
    assert [kv_tile(long(length, kv_itemsize=1)) for length in (128, 16384)] == [128, 192]


@settings(max_examples=150)
@given(case=cases(max_batch=6, max_qo=200, max_kv=3000))
def test_every_visible_key_is_covered_once(case: Case) -> None:
    """And what a plan needs is within the bound for its limits."""
    head_dims = case.head_dims if case.head_dims in FA3_TILES[2] else (128, 128)
    kind = "ragged" if case.kind == "decode" else case.kind
    case = replace(case, kind=kind, head_dims=head_dims, page_size=16, backend="fa3", profile=PROFILES["h200"])
    placed, _ = check(case)
    info = placed.info
    limits = WorkspaceLimits(
        "prefill", len(case.kv_lens), case.num_kv_heads * case.group_size, case.num_kv_heads, *case.head_dims,
        max_num_qo_tokens=sum(case.qo_lens), max_kv_len=max(case.kv_lens, default=0), fixed_split_size=case.fixed_split_size,
        disable_split_kv=case.disable_split_kv, page_size=1 if case.kind == "ragged" else case.page_size,
    )  # fmt: skip
    bound = workspace_bound(limits, case.profile)
    assert info.float_bytes <= bound.float_bytes and info.int_bytes <= bound.int_bytes


@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=5))
def test_all_tiles_cover_every_key(lengths: list[int]) -> None:
    for page_size, tile, kv_itemsize in ((64, 128, 2), (80, 160, 2), (48, 192, 1)):
        batch = fa3_case("paged", [min(length, 70) for length in lengths], lengths, page_size, causal=True, kv_itemsize=kv_itemsize)
        placed, _ = check(batch)
        assert placed.info.kv_tile == tile


def parts(placed: Placed) -> int:
    return placed.info.num_merge_groups


def test_the_last_wave_is_shared_where_that_beats_merging() -> None:
    """4096 equal units on 132 CTAs leave four for a 32nd wave: sharing them saves most of a wave, and merging takes four iterations."""
    short, longer = place(long(1024, 16).draft()), place(long(16384).draft())
    assert parts(short) == 0
    assert parts(longer) == 4
    waves = 4096 // 132
    iterations = num_iters(longer.tiles[0], 128)
    assert busiest(longer, walk(longer, 8)) < (waves + 0.1) * iterations
    assert parts(place(long(16384, disable_split_kv=True).draft())) == 0
