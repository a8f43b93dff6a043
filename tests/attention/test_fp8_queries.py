# SPDX-License-Identifier: Apache-2.0
"""Queries in e4m3 over a cache of the same: results, factors of single heads, element types, and what is refused by name."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyinfer
from cupyinfer.backends.device import current_device, read_profile
from cupyinfer.errors import ArgumentError, ArgumentTypeError
from cupyinfer.schedule.tiles import FA3_ARCH, FA3_TILES
from tests.support.batches import Case
from tests.support.runner import Call, run_case

PREFILL = {"op": "ragged", "page_size": 1, "dtype": "float8_e4m3fn", "o_dtype": "bfloat16"}
PAGED = {**PREFILL, "op": "paged", "page_size": 16}
BATCH = {"kv_lens": (300, 150, 0, 7, 700), "qo_lens": (150, 100, 3, 7, 40)}
#: What kernels must do besides the plain cases: each in turn with the others' defaults.
FEATURES: tuple[dict[str, Any], ...] = (
    {"causal": True, "scales": "head", "sinks": True},
    {"causal": True, "scales": "tensor", "o_dtype": "float16"},
    {"causal": True, "soft_cap": 20.0, "scales": "head"},
    {"causal": True, "pos_encoding": "ALIBI"},
    {"window_left": 60},
    {"causal": True, "window_left": 200, "layout": "HND"},
    {"heads": (2, 2), "causal": True},
    {"heads": (16, 1), "causal": True},
    {"fixed_split_size": 256},
    {"causal": True, "graph": True},
)


def run(backend: str, **fields: Any) -> None:
    run_case(Case(**{**BATCH, **fields}), backend)


def backend_or_skip(backend: str) -> str:
    if backend == "fa3":
        arch = read_profile(current_device()).arch
        if arch != FA3_ARCH:
            pytest.skip(f"fa3 runs on {FA3_ARCH} only, this GPU is {arch}")
    return backend


BACKENDS = ["host", pytest.param("fa3", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("head_dims", FA3_TILES[1], ids=str)
@pytest.mark.parametrize("kind", [PAGED, PREFILL], ids=["paged", "ragged"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_plain_prefill(backend: str, kind: dict[str, Any], head_dims: tuple[int, int], causal: bool) -> None:
    run(backend_or_skip(backend), **kind, head_dims=head_dims, causal=causal)


@pytest.mark.parametrize("feature", FEATURES, ids=str)
@pytest.mark.parametrize("kind", [PAGED, PREFILL], ids=["paged", "ragged"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_features(backend: str, kind: dict[str, Any], feature: dict[str, Any]) -> None:
    fields = {**kind, **feature}
    if "fixed_split_size" in feature and kind is PAGED:
        fields["fixed_split_size"] = feature["fixed_split_size"] // kind["page_size"]
    run(backend_or_skip(backend), **fields)


@pytest.mark.parametrize("page_size", [8, 24, 32, 64, 80, 96, 128, 160, 192, 256, 384])
@pytest.mark.gpu
def test_pages_of_every_size(page_size: int) -> None:
    run(backend_or_skip("fa3"), **{**PAGED, "page_size": page_size}, causal=True)


@pytest.mark.parametrize(
    "feature", [{}, {"causal": True, "scales": "head", "sinks": True}, {"window_left": 700}, {"heads": (10, 2), "causal": True}], ids=str
)
@pytest.mark.parametrize("kind", [PAGED, PREFILL], ids=["paged", "ragged"])
@pytest.mark.gpu
def test_tiles_of_192_keys(kind: dict[str, Any], feature: dict[str, Any]) -> None:
    """Units that CTAs share, and with a window units that they take whole."""
    case = Case(**{**kind, "kv_lens": (3840, 1920, 576), "qo_lens": (70, 120, 160), **feature})
    call = Call(case, backend_or_skip("fa3"))
    call.plan()
    assert call.wrapper.plan_info.kv_tile == 192
    run_case(case, "fa3")


@pytest.mark.parametrize(
    "batch",
    [
        {"kv_lens": (5360, 2650, 475), "qo_lens": (40, 33, 100), "causal": True},
        {"kv_lens": (2900, 2650), "qo_lens": (33, 20), "scales": "head", "sinks": True},
        {"kv_lens": (160, 155) * 5, "qo_lens": (64, 60) * 5, "heads": (32, 16), "causal": True},
    ],
    ids=["two deposits", "scales", "more than CTAs"],
)
@pytest.mark.parametrize(("page_size", "tile"), [(80, 160), (96, 192)])
@pytest.mark.gpu
def test_whole_rows_of_long_tiles(batch: dict[str, Any], page_size: int, tile: int) -> None:
    """No part is merged: the bank holds long rows, and CTAs go from one unit to the next."""
    case = Case(**{**PAGED, "page_size": page_size, "disable_split_kv": True, **batch})
    call = Call(case, backend_or_skip("fa3"))
    call.plan()
    assert call.wrapper.plan_info.kv_tile == tile and call.wrapper.plan_info.num_merge_groups == 0
    run_case(case, "fa3")


def _small(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    return rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)


def _arrays() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    return _small(rng, (5, 4, 64)), _small(rng, (9, 2, 64)), _small(rng, (9, 2, 64))


def _planned(**options: Any) -> Any:
    wrapper = cupyinfer.BatchPrefillWithRaggedKVCacheWrapper(backend="host")
    args = ([0, 5], [0, 9], 4, 2, 64)
    size = wrapper.workspace_size(*args, **options)
    wrapper.reset_workspace_buffer(np.empty(size.float_bytes, np.uint8), np.empty(size.int_bytes, np.uint8))
    wrapper.plan(*args, **options)
    return wrapper


E4M3 = {"q_data_type": "float8_e4m3fn", "o_data_type": "float16"}


def test_bytes_are_as_good_as_their_type() -> None:
    arrays, wrapper = _arrays(), _planned(**E4M3)
    typed = wrapper.run(*arrays)
    assert typed.dtype == np.float16
    np.testing.assert_array_equal(wrapper.run(*(array.view(np.uint8) for array in arrays)), typed)
    single = cupyinfer.single_prefill_with_kv_cache(*arrays, o_data_type="float16")
    np.testing.assert_array_equal(single, typed)
    as_bytes = cupyinfer.single_prefill_with_kv_cache(
        *(array.view(np.uint8) for array in arrays), q_data_type="float8_e4m3fn", kv_data_type="float8_e4m3fn", o_data_type="float16"
    )
    np.testing.assert_array_equal(as_bytes, typed)


def test_a_factor_per_query_head_is_that_of_its_head() -> None:
    arrays, wrapper = _arrays(), _planned(**E4M3)
    scales = np.array([0.5, 1.0, 2.0, 0.25], np.float32)
    mixed = wrapper.run(*arrays, q_scale=scales)
    for head, scale in enumerate(scales):
        np.testing.assert_array_equal(mixed[:, head], wrapper.run(*arrays, q_scale=float(scale))[:, head])
    np.testing.assert_array_equal(wrapper.run(*arrays, q_scale=np.ones(4, np.float32)), wrapper.run(*arrays))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"q_data_type": "float8_e4m3fn"}, ArgumentTypeError, "o_data_type: got None for float8_e4m3fn queries"),
        ({"q_data_type": "float8_e5m2", "o_data_type": "float16"}, ArgumentTypeError, "q_data_type: got 'float8_e5m2'"),
        ({**E4M3, "o_data_type": "float8_e4m3fn"}, ArgumentTypeError, "o_data_type: got 'float8_e4m3fn'"),
        ({**E4M3, "kv_data_type": "float8_e5m2"}, ArgumentTypeError, "kv_data_type: got float8_e5m2 for float8_e4m3fn queries"),
        ({**E4M3, "kv_data_type": "bfloat16"}, ArgumentTypeError, "kv_data_type: got bfloat16 for float8_e4m3fn queries"),
        ({"q_data_type": "bfloat16", "o_data_type": "float16"}, ArgumentTypeError, "o_data_type: got float16 for bfloat16 queries"),
    ],
    ids=str,
)
def test_types_that_do_not_go_together(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        _planned(**options)


def test_decode_takes_no_fp8_queries() -> None:
    wrapper = cupyinfer.BatchDecodeWithPagedKVCacheWrapper(backend="host")
    with pytest.raises(ArgumentTypeError, match=r"^q_data_type: got 'float8_e4m3fn', expected one of float16, bfloat16$"):
        wrapper.workspace_size([0, 1], [0], [1], 4, 2, 64, 1, q_data_type="float8_e4m3fn")


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (np.ones(2, np.float32), ArgumentError, r"q_scale: got shape \(2,\), expected contiguous \(4,\), one per query head"),
        (np.ones(4, np.float64), ArgumentTypeError, "q_scale: got float64"),
        (-1.0, ArgumentError, "q_scale: got -1.0, must be positive"),
    ],
    ids=["shape", "type", "negative"],
)
def test_a_wrong_factor_of_q(scale: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        _planned(**E4M3).run(*_arrays(), q_scale=scale)


def test_16_bit_queries_take_no_factor_per_head() -> None:
    arrays = [array.astype(np.float16) for array in _arrays()]
    with pytest.raises(ArgumentError, match=r"^q_scale: got an array, float16 queries take one float"):
        _planned(q_data_type="float16").run(*arrays, q_scale=np.ones(4, np.float32))


def test_arrays_of_another_type_than_planned() -> None:
    q, k, v = _arrays()
    with pytest.raises(ArgumentTypeError, match=r"^q: got float16, the plan is for float8_e4m3fn or uint8$"):
        _planned(**E4M3).run(q.astype(np.float16), k, v)
    with pytest.raises(ArgumentTypeError, match=r"^q: got float8_e4m3fn, the plan is for float16$"):
        _planned(q_data_type="float16").run(q, k.astype(np.float16), v.astype(np.float16))
    with pytest.raises(ArgumentTypeError, match=r"^out: got float32, expected float16, as the plan says$"):
        _planned(**E4M3).run(q, k, v, out=np.empty((5, 4, 64), np.float32))
