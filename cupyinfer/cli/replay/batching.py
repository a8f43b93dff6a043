# SPDX-License-Identifier: Apache-2.0
"""Continuous batching with chunked prefill over a pool of pages, as integers only: which batches a trace turns into."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cupyinfer.cli.replay.trace import TraceRequest
from cupyinfer.errors import ArgumentError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BatchingLimits:
    """What bounds a step.

    Attributes:
        max_batch: requests in the cache at once.
        chunk: prompt tokens of one step.
        num_pages: pages of the cache.
        page_size: tokens per page.
    """

    max_batch: int
    chunk: int
    num_pages: int
    page_size: int


@dataclass(frozen=True, eq=False)
class Batch:
    """One attention call of a step. Arrays have one entry per request; lengths count the tokens this step appends.

    Attributes:
        decode: one query token per request.
        requests: which request of the trace.
        qo_len: tokens appended now, all of them queries.
        kv_len: tokens in the cache after the append.
        page_indptr: [batch_size + 1] offsets into page_indices.
        page_indices: int32, the requests' pages one after the other.
        last_page_len: tokens in the last page.
    """

    decode: bool
    requests: Ints
    qo_len: Ints
    kv_len: Ints
    page_indptr: Ints
    page_indices: npt.NDArray[np.int32]
    last_page_len: Ints

    @property
    def kind(self) -> str:
        """ "decode" or "prefill"."""
        return "decode" if self.decode else "prefill"

    @property
    def num_tokens(self) -> int:
        """Query tokens of all requests."""
        return int(self.qo_len.sum())

    @property
    def qo_indptr(self) -> Ints:
        """[batch_size + 1] offsets of the requests' query tokens."""
        return np.concatenate([[0], np.cumsum(self.qo_len)])

    def token_requests(self) -> Ints:
        """[num_tokens] which entry of the batch each query token belongs to."""
        return np.repeat(np.arange(len(self.requests)), self.qo_len)

    def token_positions(self) -> Ints:
        """[num_tokens] position of each query token in its request."""
        return np.arange(self.num_tokens) + np.repeat(self.kv_len - self.qo_indptr[1:], self.qo_len)


class Step(NamedTuple):
    """What happens between two forward passes: a chunk of prompts, and one token of every request that has its prompt."""

    prefill: Batch | None
    decode: Batch | None


@dataclass(eq=False)
class _Running:
    """A request on its way: `prompt` tokens are prefilled, then `remaining` tokens are decoded one by one."""

    request: int
    prompt: int
    remaining: int
    cached: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def decoding(self) -> bool:
        return self.cached >= self.prompt


class ContinuousBatching:
    """Turns a trace into steps. Requests are admitted in order of arrival, as soon as the cache has room for their prompt.

    When decoding needs a page and none is free, the request admitted last gives its pages back and waits at the front of the
    queue, to prefill what it had again.

    Args:
        requests: the trace, none longer than the cache.
        limits: what bounds a step.
        seed: of the order in which pages are handed out, so that page tables are not runs of neighbours.

    Attributes:
        num_finished: requests done so far.
        num_preempted: how often a request gave its pages back.
    """

    def __init__(self, requests: Sequence[TraceRequest], limits: BatchingLimits, seed: int = 0) -> None:
        capacity = limits.num_pages * limits.page_size
        longest = max((request.num_cached for request in requests), default=0)
        if longest > capacity:
            raise ArgumentError(f"requests: one needs {longest} tokens in the cache, {limits.num_pages} pages hold {capacity}")
        self.limits = limits
        self.num_finished = 0
        self.num_preempted = 0
        self._waiting = deque(_Running(idx, request.context, request.generated - 1) for idx, request in enumerate(requests))
        self._running: list[_Running] = []
        self._free: list[int] = np.random.default_rng(seed).permutation(limits.num_pages).tolist()

    @property
    def num_free_pages(self) -> int:
        """Pages that no request holds."""
        return len(self._free)

    def steps(self) -> Iterator[Step]:
        """Every step until the last request is done. A step's pages stay valid until the next one is asked for."""
        while self._waiting or self._running:
            decode = self._decode()
            prefill = self._prefill()
            yield Step(prefill, decode)
            self._retire()

    def _decode(self) -> Batch | None:
        tokens: list[tuple[_Running, int]] = []
        for running in list(self._running):
            if running not in self._running or not running.decoding:
                continue
            if self._reserve(running, running.cached + 1):
                running.cached += 1
                running.prompt += 1  # what a preempted request has to prefill again
                running.remaining -= 1
                tokens.append((running, 1))
        return self._batch(tokens, decode=True)

    def _reserve(self, running: _Running, num_tokens: int) -> bool:
        """Give a request the page its next token needs; False when it had to give up its own."""
        while len(running.pages) * self.limits.page_size < num_tokens:
            if self._free:
                running.pages.append(self._free.pop())
                continue
            victim = self._running.pop()
            self._release(victim)
            victim.cached = 0
            self._waiting.appendleft(victim)
            self.num_preempted += 1
            if victim is running:
                return False
        return True

    def _prefill(self) -> Batch | None:
        budget = self.limits.chunk
        decoded = {id(running) for running in self._running if running.decoding}
        tokens: list[tuple[_Running, int]] = []
        candidates = iter([running for running in self._running if id(running) not in decoded])
        while budget > 0:
            running = next(candidates, None) or self._admit()
            if running is None:
                break
            num_tokens = min(budget, running.prompt - running.cached)
            running.cached += num_tokens
            budget -= num_tokens
            tokens.append((running, num_tokens))
        return self._batch(tokens, decode=False)

    def _admit(self) -> _Running | None:
        if not self._waiting or len(self._running) >= self.limits.max_batch:
            return None
        needed = -(-self._waiting[0].prompt // self.limits.page_size)
        # A page per running request is held back, so that admitting one does not at once preempt it.
        if needed + len(self._running) > len(self._free):
            return None
        running = self._waiting.popleft()
        running.pages = [self._free.pop() for _ in range(needed)]
        self._running.append(running)
        return running

    def _retire(self) -> None:
        done = [running for running in self._running if running.decoding and running.remaining == 0]
        for running in done:
            self._release(running)
        self.num_finished += len(done)
        self._running = [running for running in self._running if running not in done]

    def _release(self, running: _Running) -> None:
        self._free += running.pages
        running.pages = []

    def _batch(self, tokens: list[tuple[_Running, int]], decode: bool) -> Batch | None:
        if not tokens:
            return None
        page_size = self.limits.page_size
        kv_len = np.array([running.cached for running, _ in tokens], np.int64)
        num_pages = -(-kv_len // page_size)
        pages = chain.from_iterable(running.pages[:used] for (running, _), used in zip(tokens, num_pages.tolist(), strict=True))
        return Batch(
            decode,
            np.array([running.request for running, _ in tokens], np.int64),
            np.array([num_tokens for _, num_tokens in tokens], np.int64),
            kv_len,
            np.concatenate([[0], np.cumsum(num_pages)]),
            np.fromiter(pages, np.int32, int(num_pages.sum())),
            kv_len - (num_pages - 1) * page_size,
        )
