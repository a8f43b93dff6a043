# SPDX-License-Identifier: Apache-2.0
"""Logits that rise, fall or jump along the keys: what kernels scale by has to follow, from tile to tile and lane to lane."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.batches import Case, Data
from tests.support.runner import Call

KEYS = (900, 70, 333)


def rising(num_keys: int) -> npt.NDArray[Any]:
    """Nearly 10 per 64 keys, above what a kernel may leave unscaled."""
    return np.arange(num_keys) * 0.15


def steep(num_keys: int) -> npt.NDArray[Any]:
    """60 per 64 keys: two tiles on, nothing is left of a weight."""
    return np.arange(num_keys) * 1.0


def falling(num_keys: int) -> npt.NDArray[Any]:
    """Only the first keys count."""
    return -rising(num_keys)


def one_key_of_a_tile(num_keys: int) -> npt.NDArray[Any]:
    """Every 67th key is 20 above all before it, so that each time another lane alone sees the maximum grow."""
    at = np.arange(num_keys)
    return np.where(at % 67 == 5, at // 67 * 20.0, -30.0)


def from_far_below(num_keys: int) -> npt.NDArray[Any]:
    """Every logit is far below zero, where sums start."""
    return np.full(num_keys, -300.0)


SHAPES = (rising, steep, falling, one_key_of_a_tile, from_far_below)


def with_logits(case: Case, shape: Any) -> Data:
    """Inputs whose logits are about `shape` of the key's index: the first dimension carries it, the others their random share."""
    data = Data(case)
    data.q[..., 0] = 16.0
    for keys in data.keys:
        keys[..., 0] = (shape(len(keys)) * np.sqrt(case.head_dims[0]) / 16.0)[:, None].astype(keys.dtype)
    if case.paged:
        data._fill_pages(np.random.default_rng(case.seed), np.nan)
    else:
        data._fill_rows(np.nan)
    return data


@pytest.mark.parametrize(("op", "causal"), [("ragged", False), ("ragged", True), ("paged", False), ("paged", True), ("decode", True)])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bfloat16"), (128, "float16"), (128, "bfloat16"), (256, "float16")])
@pytest.mark.parametrize("shape", SHAPES, ids=[shape.__name__ for shape in SHAPES])
def test_any_course_of_logits(shape: Any, head_dim: int, dtype: str, op: str, causal: bool, backend: str) -> None:
    case = Case(KEYS, None if op == "decode" else (150, 70, 40), op, head_dims=(head_dim, head_dim), dtype=dtype, causal=causal)
    call = Call(case, backend, with_logits(case, shape))
    call.plan()
    call.check(call.run())


@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("heads", [(8, 2), (24, 2), (32, 2)], ids=["gqa4", "gqa12", "gqa16"])
@pytest.mark.parametrize("shape", [rising, falling, one_key_of_a_tile, from_far_below], ids=lambda shape: shape.__name__)
def test_decode_of_every_cache_and_group(shape: Any, heads: tuple[int, int], kv_dtype: str | None, backend: str) -> None:
    """fp8 kernels follow a maximum at once, others let it grow for a while; tiles of more than 8 rows work on two rows at a time."""
    case = Case(KEYS, heads=heads, dtype="bfloat16", kv_dtype=kv_dtype)
    call = Call(case, backend, with_logits(case, shape))
    call.plan()
    call.check(call.run())


@pytest.mark.parametrize("page_size", [1, 3, 16, 24, 48])
def test_pages_that_blocks_of_keys_straddle(page_size: int, backend: str) -> None:
    """Pages that are no multiple of 16 keys have addresses of their own for every row, from tile to tile."""
    case = Case(KEYS, (150, 70, 40), "paged", dtype="bfloat16", page_size=page_size, causal=True)
    call = Call(case, backend, with_logits(case, rising))
    call.plan()
    call.check(call.run())


@pytest.mark.parametrize("op", ["ragged", "paged"])
@pytest.mark.parametrize("window_left", [0, 63, 64, 200])
def test_windows_move_with_the_tiles(window_left: int, op: str, backend: str) -> None:
    """Warps of one tile begin and end at different keys: some skip tiles that others work on."""
    case = Case(KEYS, (300, 70, 200), op, dtype="bfloat16", causal=True, window_left=window_left)
    call = Call(case, backend, with_logits(case, rising))
    call.plan()
    call.check(call.run())
