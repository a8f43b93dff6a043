# SPDX-License-Identifier: Apache-2.0
"""What fa3 must serve on Hopper: a refusal here fails, where tests that take the `backend` fixture skip it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyinfer
from cupyinfer.backends.device import current_device, read_profile
from cupyinfer.schedule.tiles import FA3_ARCH, FA3_TILES
from tests.support.batches import Case
from tests.support.compare import assert_attention_close
from tests.support.oracle import AttentionOptions, attention_oracle, e4m3_weights_bound, low_precision_reference
from tests.support.runner import Call, run_case

#: Groups that fill boxes of 32 packed rows, and such that do not.
HEADS = [(2, 2), (8, 4), (8, 2), (8, 1), (32, 2), (32, 1), (6, 2), (12, 2), (64, 1)]


@pytest.fixture(autouse=True)
def _needs_hopper() -> None:
    arch = read_profile(current_device()).arch
    if arch != FA3_ARCH:
        pytest.skip(f"fa3 runs on {FA3_ARCH} only, this GPU is {arch}")


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dims", FA3_TILES[2], ids=str)
@pytest.mark.parametrize("op", ["paged", "ragged"])
def test_plain_prefill_is_served(op: str, head_dims: tuple[int, int], dtype: str, causal: bool) -> None:
    page_size = 16 if op == "paged" else 1
    run_case(Case((300, 150, 0, 7), (150, 100, 3, 7), op, head_dims=head_dims, dtype=dtype, causal=causal, page_size=page_size), "fa3")


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_rows_of_any_group_come_and_go(heads: tuple[int, int], causal: bool) -> None:
    """Whole boxes, boxes cut short by the end of a request or of the batch, and tiles without any row for a consumer."""
    queries = (130, 1, 64, 33, 8, 0, 200, 3)
    run_case(Case(tuple(n + 90 for n in queries), queries, "ragged", heads=heads, causal=causal), "fa3")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dims", FA3_TILES[2], ids=str)
def test_many_segments_follow_each_other(head_dims: tuple[int, int]) -> None:
    """More units than CTAs, of one tile and more and of no key at all, so that every buffer of rows is used again and again."""
    queries = (150, 40, 300, 7, 90, 64, 128, 1) * 5
    keys = tuple(n * (k % 3) + k for k, n in enumerate(queries))
    run_case(Case(keys, queries, "ragged", heads=(32, 8), head_dims=head_dims), "fa3")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("page_size", "tile", "changed"),
    [
        (1, 160, {}),
        (16, 160, {}),
        (32, 160, {}),
        (80, 160, {}),
        (64, 128, {}),
        (256, 128, {}),
        (16, 160, {"dtype": "bfloat16", "layout": "HND"}),
        (16, 160, {"window_left": 100}),
        (80, 160, {"window_left": 600}),
        (16, 160, {"sinks": True}),
        (16, 128, {"soft_cap": 20.0}),
        (16, 128, {"pos_encoding": "ALIBI"}),
        (16, 128, {"disable_split_kv": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_tiles_of_many_keys(page_size: int, tile: int, changed: dict[str, Any], causal: bool) -> None:
    """The batch fills tiles of 160 keys and pads those of 128; the causal diagonal, the window and the last page fall within tiles."""
    op = "ragged" if page_size == 1 else "paged"
    case = Case((800, 480, 796), (40, 33, 64), op, page_size=page_size, causal=causal, **changed)
    call = Call(case, "fa3")
    call.plan()
    assert call.wrapper.plan_info.kv_tile == tile
    run_case(case, "fa3")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dims", FA3_TILES[2], ids=str)
@pytest.mark.parametrize("keys", [1500, 9000], ids=str)
def test_parts_are_merged(head_dims: tuple[int, int], keys: int) -> None:
    """Few queries over many keys: every unit is divided, into up to more parts than are loaded at a time."""
    case = Case((keys, keys - 30), (40, 45), "ragged", heads=(4, 1), head_dims=head_dims)
    call = Call(case, "fa3")
    call.plan()
    assert call.wrapper.plan_info.num_merge_groups > 0
    run_case(case, "fa3")


@pytest.mark.gpu
@pytest.mark.parametrize("changed", [{}, {"window_left": 150}, {"sinks": True}, {"fixed_split_size": 128}, {"scales": "head"}], ids=str)
@pytest.mark.parametrize("heads", [(8, 2), (10, 2), (3, 3), (14, 2)], ids=str)
@pytest.mark.parametrize("op", ["paged", "ragged"])
@pytest.mark.parametrize("tile_q", [192, 256])
def test_tiles_of_many_rows(tile_q: int, op: str, heads: tuple[int, int], changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three and four consumers: groups that divide the rows and groups that do not, last tiles that leave some consumers without any."""
    monkeypatch.setattr("cupyinfer.schedule.planner.fa3_tile_q", lambda tile_qs, count, num_sms: tile_q)
    page_size = 16 if op == "paged" else 1
    case = Case((1500, 700, 300, 40), (1200, 600, 190, 3), op, heads, (64, 64), page_size, dtype="bfloat16", causal=True, **changed)
    call = Call(case, "fa3")
    call.plan()
    assert call.wrapper.plan_info.cta_tile_q == tile_q
    run_case(case, "fa3")


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["paged", "ragged"])
@pytest.mark.parametrize("tile_q", [192, 256])
def test_parts_of_many_rows(tile_q: int, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tiles of many keys, which CTAs share: three or four consumers write parts, and merge them together."""
    monkeypatch.setattr("cupyinfer.schedule.planner.fa3_tile_q", lambda tile_qs, count, num_sms: tile_q)
    page_size = 16 if op == "paged" else 1
    case = Case((4096, 3000), (190, 40), op, (4, 1), (64, 64), page_size, dtype="float16", causal=True)
    call = Call(case, "fa3")
    call.plan()
    assert call.wrapper.plan_info.cta_tile_q == tile_q and call.wrapper.plan_info.num_merge_groups > 0
    run_case(case, "fa3")


def ragged(lengths: tuple[int, ...], heads: tuple[int, int], seed: int = 0) -> tuple[Any, Any, list[Any]]:
    """A planned wrapper, its offsets, and random q, k and v on the GPU, with as many queries as keys."""
    import cupy

    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    wrapper = cupyinfer.BatchPrefillWithRaggedKVCacheWrapper(backend="fa3")
    size = wrapper.workspace_size(offsets, offsets, *heads, 128)
    wrapper.reset_workspace_buffer(cupy.empty(size.float_bytes, cupy.uint8), cupy.empty(size.int_bytes, cupy.uint8))
    wrapper.plan(offsets, offsets, *heads, 128)
    random = cupy.random.default_rng(seed)
    arrays = [random.standard_normal((sum(lengths), n, 128), dtype=np.float32).astype(np.float16) for n in (heads[0], heads[1], heads[1])]
    return wrapper, offsets, arrays


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 2), (6, 2)], ids=str)
def test_a_request_keeps_its_queries_to_itself(heads: tuple[int, int]) -> None:
    """Boxes reach into the next request's queries: whatever lies there, NaN and infinity too, changes no bit of this request."""
    wrapper, offsets, (q, k, v) = ragged((45, 20, 70), heads)
    clean = wrapper.run(q, k, v)
    q[int(offsets[1]) : int(offsets[2])] = np.float16("nan")
    q[int(offsets[2]) :] = np.float16("inf")
    dirty = wrapper.run(q, k, v)
    first = int(offsets[1])
    assert bool((clean[:first].view(np.uint16) == dirty[:first].view(np.uint16)).all())
    assert not bool(np.isnan(clean.get().astype(np.float32)).any())


@pytest.mark.gpu
def test_strided_and_repeated_rows() -> None:
    """Queries and outputs as slices of larger arrays, and one token's queries broadcast to all, which no copy engine describes."""
    import cupy

    wrapper, _, (q, k, v) = ragged((130, 70), (8, 2))
    want = wrapper.run(q, k, v)
    wide = cupy.full((200, 12, 136), np.float16(5))
    wide[:, 2:10, 8:] = q
    out = cupy.full((200, 16, 136), np.float16(7))
    wrapper.run(wide[:, 2:10, 8:], k, v, out=out[:, 4:12, :128])
    assert bool((out[:, 4:12, :128] == want).all())
    assert bool((out[:, :4] == 7).all() and (out[:, 12:] == 7).all() and (out[:, 4:12, 128:] == 7).all())
    same = cupy.broadcast_to(q[:1], q.shape)
    assert bool((wrapper.run(same, k, v) == wrapper.run(cupy.ascontiguousarray(same), k, v)).all())


#: Logits of a query by steps of keys, in units of its own factor.
LEVELS = {
    "falling": np.linspace(-4, -40, 32),
    "rising": np.linspace(-40, -4, 32),
    "crossing": np.linspace(-30, 30, 32),
    "saw": np.where(np.arange(32) % 3 == 0, -2.0, np.where(np.arange(32) % 3 == 1, -37.0, 3.0)),
    "alike": np.full(32, -6.0),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("levels", LEVELS)
def test_references_follow_logits_of_any_sign(levels: str, head_dim: int, dtype: type[Any]) -> None:
    """Maxima are compared as integers, exact where some logit is positive: rows of neighbouring factors take both ways at once."""
    import cupy

    rng = np.random.default_rng(7)
    factors = np.array([1.0, -1.0, 0.25, 2.0, -0.5, 0.0, 1.5])
    q, k, v = (rng.standard_normal((count, heads, head_dim)).astype(dtype) for count, heads in ((300, 4), (1600, 2), (1600, 2)))
    q *= dtype(0.1)
    k *= dtype(0.1)
    q[:, :, 0] = factors[(np.arange(300)[:, None] + np.arange(4)) % len(factors)]
    k[:, :, 0] = LEVELS[levels].repeat(50)[:, None]
    offsets = [np.array([0, n], np.int32) for n in (300, 1600)]
    wrapper = cupyinfer.BatchPrefillWithRaggedKVCacheWrapper(backend="fa3")
    options: dict[str, Any] = {"sm_scale": 1.0}
    if dtype != np.float16:
        options |= {"q_data_type": "float8_e4m3fn", "o_data_type": "float16"}
    size = wrapper.workspace_size(*offsets, 4, 2, head_dim, **options)
    wrapper.reset_workspace_buffer(cupy.empty(size.float_bytes, cupy.uint8), cupy.empty(size.int_bytes, cupy.uint8))
    wrapper.plan(*offsets, 4, 2, head_dim, **options)
    on_gpu = (cupy.asarray(x) if dtype == np.float16 else cupy.asarray(x.view(np.uint8)) for x in (q, k, v))
    o, lse = wrapper.run(*on_gpu, return_lse=True)
    call = q, [300], [k], [v], AttentionOptions(sm_scale=1.0)
    weights = None if dtype == np.float16 else e4m3_weights_bound(*call)
    assert_attention_close(o.get(), lse.get(), attention_oracle(*call), low_precision_reference(*call), [300], weights_bound=weights)
