# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: every token of every request once, in order, in pages nobody else holds."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyinfer import ArgumentError
from cupyinfer.cli.replay.batching import Batch, BatchingLimits, ContinuousBatching
from cupyinfer.cli.replay.trace import TraceRequest


def pages_of(batch: Batch, entry: int) -> list[int]:
    return batch.page_indices[batch.page_indptr[entry] : batch.page_indptr[entry + 1]].tolist()


@settings(deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=20),
    max_batch=st.integers(1, 8),
    chunk=st.integers(1, 30),
    page_size=st.integers(1, 7),
    spare_pages=st.integers(0, 30),
    seed=st.integers(0, 5),
)
def test_every_token_once_in_its_own_pages(
    lengths: list[tuple[int, int]], max_batch: int, chunk: int, page_size: int, spare_pages: int, seed: int
) -> None:
    requests = [TraceRequest(float(idx), *pair) for idx, pair in enumerate(lengths)]
    num_pages = max(-(-request.num_cached // page_size) for request in requests) + spare_pages
    batching = ContinuousBatching(requests, BatchingLimits(max_batch, chunk, num_pages, page_size), seed)
    cached: dict[int, int] = defaultdict(int)
    held: dict[int, list[int]] = {}
    num_decoded: dict[int, int] = defaultdict(int)
    num_restarts = 0
    for step in batching.steps():
        batches = [batch for batch in step if batch is not None]
        assert batches
        in_step = [page for batch in batches for page in batch.page_indices.tolist()]
        assert len(set(in_step)) == len(in_step) and max(in_step) < num_pages
        assert sum(len(batch.requests) for batch in batches) <= max_batch
        assert len({request for batch in batches for request in batch.requests.tolist()}) == sum(len(batch.requests) for batch in batches)
        if step.prefill is not None:
            assert 1 <= step.prefill.num_tokens <= chunk and not step.prefill.decode
        if step.decode is not None:
            assert (step.decode.qo_len == 1).all() and step.decode.decode
        for batch in batches:
            assert (np.diff(batch.page_indptr) * page_size - page_size + batch.last_page_len == batch.kv_len).all()
            assert ((batch.last_page_len >= 1) & (batch.last_page_len <= page_size)).all()
            for entry, request in enumerate(batch.requests.tolist()):
                begin, end = int(batch.kv_len[entry] - batch.qo_len[entry]), int(batch.kv_len[entry])
                pages = pages_of(batch, entry)
                if begin != cached[request]:  # preempted: it begins anew
                    assert begin == 0 and not batch.decode
                    num_restarts += 1
                else:
                    assert pages[: len(held.get(request, []))] == held.get(request, [])
                cached[request], held[request] = end, pages
                num_decoded[request] += batch.decode
    assert batching.num_finished == len(requests)
    assert batching.num_free_pages == num_pages
    assert num_restarts <= batching.num_preempted
    for idx, request in enumerate(requests):
        assert cached[idx] == request.num_cached
        assert num_decoded[idx] == request.generated - 1


def test_prompts_are_chunked_in_order() -> None:
    requests = [TraceRequest(0, 10, 1), TraceRequest(1, 5, 3)]
    steps = list(ContinuousBatching(requests, BatchingLimits(4, 8, 100, 4)).steps())
    prefills = [
        (step.prefill.requests.tolist(), step.prefill.qo_len.tolist(), step.prefill.kv_len.tolist()) for step in steps if step.prefill
    ]
    assert prefills == [([0], [8], [8]), ([0, 1], [2, 5], [10, 5])]
    assert [step.decode.kv_len.tolist() for step in steps if step.decode] == [[6], [7]]


def test_token_positions() -> None:
    requests = [TraceRequest(0, 10, 1), TraceRequest(1, 5, 3)]
    second = list(ContinuousBatching(requests, BatchingLimits(4, 8, 100, 4)).steps())[1].prefill
    assert second is not None
    assert second.token_requests().tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert second.token_positions().tolist() == [8, 9, 0, 1, 2, 3, 4]


def test_the_youngest_gives_way() -> None:
    requests = [TraceRequest(0, 4, 9), TraceRequest(1, 4, 9)]
    batching = ContinuousBatching(requests, BatchingLimits(2, 100, 5, 4))
    order = [step.decode.requests.tolist() for step in batching.steps() if step.decode]
    assert batching.num_preempted == 1 and batching.num_finished == 2
    # Both decode until the fifth page is gone, the first alone until it is done, then the second.
    assert order == [[0, 1]] * 4 + [[0]] * 4 + [[1]] * 4


def test_a_request_that_no_cache_holds() -> None:
    with pytest.raises(ArgumentError, match="needs 17 tokens"):
        ContinuousBatching([TraceRequest(0, 17, 1)], BatchingLimits(1, 1, 4, 4))
