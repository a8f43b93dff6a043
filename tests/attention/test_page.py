# SPDX-License-Identifier: Apache-2.0
"""Appending to paged caches against a loop over tokens, and the index arrays that describe an append."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyinfer.attention.page import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens
from cupyinfer.errors import ArgumentError, ArgumentTypeError
from tests.attention.homes import HOMES, GpuHome, Home

FLOAT16, BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
E4M3, E5M2, UINT8 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2), np.dtype(np.uint8)


@dataclass(frozen=True)
class Case:
    """A batch: request r appends append_lens[r] tokens and has seq_lens[r] afterwards."""

    append_lens: tuple[int, ...] = (1, 3, 0, 9)
    seq_lens: tuple[int, ...] = (1, 20, 0, 9)
    page_size: int = 4
    num_kv_heads: int = 2
    head_dims: tuple[int, int] = (64, 64)
    dtype: np.dtype[Any] = FLOAT16
    layout: str = "NHD"
    one_array: bool = False
    index_type: type = np.int32


CASES = {
    "nhd": Case(),
    "hnd": Case(layout="HND"),
    "one-array-nhd": Case(one_array=True),
    "one-array-hnd": Case(one_array=True, layout="HND", dtype=BFLOAT16),
    "bf16-page1-d128": Case(page_size=1, dtype=BFLOAT16, head_dims=(128, 128), num_kv_heads=8),
    "page512-int64": Case(page_size=512, index_type=np.int64),
    "page-not-a-power-of-two": Case(page_size=7),
    "e4m3": Case(dtype=E4M3),
    "e5m2-hnd": Case(dtype=E5M2, layout="HND"),
    "bytes": Case(dtype=UINT8, head_dims=(256, 256)),
    "keys-wider-than-values": Case(head_dims=(192, 128), layout="HND"),
    "rows-of-8-bytes": Case(head_dims=(4, 12)),
    "rows-of-2-bytes": Case(head_dims=(65, 3)),
    "rows-of-3-bytes": Case(head_dims=(3, 3), dtype=E4M3),
    "40-heads-take-several-warps": Case(num_kv_heads=40, head_dims=(128, 128)),
    "nothing-to-append": Case(append_lens=(0, 0), seq_lens=(5, 0)),
    "no-requests": Case(append_lens=(), seq_lens=()),
}


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Any bit pattern at all, NaN included."""
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8).view(dtype)


