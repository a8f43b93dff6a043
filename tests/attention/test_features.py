# SPDX-License-Identifier: Apache-2.0
"""Cache types, scales, masks, windows, caps, position encodings and sinks, in every operation, on every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupyinfer.errors import ArgumentError, ArgumentTypeError
from tests.support.batches import Case, Data, published_slopes
from tests.support.compare import assert_attention_close
from tests.support.runner import Call, assert_same_bits, run_case

OPS = ("decode", "paged", "ragged")
SMALL = (64, 64)


def of_op(op: str, case: Case) -> Case:
    """A prefill case in another operation; decode keeps the keys and asks one query of each request."""
    return replace(case, op=op, qo_lens=None, causal=False) if op == "decode" else replace(case, op=op)


def chunked(**options: Any) -> Case:
    """Four requests, of which one has no keys, one more queries than keys, and one enough keys to be shared."""
    return Case((600, 0, 7, 130), (20, 2, 11, 33), "paged", **options)


CASES: dict[str, Case] = {
    # 8-bit caches. Per-head scales differ, so a kernel that takes one head's for another's fails.
    "e4m3-d128-bf16": chunked(dtype="bfloat16", kv_dtype="float8_e4m3fn", scales="tensor", causal=True),
    "e4m3-d64-f16-per-head": chunked(head_dims=SMALL, kv_dtype="float8_e4m3fn", scales="head", heads=(8, 4)),
    "e5m2-d128-f16-per-head": chunked(kv_dtype="float8_e5m2", scales="head", causal=True, layout="HND", page_size=3),
    "e5m2-d128-f16-no-scale": chunked(kv_dtype="float8_e5m2"),
    # A scale is never ignored, whatever the cache's type.
    "scale-on-f16": chunked(scales="tensor", causal=True),
    "scale-on-bf16-per-head": chunked(dtype="bfloat16", scales="head"),
    # Windows: without causal, every key after the window's start is seen.
    "window-causal": chunked(window_left=90, causal=True),
    "window": chunked(window_left=90),
    "window-0-causal": chunked(window_left=0, causal=True),
    "window-longer-than-any": chunked(window_left=5000, causal=True),
    "window-fixed-split": chunked(window_left=90, fixed_split_size=64),
    # Caps and positions.
    "cap-causal": chunked(soft_cap=3.0, causal=True),
    "cap-sinks-window": chunked(soft_cap=3.0, sinks=True, window_left=100, causal=True),
    "alibi-12-heads": chunked(pos_encoding="ALIBI", heads=(12, 4), causal=True),
    "alibi-given": chunked(pos_encoding="ALIBI", slopes=True, heads=(8, 2)),
    "rope": chunked(pos_encoding="ROPE_LLAMA", causal=True),
    "rope-scaled": chunked(pos_encoding="ROPE_LLAMA", causal=True, rope_scale=4.0, rope_theta=5e5, head_dims=SMALL, dtype="bfloat16"),
    "rope-e4m3": chunked(pos_encoding="ROPE_LLAMA", kv_dtype="float8_e4m3fn", scales="tensor"),
    # Sinks.
    "sinks": chunked(sinks=True, causal=True),
    "sinks-fixed-split": chunked(sinks=True, fixed_split_size=64, window_left=127, heads=(8, 1)),
    # Widths.
    "d96": chunked(head_dims=(96, 96), causal=True),
    "d96-hnd": chunked(head_dims=(96, 96), layout="HND", heads=(4, 2)),
    "d192x128": chunked(head_dims=(192, 128), dtype="bfloat16", causal=True),
    "d192x128-page64": chunked(head_dims=(192, 128), heads=(4, 2), dtype="bfloat16", page_size=64),
    # Other scales of the logits.
    "sm_scale": chunked(sm_scale=0.02, causal=True),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", CASES)
def test_feature(name: str, op: str, backend: str) -> None:
    run_case(of_op(op, CASES[name]), backend)


@pytest.mark.parametrize("op", ["paged", "ragged"])
@pytest.mark.parametrize("form", ["bool", "packed"])
def test_custom_mask(form: str, op: str, backend: str) -> None:
    """Requests whose bits do not fill their last byte, rows that see nothing, and keys enough to be shared."""
    run_case(Case((5, 7, 600, 0, 64), (3, 2, 9, 4, 70), op, mask=form), backend)
    run_case(Case((5, 900), (3, 2), op, mask=form, window_left=300, heads=(16, 1)), backend)


def test_every_form_of_a_mask_is_the_same(backend: str) -> None:
    case = Case((5, 7, 130), (3, 2, 40), "ragged", heads=(4, 2), head_dims=SMALL, mask="bool")
    data = Data(case)
    bits = data.mask_arguments()["custom_mask"]
    packed = Data(replace(case, mask="packed")).mask_arguments()["packed_custom_mask"]
    assert len(packed) == 2 + 2 + 650
    want = run_case(case, backend)
    on_device = Call(case, backend).memory.put
    masks: list[dict[str, Any]] = [
        {"custom_mask": bits.astype(np.int32)},
        {"custom_mask": on_device(bits)},
        {"packed_custom_mask": packed},
        {"packed_custom_mask": on_device(packed)},
    ]
    for form in masks:
        call = Call(case, backend, data)
        call.plan_options = {**call.plan_options, "custom_mask": None, **form}
        call.plan()
        assert_same_bits(call.run(), want)


def test_a_mask_takes_the_place_of_causal(backend: str) -> None:
    case = Case((20, 40), (20, 30), "paged", mask="bool", causal=True)
    assert_same_bits(run_case(case, backend), run_case(replace(case, causal=False), backend))


def test_a_mask_leaves_no_trace(backend: str) -> None:
    """One object, a masked plan and then a plain one, in the same workspaces."""
    plain = Case((20, 300), (20, 30), "paged", causal=True)
    want = run_case(plain, backend)
    masked, call = Call(replace(plain, mask="bool"), backend), Call(plain, backend)
    masked.plan()
    masked.check(masked.run())
    call.wrapper, call.floats, call.ints = masked.wrapper, masked.floats, masked.ints
    call.plan()
    assert_same_bits(call.run(), want)


@pytest.mark.parametrize("shape", [(10, 15), (20, 10), (200,), (1, 100), (2, 15, 10)])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, ...], backend: str) -> None:
    call = Call(Case((10, 6), (15, 10), "ragged", causal=True), backend)  # 150 + 60 bits
    call.plan()
    want = call.run()
    with pytest.raises(ArgumentError, match=r"custom_mask: got shape .*expected \(210,\): the sum over requests of qo_len \* kv_len"):
        call.wrapper.plan(*call.plan_args, **{**call.plan_options, "custom_mask": np.ones(shape, bool)})
    with pytest.raises(ArgumentError, match=r"packed_custom_mask: .*expected contiguous \(27,\)"):
        call.wrapper.workspace_size(*call.plan_args, **{**call.plan_options, "packed_custom_mask": np.ones(26, np.uint8)})
    with pytest.raises(ArgumentTypeError, match="custom_mask: got int32, expected bool"):
        call.wrapper.plan(*call.plan_args, **{**call.plan_options, "custom_mask": np.full(210, 2, np.int32)})
    assert_same_bits(call.run(), want)


@pytest.mark.parametrize("op", ["paged", "ragged"])
@pytest.mark.parametrize("hidden_by", ["causal", "mask", "causal-cap", "causal-alibi"])
def test_hidden_keys_may_be_anything(hidden_by: str, op: str, backend: str) -> None:
    """Keys that some queries see and others do not: what those others get does not depend on the keys, be they no numbers.

    Of values that is not so, see docs/ARCHITECTURE.md: 0 times NaN is NaN, in every query's row of a tile.
    """
    extra = {"causal-cap": {"soft_cap": 3.0}, "causal-alibi": {"pos_encoding": "ALIBI"}}.get(hidden_by, {})
    case = Case((40, 300), (12, 70), op, head_dims=SMALL, causal=hidden_by != "mask", mask="bool" if hidden_by == "mask" else "", **extra)
    data = Data(case)
    last = [n - 1 for n in case.kv_lens]
    if data.masks is not None:
        for mask, key in zip(data.masks, last, strict=True):
            mask[:-1, key], mask[-1, key] = False, True
    call = Call(case, backend, data)
    call.plan()
    want = call.run()
    call.check(want)
    for keys, key in zip(data.keys, last, strict=True):
        keys[key] = np.nan
    if case.paged:
        data._fill_pages(np.random.default_rng(0), 0.0)
    else:
        data._fill_rows(0.0)
    call = Call(case, backend, data)
    call.plan()
    got = call.run()
    ends = np.cumsum(case.queries) - 1
    others = np.setdiff1d(np.arange(sum(case.queries)), ends)
    assert_same_bits((got[0][others], got[1][others]), (want[0][others], want[1][others]))
    assert np.isnan(got[0][ends].astype(np.float32)).all()


@pytest.mark.parametrize("split", [{}, {"disable_split_kv": True}, {"fixed_split_size": 8}])
@pytest.mark.parametrize("causal", [False, True])
def test_a_window_over_many_tiles(causal: bool, split: dict[str, Any], backend: str) -> None:
    """Rows of one tile begin their windows at different keys, on both sides of every cut."""
    run_case(Case((2000,), (300,), "paged", window_left=333, causal=causal, **split), backend)


@pytest.mark.parametrize("op", OPS)
def test_no_cap_is_cap_0(op: str, backend: str) -> None:
    case = of_op(op, chunked(causal=True))
    want = run_case(case, backend)
    for cap in (0, 0.0, None):
        call = Call(case, backend)
        call.plan_options["logits_soft_cap"] = cap
        call.plan()
        assert_same_bits(call.run(), want)
    capped = run_case(replace(case, soft_cap=1.0), backend)
    assert np.abs(capped[0].astype(np.float64) - want[0].astype(np.float64)).max() > 0.05


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cap", [1.0, 30.0])
def test_a_cap_on_loud_queries(cap: float, op: str, backend: str) -> None:
    """Logits far beyond the cap, where it is flat, as well as below it; hidden keys stay hidden."""
    case = of_op(op, Case((5, 4096 if op == "decode" else 300, 64), (5, 90, 64), op, heads=(16, 4), soft_cap=cap, causal=op != "decode"))
    results = []
    for option in (cap, 0.0):
        data = Data(replace(case, soft_cap=option))
        data.q *= data.q.dtype.type(12)
        call = Call(data.case, backend, data)
        call.plan()
        results.append(call.run())
        call.check(results[-1])
    assert np.abs(results[0][0].astype(np.float64) - results[1][0].astype(np.float64)).max() > 0.05


@pytest.mark.parametrize(
    ("op", "name", "value"),
    [(op, *option) for op in OPS for option in (("logits_soft_cap", 30.0), ("window_left", 7), ("sm_scale", 0.5))]
    + [("paged", "causal", False), ("ragged", "causal", False)],
)
def test_options_only_a_plan_sets(op: str, name: str, value: Any, backend: str) -> None:
    call = Call(of_op(op, chunked(causal=True, sm_scale=0.25)), backend)
    call.plan()
    want = call.run()
    call.run_options = {name: value}
    with pytest.raises(ArgumentError, match=f"^{name}: got {value} at run, the plan has .*; options are fixed by plan"):
        call.run()
    planned = call.plan_options[name]
    call.run_options = {name: planned}
    assert_same_bits(call.run(), want)


@pytest.mark.decode
@pytest.mark.parametrize("split", [{}, {"disable_split_kv": True}, {"fixed_split_size": 16}])
def test_heads_of_one_rank_with_their_own_slopes(split: dict[str, Any], backend: str) -> None:
    """Tensor parallelism: heads 4 to 7 of 8, given their slopes, are the last four of all eight."""
    whole = Data(Case((1, 1500, 64), heads=(8, 8), head_dims=SMALL, pos_encoding="ALIBI", **split))
    part = Data(replace(whole.case, heads=(4, 4), slopes=True))
    part.q = np.ascontiguousarray(whole.q[:, 4:])
    part.keys, part.values = ([x[:, 4:] for x in rows] for rows in (whole.keys, whole.values))
    part.caches, part.indices = [np.ascontiguousarray(cache[:, :, 4:]) for cache in whole.caches], whole.indices
    part.slopes = published_slopes(8)[4:].astype(np.float32)
    call = Call(part.case, backend, part)
    call.plan()
    result = call.run()
    call.check(result)
    oracle, reference = whole.expected
    assert_attention_close(*result, *((pair[0][:, 4:], pair[1][:, 4:]) for pair in (oracle, reference)), part.case.queries)


@pytest.mark.decode
@pytest.mark.parametrize("num_heads", [1, 2, 5, 12, 40, 64])
def test_published_slopes(num_heads: int, backend: str) -> None:
    run_case(Case((1, 90), heads=(num_heads, num_heads), head_dims=SMALL, pos_encoding="ALIBI"), backend)


def test_alibi_slopes_need_alibi(backend: str) -> None:
    call = Call(chunked(), backend)
    with pytest.raises(ArgumentError, match=r"^alibi_slopes: given with pos_encoding_mode 'NONE'"):
        call.wrapper.plan(*call.plan_args, **{**call.plan_options, "alibi_slopes": np.ones(8, np.float32)})
    for name, options in (("alibi_slopes", {"pos_encoding_mode": "ALIBI"}), ("sinks", {})):
        with pytest.raises(ArgumentError, match=rf"^{name}: got float32 of shape \(7,\), expected .*\(8,\)"):
            call.wrapper.plan(*call.plan_args, **{**call.plan_options, **options, name: np.ones(7, np.float32)})


@pytest.mark.decode
@pytest.mark.parametrize("split", [None, 2, 32, 512])
def test_a_sink_is_counted_once(split: int | None, backend: str) -> None:
    """Windows that leave whole splits without a key, and a request shorter than one split."""
    plain = Case((4096, 17, 0), heads=(16, 2), head_dims=SMALL, dtype="bfloat16", sinks=True, fixed_split_size=split)
    run_case(plain, backend)
    run_case(replace(plain, window_left=127), backend)


@pytest.mark.parametrize("op", OPS)
def test_a_sink_alone(op: str, backend: str) -> None:
    case = of_op(op, Case((0,), (3,), "paged", heads=(8, 2), head_dims=SMALL, dtype="bfloat16", sinks=True))
    o, lse = run_case(case, backend)
    assert not o.astype(np.float32).any()
    sinks = Data(case).sinks
    assert sinks is not None
    np.testing.assert_allclose(lse, np.broadcast_to(sinks / np.log(2), lse.shape), rtol=3e-7)


@pytest.mark.decode
def test_values_on_the_device_are_read_there(backend: str) -> None:
    """Slopes and sinks as arrays of the backend, which take no workspace on a GPU."""
    case = Case((300, 5), heads=(8, 2), head_dims=SMALL, pos_encoding="ALIBI", slopes=True, sinks=True)
    want = run_case(case, backend)
    call = Call(case, backend)
    for name in ("alibi_slopes", "sinks"):
        call.plan_options[name] = call.memory.put(call.plan_options[name])
    on_device = call.wrapper.workspace_size(*call.plan_args, **call.plan_options)
    assert on_device.int_bytes == call.size.int_bytes - (64 if backend != "host" else 0)
    call.plan()
    assert_same_bits(call.run(), want)


def test_ragged_and_paged_agree_on_scales(backend: str) -> None:
    """The same keys as rows and as pages, both scaled."""
    paged = Case((128,), (100,), "paged", dtype="bfloat16", kv_dtype="float8_e4m3fn", scales="tensor", causal=True)
    rows = run_case(replace(paged, op="ragged"), backend)
    pages = run_case(paged, backend)
    difference = np.abs(rows[0].astype(np.float32) - pages[0].astype(np.float32)).max()
    assert difference <= 2**-7 * np.abs(pages[0].astype(np.float32)).max()


@pytest.mark.parametrize("op", OPS)
def test_a_query_scale_multiplies(op: str, backend: str) -> None:
    case = of_op(op, chunked(head_dims=SMALL))
    call = Call(case, backend)
    call.plan()
    call.run_options = {"q_scale": 0.5}
    scaled = Call(replace(case, sm_scale=0.5 / 8), backend)
    scaled.check(call.run())


def test_fp8_values_as_an_fp8_array() -> None:
    """NumPy has float8 types of its own; CuPy passes the bytes as uint8, which every GPU case above does."""
    case = Case((40, 600), kv_dtype="float8_e4m3fn", scales="tensor")
    want = run_case(case, "host")
    call = Call(case, "host")
    assert call.caches[0].dtype.name == "float8_e4m3fn"
    call.caches = [cache.view(np.uint8) for cache in call.caches]
    call.plan()
    assert_same_bits(call.run(), want)
