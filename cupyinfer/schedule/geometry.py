# SPDX-License-Identifier: Apache-2.0
"""The host integers of one batch: who asks how many queries of how many keys, and where those lie."""

from __future__ import annotations

import numbers
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupyinfer.errors import ArgumentError, ArgumentTypeError
from cupyinfer.schedule.counting import counting, ends, room_for, scalar, tuple_new

Ints = npt.NDArray[np.int64]
_INT32_MAX = 2**31 - 1
_INT32, _INT64, _UINT64 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.uint64)
#: Integers no further from zero than this: the difference of two times any page size is still within 64 bits.
_NARROW = 2**31
#: Keys of the longest request, and packed query rows: kernels count both in 32 bits, and may look one tile further.
MAX_KV_LEN = MAX_PACKED_ROWS = _INT32_MAX - 2**16
#: Units of work of a batch: a tile of one KV head, or a part of it.
MAX_UNITS = _INT32_MAX - 2**16


class BatchGeometry(NamedTuple):
    """One batch, as integers on the host. Arrays have one entry per request.

    Attributes:
        qo_len: query tokens.
        kv_len: keys.
        q_begin: first query token in ``q``.
        kv_base: first entry in the page table (paged), or first row of ``k`` and ``v`` (ragged).
        num_qo_tokens: query tokens of all requests.
        num_kv_entries: page-table entries, or rows of ``k`` and ``v``, of all requests.
        shortest_kv: keys of the shortest request, 0 without requests.
        longest_kv: keys of the longest request, 0 without requests.
        shortest_qo, longest_qo: least and most query tokens of a request, in prefill 0 without requests.
        uniform_qo_len: query tokens of every request when all have the same number by construction (decode: 1), else None.
    """

    qo_len: Ints
    kv_len: Ints
    q_begin: Ints
    kv_base: Ints
    num_qo_tokens: int
    num_kv_entries: int
    shortest_kv: int
    longest_kv: int
    shortest_qo: int
    longest_qo: int
    uniform_qo_len: int | None = None

    @property
    def batch_size(self) -> int:
        """Number of requests."""
        return len(self.kv_len)


class Lengths(NamedTuple):
    """Keys or query tokens per request, with the ends of their range, which checking finds and planning needs again."""

    each: Ints
    shortest: int
    longest: int


@lru_cache(maxsize=8)
def _ones(count: int) -> Ints:
    ones = np.ones(count, np.int64)
    ones.flags.writeable = False
    return ones


@lru_cache(maxsize=256)
def _one_query_each(batch: int) -> tuple[Ints, Ints]:
    """Query tokens of each request of a decode batch, and the first one of each: parts of arrays that are kept anyway."""
    return _ones(room_for(batch))[:batch], counting(batch)