class Append:
    """The arrays of a case, and what the caches must hold afterwards."""

    def __init__(self, case: Case, seed: int = 1) -> None:
        rng = np.random.default_rng(seed)
        self.case = case
        num_tokens = sum(case.append_lens)
        self.rows = [random_bits(rng, (num_tokens, case.num_kv_heads, dim), case.dtype) for dim in case.head_dims]
        num_pages = [-(-length // case.page_size) for length in case.seq_lens]
        cache_pages = sum(num_pages) + 3
        ids = rng.permutation(cache_pages)[: sum(num_pages)]
        self.num_cache_pages = cache_pages
        self.kv_indptr = np.concatenate([[0], np.cumsum(num_pages)]).astype(case.index_type)
        self.kv_indices = ids.astype(case.index_type)
        last = [length - (pages - 1) * case.page_size if pages else 0 for length, pages in zip(case.seq_lens, num_pages, strict=True)]
        self.last_page_len = np.array(last, case.index_type)
        tokens = [
            (request, length - appended + token)
            for request, (appended, length) in enumerate(zip(case.append_lens, case.seq_lens, strict=True))
            for token in range(appended)
        ]
        self.batch_indices = np.array([request for request, _ in tokens], case.index_type)
        self.positions = np.array([position for _, position in tokens], case.index_type)
        if case.one_array:
            self.cache: Any = random_bits(rng, (cache_pages, 2, *self.page_shape(case.head_dims[0])), case.dtype)
        else:
            self.cache = tuple(random_bits(rng, (cache_pages, *self.page_shape(dim)), case.dtype) for dim in case.head_dims)

    def page_shape(self, head_dim: int) -> tuple[int, int, int]:
        heads, slots = self.case.num_kv_heads, self.case.page_size
        return (slots, heads, head_dim) if self.case.layout == "NHD" else (heads, slots, head_dim)

    @property
    def metadata(self) -> tuple[np.ndarray[Any, Any], ...]:
        return self.kv_indices, self.kv_indptr, self.last_page_len

    def expected(self) -> list[np.ndarray[Any, Any]]:
        """Bits of the K and V caches after the append, one token after the other."""
        sides = [self.cache[:, 0], self.cache[:, 1]] if self.case.one_array else list(self.cache)
        word = f"u{self.case.dtype.itemsize}"
        caches = [side.copy().view(word) for side in sides]
        for token, (request, position) in enumerate(zip(self.batch_indices, self.positions, strict=True)):
            if request < 0:
                continue
            page = self.kv_indices[self.kv_indptr[request] + position // self.case.page_size]
            slot = position % self.case.page_size
            for cache, rows in zip(caches, self.rows, strict=True):
                at = (page, slot) if self.case.layout == "NHD" else (page, slice(None), slot)
                cache[at] = rows[token].view(word)
        return caches

    def run(self, home: Home) -> list[np.ndarray[Any, Any]]:
        """Append, and give the bits of both caches."""
        put = home.put
        cache = put(self.cache) if self.case.one_array else tuple(map(put, self.cache))
        indices = map(put, (self.batch_indices, self.positions))
        result = append_paged_kv_cache(*map(put, self.rows), *indices, cache, *map(put, self.metadata), kv_layout=self.case.layout)
        assert result is None
        sides = [cache[:, 0], cache[:, 1]] if self.case.one_array else list(cache)
        return [np.ascontiguousarray(home.get(side)).view(f"u{self.case.dtype.itemsize}") for side in sides]

    def check(self, home: Home) -> None:
        expected = self.expected()
        for got, want, name in zip(self.run(home), expected, "kv", strict=True):
            wrong = np.argwhere(got != want)
            assert not len(wrong), f"{name} cache: {len(wrong)} elements differ, the first at {wrong[0]}"


@HOMES
@pytest.mark.parametrize("name", CASES)
def test_append(home: Home, name: str) -> None:
    Append(CASES[name]).check(home)


@HOMES
def test_the_expected_caches_change(home: Home) -> None:
    """The comparison above can fail: an append of other rows gives other bits."""
    append = Append(Case())
    expected = append.expected()
    append.rows = [rows[::-1].copy() for rows in append.rows]
    assert (append.run(home)[0] != expected[0]).any()


@HOMES
@pytest.mark.parametrize("offset", [0, 1, 2, 4], ids=lambda offset: f"offset{offset}")
def test_strided_arrays(home: Home, offset: int) -> None:
    """Keys and values are slices of packed QKV rows, caches every second page of larger ones, indices every third entry."""
    append = Append(Case(dtype=BFLOAT16))
    rng = np.random.default_rng(3)
    packed = random_bits(rng, (len(append.rows[0]), 8, 80), BFLOAT16)
    for idx, head in enumerate((4, 6)):
        view = packed[:, head : head + 2, offset : offset + 64]
        view[...] = append.rows[idx]
        append.rows[idx] = view
    caches = []
    for cache in append.cache:
        larger = random_bits(rng, (2 * len(cache), 6, 3, 72), BFLOAT16)
        larger[::2, 1:5, :2, offset : offset + 64] = cache
        caches.append(larger[::2, 1:5, :2, offset : offset + 64])
    append.cache = tuple(caches)
    for name in ("batch_indices", "positions", "kv_indices", "kv_indptr", "last_page_len"):
        spread = np.full(3 * len(getattr(append, name)), 99, np.int64)
        spread[::3] = getattr(append, name)
        setattr(append, name, spread[::3])
    append.check(home)


@HOMES
def test_padding_tokens_are_left_out(home: Home) -> None:
    append = Append(Case())
    append.batch_indices[[0, 5]] = -1
    append.positions[5] = 12345
    append.check(home)


@HOMES
def test_more_tokens_than_a_grid_axis_holds(home: Home) -> None:
    Append(Case(append_lens=(70_000,), seq_lens=(70_000,), page_size=1, num_kv_heads=1)).check(home)


@HOMES
def test_more_warps_than_the_grid_has(home: Home) -> None:
    """One warp per token, and more tokens than warps: the grid goes round twice."""
    Append(Case(append_lens=(600_000,), seq_lens=(600_000,), page_size=16, num_kv_heads=1, head_dims=(8, 8))).check(home)


@HOMES
@pytest.mark.slow
def test_a_cache_beyond_32_bits(home: Home) -> None:
    """262,400 pages of 16 x 8 x 128: 2^32.0 elements of K; V is narrower."""
    num_pages, shape = 262_400, (16, 8, 128)
    if isinstance(home, GpuHome):
        import cupy

        cache = cupy.zeros((num_pages, *shape), BFLOAT16)
    else:
        cache = np.zeros((num_pages, *shape), BFLOAT16)
    rows = np.random.default_rng(5).uniform(1, 2, (3, 8, 128)).astype(BFLOAT16)
    indices = [np.array(values, np.int32) for values in ([0, 0, 0], [13, 14, 15], [num_pages - 1], [0, 1], [16])]
    key, batch_indices, positions, *metadata = map(home.put, (rows, *indices))
    values = home.put(np.zeros((num_pages, 16, 8, 8), BFLOAT16))
    append_paged_kv_cache(key, home.put(rows[..., :8]), batch_indices, positions, (cache, values), *metadata)
    assert (home.get(cache[num_pages - 1, 13:]) == rows).all()
    # Where the rows would have landed with 32-bit element or byte offsets.
    for bits in (31, 32):
        for elements in (2**bits, 2**bits // 2):
            wrapped = (num_pages - 1) * 16 * 8 * 128 % elements // (16 * 8 * 128)
            if wrapped != num_pages - 1:
                assert not home.get(cache[wrapped]).any()
    assert not home.get(cache[num_pages - 1, :13]).any()
    if isinstance(home, GpuHome):
        assert int(cupy.count_nonzero(cache.view(cupy.uint16))) == rows.size


def test_rows_of_another_library() -> None:
    jax = pytest.importorskip("jax")
    append = Append(Case(dtype=BFLOAT16))
    expected = append.expected()
    append.rows = [jax.numpy.asarray(rows.view(np.uint16)).view(jax.numpy.bfloat16) for rows in append.rows]
    for got, want in zip(append.run(HOST), expected, strict=True):
        np.testing.assert_array_equal(got, want)


HOST = HOMES.args[1][0].values[0]


# What is replaced in a good call, the argument the error names, and the error.
BAD_CALLS: dict[str, tuple[dict[str, Any], str, type[Exception]]] = {
    "layout": ({"kv_layout": "NDH"}, "kv_layout", ArgumentError),
    "not-an-array": ({"append_key": [1, 2]}, "append_key", ArgumentTypeError),
    "key-dtype": ({"append_key": np.zeros((13, 2, 64), BFLOAT16)}, "append_key", ArgumentTypeError),
    "value-itemsize": ({"append_value": np.zeros((13, 2, 64), np.uint8)}, "append_value", ArgumentTypeError),
    "key-dims": ({"append_key": np.zeros((13, 128), FLOAT16)}, "append_key", ArgumentError),
    "key-heads": ({"append_key": np.zeros((13, 3, 64), FLOAT16)}, "append_key", ArgumentError),
    "value-tokens": ({"append_value": np.zeros((12, 2, 64), FLOAT16)}, "append_value", ArgumentError),
    "value-head-dim": ({"append_value": np.zeros((13, 2, 32), FLOAT16)}, "append_value", ArgumentError),
    "key-stride": ({"append_key": np.zeros((13, 2, 128), FLOAT16)[:, :, ::2]}, "append_key", ArgumentError),
    "three-caches": ({"paged_kv_cache": (np.zeros((9, 4, 2, 64), FLOAT16),) * 3}, "paged_kv_cache", ArgumentTypeError),
    "cache-of-five-axes": ({"paged_kv_cache": (np.zeros((9, 1, 4, 2, 64), FLOAT16),) * 2}, "paged_kv_cache", ArgumentError),
    "cache-dims": ({"paged_kv_cache": np.zeros((9, 4, 2, 64), FLOAT16)}, "paged_kv_cache", ArgumentError),
    "cache-dtype": ({"paged_kv_cache": np.zeros((9, 2, 4, 2, 64), np.float32)}, "paged_kv_cache", ArgumentTypeError),
    "caches-differ": (
        {"paged_kv_cache": (np.zeros((9, 4, 2, 64), FLOAT16), np.zeros((8, 4, 2, 64), FLOAT16))},
        "paged_kv_cache",
        ArgumentError,
    ),
    "read-only-cache": ({"paged_kv_cache": np.broadcast_to(FLOAT16.type(0), (99, 2, 4, 2, 64))}, "paged_kv_cache", ArgumentError),
    "batch-indices-dtype": ({"batch_indices": np.zeros(13, np.float32)}, "batch_indices", ArgumentTypeError),
    "batch-indices-length": ({"batch_indices": np.zeros(12, np.int32)}, "batch_indices", ArgumentError),
    "batch-index-too-large": ({"batch_indices": np.full(13, 4, np.int32)}, "batch_indices", ArgumentError),
    "positions-dims": ({"positions": np.zeros((13, 1), np.int32)}, "positions", ArgumentError),
    "position-past-the-end": ({"positions": np.full(13, 20, np.int32)}, "positions", ArgumentError),
    "negative-position": ({"positions": np.full(13, -1, np.int32)}, "positions", ArgumentError),
    "page-past-the-cache": ({"kv_indices": np.full(9, 99, np.int32)}, "kv_indices", ArgumentError),
    "negative-page": ({"kv_indices": np.full(9, -1, np.int32)}, "kv_indices", ArgumentError),
    "too-few-pages": ({"kv_indices": np.zeros(3, np.int32)}, "kv_indices", ArgumentError),
    "empty-indptr": ({"kv_indptr": np.zeros(0, np.int32)}, "kv_indptr", ArgumentError),
    "decreasing-indptr": ({"kv_indptr": np.array([0, 1, 9, 8, 9], np.int32)}, "kv_indptr", ArgumentError),
    "last-page-too-long": ({"kv_last_page_len": np.array([1, 5, 0, 1], np.int32)}, "kv_last_page_len", ArgumentError),
    "last-page-empty": ({"kv_last_page_len": np.array([1, 4, 0, 0], np.int32)}, "kv_last_page_len", ArgumentError),
    "last-page-length": ({"kv_last_page_len": np.array([1, 4, 0], np.int32)}, "kv_last_page_len", ArgumentError),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_name_the_argument_and_write_nothing(name: str) -> None:
    replaced, argument, error = BAD_CALLS[name]
    append = Append(Case())
    names = ("append_key", "append_value", "batch_indices", "positions", "paged_kv_cache", "kv_indices", "kv_indptr", "kv_last_page_len")
    good = (*append.rows, append.batch_indices, append.positions, append.cache, *append.metadata)
    before = [cache.copy() for cache in append.cache]
    with pytest.raises(error, match=rf"^{argument}\b"):
        append_paged_kv_cache(**{**dict(zip(names, good, strict=True)), **replaced})
    for cache, old in zip(append.cache, before, strict=True):
        np.testing.assert_array_equal(cache.view(np.uint16), old.view(np.uint16))


def test_immutable_caches_are_refused() -> None:
    jax = pytest.importorskip("jax")
    append = Append(Case())
    caches = tuple(jax.numpy.zeros(cache.shape, jax.numpy.float16) for cache in append.cache)
    with pytest.raises(ArgumentError, match="paged_kv_cache: got a JAX array"):
        append_paged_kv_cache(*append.rows, append.batch_indices, append.positions, caches, *append.metadata)


@HOMES
@pytest.mark.parametrize("index_type", [np.int32, np.int64])
def test_batch_indices_positions(home: Home, index_type: type) -> None:
    indptr = np.array([0, 0, 1, 4, 4, 10, 10], index_type)
    seq_lens = np.array([7, 5, 3, 0, 2**31 - 1, 0], index_type)
    batch_indices, positions = get_batch_indices_positions(home.put(indptr), home.put(seq_lens), 12)
    batch_indices, positions = home.get(batch_indices), home.get(positions)
    assert batch_indices.dtype == positions.dtype == np.int32
    assert batch_indices.tolist() == [1, 2, 2, 2, 4, 4, 4, 4, 4, 4, -1, -1]
    assert positions.tolist() == [4, 0, 1, 2, *range(2**31 - 7, 2**31 - 1), 0, 0]


@HOMES
def test_batch_indices_positions_into_given_arrays(home: Home) -> None:
    batch_indices, positions = home.put(np.zeros(70_000, np.int64)), home.put(np.zeros(140_000, np.int32)[::2])
    indptr, seq_lens = np.arange(0, 70_001, 2, np.int32), np.arange(35_000, dtype=np.int32) + 2
    result = get_batch_indices_positions(home.put(indptr), home.put(seq_lens), 70_000, batch_indices, positions)
    assert result[0] is batch_indices and result[1] is positions
    np.testing.assert_array_equal(home.get(batch_indices), np.arange(70_000) // 2)
    np.testing.assert_array_equal(home.get(positions), np.arange(70_000) // 2 + np.arange(70_000) % 2)


@HOMES
def test_batch_indices_positions_of_nothing(home: Home) -> None:
    empty, one = home.put(np.zeros(0, np.int32)), home.put(np.zeros(1, np.int32))
    assert [len(array) for array in get_batch_indices_positions(one, empty, 0)] == [0, 0]
    assert home.get(get_batch_indices_positions(one, empty, 2)[0]).tolist() == [-1, -1]


@HOMES
def test_seq_lens(home: Home) -> None:
    indptr, last = np.array([0, 1, 1, 4, 4], np.int64), np.array([16, 7, 1, 0], np.int32)
    result = home.get(get_seq_lens(home.put(indptr), home.put(last), 16))
    assert result.dtype == np.int32
    assert result.tolist() == [16, 0, 33, 0]


@pytest.mark.parametrize(
    ("indptr", "seq_lens", "nnz", "argument"),
    [
        ([0, 2, 1], [2, 2], 5, "append_indptr"),
        ([1, 2, 3], [2, 2], 5, "append_indptr"),
        ([], [], 0, "append_indptr"),
        ([0, 2, 4], [2, 1], 4, "seq_lens"),
        ([0, 2, 4], [2], 4, "seq_lens"),
        ([0, 2, 4], [2, 2], 3, "nnz"),
        ([0], [], -1, "nnz"),
    ],
)
def test_bad_append_lengths(indptr: list[int], seq_lens: list[int], nnz: int, argument: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^{argument}\b"):
        get_batch_indices_positions(np.array(indptr, np.int32), np.array(seq_lens, np.int32), nnz)


@pytest.mark.parametrize(
    ("last", "page_size", "argument"), [([17, 1], 16, "kv_last_page_len"), ([0, 1], 16, "kv_last_page_len"), ([1, 1], 0, "page_size")]
)
def test_bad_page_tables(last: list[int], page_size: int, argument: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^{argument}\b"):
        get_seq_lens(np.array([0, 1, 2], np.int32), np.array(last, np.int32), page_size)


@pytest.mark.parametrize("page_size", [16.0, True, "16", None])
def test_a_page_size_is_an_int(page_size: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=f"^page_size: got {page_size!r}, expected an int"):
        get_seq_lens(np.array([0, 1], np.int32), np.array([1], np.int32), page_size)
    with pytest.raises(ArgumentError, match=r"^page_size: got 0, must be at least 1"):
        get_seq_lens(np.array([0, 1], np.int32), np.array([1], np.int32), 0)


@pytest.mark.parametrize("nnz", [3.0, True, "3", None])
def test_a_number_of_tokens_is_an_int(nnz: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=f"^nnz: got {nnz!r}, expected an int"):
        get_batch_indices_positions(np.array([0, 3], np.int32), np.array([3], np.int32), nnz)
