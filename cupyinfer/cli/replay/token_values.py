# SPDX-License-Identifier: Apache-2.0
"""Queries, keys and values made from a seed: what any token of any request holds can be said again at any time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupyinfer.cli.arguments import ModelShape
from cupyinfer.cli.replay.memory import Array, Memory
from cupyinfer.dtypes import numpy_dtype

Host = np.ndarray[Any, Any]
#: How many places in the pool a request's keys may begin at.
_NUM_STARTS = 4096
_QUERY_STARTS = 1024


class TokenValues:
    """One pool of random rows on the host. A request's key at position p is row ``start + p`` of it, its value one from the other end.

    So the reference never reads the cache, and a key written to a wrong slot shows as a wrong result.

    Args:
        shape: heads, width and type.
        num_requests: requests of the trace.
        max_tokens: longest request, tokens.
        max_queries: most query tokens of a batch.
        memory: where queries are used.
        seed: of everything.
    """

    def __init__(self, shape: ModelShape, num_requests: int, max_tokens: int, max_queries: int, memory: Memory, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._dtype = numpy_dtype(shape.dtype)
        self._pool = self._normal((_NUM_STARTS + max_tokens, shape.num_kv_heads, shape.head_dim))
        self._starts = self._rng.integers(0, _NUM_STARTS, num_requests)
        self._query_pool = memory.upload(self._normal((_QUERY_STARTS + max_queries, shape.num_qo_heads, shape.head_dim)))

    def _normal(self, size: tuple[int, ...]) -> Host:
        return self._rng.standard_normal(size, np.float32).astype(self._dtype)

    def key_rows(self, requests: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Host:
        """Keys [num_tokens, num_kv_heads, head_dim] of tokens given by request and position."""
        return self._take(self._starts[requests] + positions)

    def value_rows(self, requests: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Host:
        """Values [num_tokens, num_kv_heads, head_dim] of the same."""
        return self._take(len(self._pool) - 1 - self._starts[requests] - positions)

    def _take(self, rows: npt.NDArray[np.int64]) -> Host:
        # As integers: NumPy gathers ml_dtypes elements one by one.
        taken: Host = self._pool.view(np.uint16)[rows].view(self._dtype)
        return taken

    def head_keys(self, request: int, num_tokens: int, kv_head: int) -> Host:
        """The first keys of a request for one KV head, [num_tokens, head_dim]."""
        start = self._starts[request]
        keys: Host = self._pool[start : start + num_tokens, kv_head]
        return keys

    def head_values(self, request: int, num_tokens: int, kv_head: int) -> Host:
        """The first values of a request for one KV head, [num_tokens, head_dim]."""
        last = len(self._pool) - self._starts[request]
        values: Host = self._pool[last - num_tokens : last, kv_head][::-1]
        return values

    def queries(self, num_tokens: int) -> Array:
        """Queries [num_tokens, num_qo_heads, head_dim] for the next batch, without a copy."""
        start = int(self._rng.integers(0, _QUERY_STARTS))
        return self._query_pool[start : start + num_tokens]
