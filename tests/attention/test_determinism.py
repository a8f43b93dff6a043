# SPDX-License-Identifier: Apache-2.0
"""What a result must not depend on: dirt in workspaces and unused slots, the neighbours in a batch, the order of runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.batches import Case, Data
from tests.support.runner import Call, assert_same_bits, run_case

INVARIANT: list[dict[str, Any]] = [{"disable_split_kv": True}, {"fixed_split_size": 16}]


def rows_of(result: tuple[Any, Any], begin: int, end: int) -> tuple[Any, Any]:
    return np.ascontiguousarray(result[0][begin:end]), np.ascontiguousarray(result[1][begin:end])


def join(parts: list[Data]) -> Data:
    """One batch out of single requests, each with its own inputs."""
    first = parts[0].case
    kv_lens = tuple(part.case.kv_lens[0] for part in parts)
    batch = Data(replace(first, kv_lens=kv_lens, qo_lens=tuple(part.case.queries[0] for part in parts) if first.qo_lens else None))
    batch.q = np.concatenate([part.q for part in parts])
    batch.keys, batch.values = ([rows for part in parts for rows in getattr(part, name)] for name in ("keys", "values"))
    rng = np.random.default_rng(5)
    if first.paged:
        batch._fill_pages(rng, np.nan)
    else:
        batch._fill_rows(np.nan)
    return batch


def run_alone(data: Data, backend: str, check: bool = True) -> tuple[Any, Any]:
    call = Call(data.case, backend, data)
    call.plan()
    result = call.run()
    if check:
        call.check(result)
    return result


@pytest.mark.parametrize("op", ["decode", "paged", "ragged"])
@pytest.mark.parametrize("options", INVARIANT, ids=str)
def test_neighbours_change_no_bit(options: dict[str, Any], op: str, backend: str) -> None:
    """One request alone, beside short ones, beside long ones, behind so many that CTAs come to it late, and elsewhere in the batch."""
    common = {**options, "op": op, "heads": (8, 2), "head_dims": (64, 64), "dtype": "bfloat16", "causal": op != "decode"}

    def one(kv_len: int, qo_len: int, seed: int) -> Data:
        return Data(Case((kv_len,), None if op == "decode" else (qo_len,), seed=seed, **common))

    mine = one(1900, 60, 1)
    want = run_alone(mine, backend)
    num_rows = len(want[0])
    for neighbours in ([(5, 1)] * 31, [(3000, 90)], [(9, 9), (0, 3), (10, 10)], [(1, 1)] * 3, [(2100, 3)] * 90):
        others = [one(kv_len, qo_len, 10 + at) for at, (kv_len, qo_len) in enumerate(neighbours)]
        check = len(neighbours) < 90  # an oracle of so many takes long, and `mine` has been checked
        first = run_alone(join([mine, *others]), backend, check)
        assert_same_bits(rows_of(first, 0, num_rows), want)
        last = run_alone(join([*others, mine]), backend, check)
        assert_same_bits(rows_of(last, len(last[0]) - num_rows, len(last[0])), want)


@pytest.mark.parametrize("options", INVARIANT, ids=str)
def test_a_neighbour_that_grows_by_one_token(options: dict[str, Any], backend: str) -> None:
    """A long decode row beside a prefill of 9 and then 10 tokens, in one prefill call."""
    common = {**options, "op": "paged", "heads": (14, 2), "head_dims": (64, 64), "causal": True}
    row = Data(Case((9802,), (1,), seed=1, **common))
    results = []
    for num_tokens in (9, 10):
        neighbour = Data(Case((num_tokens,), (num_tokens,), seed=2, **common))
        results.append(rows_of(run_alone(join([row, neighbour]), backend), 0, 1))
    assert_same_bits(results[0], results[1])


@pytest.mark.parametrize("op", ["decode", "paged", "ragged"])
def test_runs_repeat(op: str, backend: str) -> None:
    """Which CTA comes last to a merge is chance; the bits are not."""
    case = Case((20_000 if backend != "host" else 4000, 30, 0, 777), None if op == "decode" else (20, 3, 2, 70), op)
    call = Call(case, backend)
    assert call.size.float_bytes
    call.plan()
    want = call.run()
    for repeat in range(50 if backend != "host" else 2):
        call.floats.fill(repeat)
        assert_same_bits(call.run(), want)
    for _ in range(3):
        call.plan()
        assert_same_bits(call.run(), want)


@pytest.mark.decode
def test_what_workspaces_held_before(backend: str) -> None:
    """Ones, zeros, and what a plan of another batch left, interrupted by nothing."""
    case = Case((32768 if backend != "host" else 3000,), heads=(32, 8), dtype="bfloat16")
    call = Call(case, backend)
    other = Call(replace(case, kv_lens=tuple(range(10, 330, 5)), seed=3), backend)
    results = []
    for dirt in (0xFF, 0x00, 0x7F):
        call.floats.fill(dirt)
        call.ints.fill(dirt)
        call.plan()
        results.append(call.run())
    call.check(results[0])
    sizes = [max(pair) for pair in zip(call.size, other.size, strict=True)]
    shared = [call.memory.put(np.full(num_bytes, 0xFF, np.uint8)) for num_bytes in sizes]
    other.wrapper.reset_workspace_buffer(*shared)
    other.plan()
    other.check(other.run())
    call.wrapper = other.wrapper
    call.plan()
    results.append(call.run())
    for result in results[1:]:
        assert_same_bits(result, results[0])


UNUSED = {
    "decode-part-of-a-page": Case((13,), page_size=4),
    "decode-many": Case((13, 0, 70, 1, 129), page_size=64, dtype="bfloat16", layout="HND"),
    "decode-e4m3": Case((13, 70), kv_dtype="float8_e4m3fn"),
    "paged": Case((13, 6), (5, 1), "paged", page_size=4, dtype="bfloat16", causal=True),
    "paged-window": Case((200, 300), (50, 100), "paged", window_left=20, causal=True),
    "paged-64-rows": Case((100, 70), (10, 12), "paged", page_size=16),
    "ragged": Case((200, 150, 47), (200, 150, 47), "ragged", heads=(8, 8), dtype="bfloat16", causal=True),
    "ragged-short": Case((5, 33), (2, 1), "ragged"),
}


@pytest.mark.parametrize("name", UNUSED)
def test_unused_slots_are_never_seen(name: str, backend: str) -> None:
    """NaN and infinity in slots and rows of nobody leave the same bits as zeros there."""
    case = UNUSED[name]
    want = run_case(case, backend)
    for unused in (0.0, np.inf) if case.kv_dtype is None else (0.0,):
        call = Call(case, backend, Data(case, unused))
        call.plan()
        assert_same_bits(call.run(), want)


@pytest.mark.parametrize("op", ["decode", "paged", "ragged"])
def test_keys_outside_a_window_are_never_seen(op: str, backend: str) -> None:
    """Values of keys that no row of the request sees may be anything: their weight is not 0, they are left out."""
    case = Case((700, 90), None if op == "decode" else (9, 3), op, window_left=40, causal=op != "decode")
    want = run_case(case, backend)
    data = Data(case)
    for keys, values, qo_len in zip(data.keys, data.values, case.queries, strict=True):
        unseen = len(keys) - qo_len - 40
        keys[:unseen], values[:unseen] = np.nan, np.nan
    rng = np.random.default_rng(0)
    if case.paged:
        data._fill_pages(rng, np.nan)
    else:
        data._fill_rows(np.nan)
    call = Call(case, backend, data)
    call.plan()
    assert_same_bits(call.run(), want)


def test_order_of_pages_is_no_matter(backend: str) -> None:
    """The same keys in other pages, and pages shared by two requests."""
    case = Case((100, 100), (7, 7), "paged", causal=True)
    data = Data(case)
    data.keys[1], data.values[1], data.q[7:] = data.keys[0], data.values[0], data.q[:7]
    data._fill_pages(np.random.default_rng(1), np.nan)
    want = run_alone(data, backend)
    assert_same_bits(rows_of(want, 7, 14), rows_of(want, 0, 7))
    data._fill_pages(np.random.default_rng(2), np.nan)
    assert_same_bits(run_alone(data, backend), want)
    data.indices[7:] = data.indices[:7]
    assert_same_bits(run_alone(data, backend), want)