def check_int(value: Any, argument: str, low: int) -> int:
    """An integer of at least `low` that 32 bits hold; raise ArgumentTypeError or ArgumentError otherwise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ArgumentTypeError(f"{argument}: got {value!r}, expected an int")
    number = int(value)
    if number < low:
        raise ArgumentError(f"{argument}: got {number}, must be at least {low}")
    if number > _INT32_MAX:
        raise ArgumentError(f"{argument}: got {number}, must be at most {_INT32_MAX}")
    return number


def check_flag(value: Any, argument: str) -> bool:
    """Return `value` as a bool; raise ArgumentTypeError unless it is one: "no" would be true."""
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentTypeError(f"{argument}: got {value!r}, expected True or False")
    return bool(value)


def store_ints(record: Any, least: dict[str, int], optional: tuple[str, ...] = ()) -> None:
    """Make integer fields of a frozen dataclass Python ints, since a NumPy integer of few bits would overflow in sums and products.

    Args:
        record: whose fields; called by its `__post_init__`.
        least: least value of each field, by name.
        optional: those that may be None.

    Raises:
        ArgumentTypeError, ArgumentError: as for `check_int`.
    """
    for name, low in least.items():
        value = getattr(record, name)
        if value is not None or name not in optional:
            object.__setattr__(record, name, check_int(value, name, low))


def check_heads(num_qo_heads: int, num_kv_heads: int) -> int:
    """Return query heads per KV head.

    Raises:
        ArgumentError: a count below 1, or one that is not a multiple of the other.
    """
    if num_qo_heads < 1 or num_kv_heads < 1:
        raise ArgumentError(f"num_qo_heads, num_kv_heads: got {num_qo_heads} and {num_kv_heads}, both must be at least 1")
    if num_qo_heads % num_kv_heads:
        raise ArgumentError(f"num_qo_heads: got {num_qo_heads}, which is not a multiple of num_kv_heads = {num_kv_heads}")
    return num_qo_heads // num_kv_heads


def host_integers(values: Any, argument: str) -> Ints:
    """A one-dimensional host array of integers as int64, none of which is so large that sums and products of two overflow.

    Raises:
        ArgumentTypeError: not integers.
        ArgumentError: not one-dimensional, or an entry that no offset or length comes near.
    """
    if type(values) is np.ndarray:
        if values.dtype == _INT32 and values.ndim == 1:
            return values.astype(_INT64)
        array = values
    else:
        try:
            array = np.asarray(values)
        except (TypeError, ValueError, OverflowError) as error:
            raise ArgumentTypeError(f"{argument}: got {type(values).__name__}, expected one dimension of integers ({error})") from error
    if array.ndim != 1:
        raise ArgumentError(f"{argument}: got shape {array.shape}, expected one dimension")
    dtype = array.dtype
    if dtype.kind not in "iu":
        if array.size:
            raise ArgumentTypeError(f"{argument}: got {dtype}, expected int32 or int64")
    elif dtype.itemsize == 8 and array.size:
        _check_narrow(array, argument)
    return array.astype(_INT64)


def _check_narrow(array: npt.NDArray[Any], argument: str) -> None:
    """Refuse 64-bit integers whose differences, times a page size, would wrap around and pass for others."""
    low, high = ends(array)
    if low < -_NARROW or high > _NARROW:
        raise ArgumentError(f"{argument}: holds {low if low < -_NARROW else high}, the largest supported offset is {_INT32_MAX}")


def _lengths(indptr: Ints, argument: str) -> Lengths:
    each = _differences(indptr, argument)
    shortest, longest = ends(each) if each.size else (0, 0)
    if shortest < 0:
        _check_order(indptr, argument)
    _check_end(indptr, argument)
    return tuple_new(Lengths, (each, shortest, longest))


def _differences(indptr: Ints, argument: str) -> Ints:
    if indptr.size == 0:
        raise ArgumentError(f"{argument}: is empty, a batch of n requests has n + 1 offsets")
    if indptr.item(0) != 0:
        raise ArgumentError(f"{argument}: begins with {indptr[0]}, offsets begin with 0")
    return indptr[1:] - indptr[:-1]


def _check_order(indptr: Ints, argument: str) -> None:
    decreases = indptr[1:] < indptr[:-1]
    if decreases.any():
        at = int(decreases.argmax())
        raise ArgumentError(f"{argument}: decreases from {indptr[at]} to {indptr[at + 1]} at entry {at + 1}")


def _check_end(indptr: Ints, argument: str) -> None:
    if indptr.item(-1) > _INT32_MAX:
        raise ArgumentError(f"{argument}: ends at {indptr[-1]}, the largest supported offset is {_INT32_MAX}")


def paged_kv_lengths(indptr: Ints, last_page_len: Ints, page_size: int, names: tuple[str, str]) -> Lengths:
    """Keys per request of a paged cache: ``(pages - 1) * page_size + last_page_len``, and 0 for a request without pages.

    Args:
        indptr: [batch_size + 1] offsets into the page table.
        last_page_len: [batch_size] keys in each request's last page, in 1..page_size; anything in 0..page_size without pages.
        page_size: keys per page.
        names: what errors call the two arrays.

    Raises:
        ArgumentError: lengths of the arrays that do not fit, decreasing offsets, or an entry out of range.
    """
    if page_size < 1:
        raise ArgumentError(f"page_size: got {page_size}, a page holds at least 1 key")
    page_size = int(page_size)
    kv_len = _differences(indptr, names[0])
    if len(last_page_len) != len(kv_len):
        raise ArgumentError(f"{names[1]}: has {len(last_page_len)} entries, {names[0]} describes {len(kv_len)} requests")
    size = scalar(page_size)
    missing = size - last_page_len
    kv_len *= size
    kv_len -= missing
    if not kv_len.size:
        return Lengths(kv_len, 0, 0)
    shortest, longest = kv_len.item(kv_len.argmin()), kv_len.item(kv_len.argmax())
    # Where 0 to page_size - 1 keys are missing, only a request without pages, or with fewer than none, has no key: the usual batch is
    # checked by the ends of both ranges. Seen as unsigned, less than 0 is more than any page holds.
    unsigned = missing.view(_UINT64)
    if shortest < 1 or unsigned.item(unsigned.argmax()) >= page_size:
        _check_order(indptr, names[0])
        _check_last_page_len(last_page_len, indptr[1:] - indptr[:-1], page_size, names[1])
        np.maximum(kv_len, scalar(0), out=kv_len)
        shortest, longest = max(0, shortest), max(0, longest)
    lengths = tuple_new(Lengths, (kv_len, shortest, longest))
    if longest > MAX_KV_LEN or indptr.item(-1) > _INT32_MAX:
        _check_end(indptr, names[0])
        _check_kv_len(lengths, names[0])
    return lengths


def _check_last_page_len(last_page_len: Ints, num_pages: Ints, page_size: int, argument: str) -> None:
    lowest = np.minimum(num_pages, 1)  # of a request without pages, 0 is fine too
    wrong = (last_page_len < lowest) | (last_page_len > page_size)
    if wrong.any():
        at = int(wrong.argmax())
        raise ArgumentError(f"{argument}: request {at} has {last_page_len[at]}, expected {lowest[at]} to page_size = {page_size}")


def _check_kv_len(lengths: Lengths, argument: str) -> None:
    if lengths.longest > MAX_KV_LEN:
        at = lengths.each.argmax()
        raise ArgumentError(f"{argument}: request {at} has {lengths.longest} keys, supported are up to {MAX_KV_LEN}")


def decode_geometry(indptr: Ints, last_page_len: Ints, page_size: int) -> BatchGeometry:
    """One query token per request over a paged cache. Arrays as for `paged_kv_lengths`."""
    kv_len, shortest, longest = paged_kv_lengths(indptr, last_page_len, page_size, ("indptr", "last_page_len"))
    batch = len(kv_len)
    qo_len, q_begin = _one_query_each(batch)
    return tuple_new(BatchGeometry, (qo_len, kv_len, q_begin, indptr[:-1], batch, indptr.item(-1), shortest, longest, 1, 1, 1))


def paged_prefill_geometry(qo_indptr: Ints, paged_kv_indptr: Ints, last_page_len: Ints, page_size: int) -> BatchGeometry:
    """Any number of query tokens per request over a paged cache. `qo_indptr` is [batch_size + 1]; the rest as for `paged_kv_lengths`."""
    queries = _lengths(qo_indptr, "qo_indptr")
    if len(paged_kv_indptr) != len(qo_indptr):
        raise ArgumentError(
            f"paged_kv_indptr: has {len(paged_kv_indptr)} entries, qo_indptr has {len(qo_indptr)}; both need batch_size + 1"
        )
    lengths = paged_kv_lengths(paged_kv_indptr, last_page_len, page_size, ("paged_kv_indptr", "paged_kv_last_page_len"))
    return _prefill_geometry(qo_indptr, queries, paged_kv_indptr, lengths)


def ragged_prefill_geometry(qo_indptr: Ints, kv_indptr: Ints) -> BatchGeometry:
    """Any number of query tokens per request over ragged keys. Both offset arrays are [batch_size + 1]."""
    queries = _lengths(qo_indptr, "qo_indptr")
    lengths = _lengths(kv_indptr, "kv_indptr")
    if len(qo_indptr) != len(kv_indptr):
        raise ArgumentError(f"kv_indptr: has {len(kv_indptr)} entries, qo_indptr has {len(qo_indptr)}; both need batch_size + 1")
    _check_kv_len(lengths, "kv_indptr")
    return _prefill_geometry(qo_indptr, queries, kv_indptr, lengths)


def _prefill_geometry(qo_indptr: Ints, queries: Lengths, kv_indptr: Ints, keys: Lengths) -> BatchGeometry:
    qo_len, shortest_qo, longest_qo = queries
    kv_len, shortest_kv, longest_kv = keys
    counts = qo_indptr.item(-1), kv_indptr.item(-1), shortest_kv, longest_kv, shortest_qo, longest_qo, None
    return tuple_new(BatchGeometry, (qo_len, kv_len, qo_indptr[:-1], kv_indptr[:-1], *counts))
