# SPDX-License-Identifier: Apache-2.0
"""The replay itself: every batch of the schedule is appended to a real cache, sized, planned, run and, now and then, checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyinfer.attention.decode import BatchDecodeWithPagedKVCacheWrapper
from cupyinfer.attention.page import append_paged_kv_cache
from cupyinfer.attention.prefill import BatchPrefillWithPagedKVCacheWrapper
from cupyinfer.cli.arguments import ModelShape
from cupyinfer.cli.replay.batching import Batch, BatchingLimits, ContinuousBatching
from cupyinfer.cli.replay.check import Checker
from cupyinfer.cli.replay.guarded import GuardedWorkspaces
from cupyinfer.cli.replay.memory import Array, Memory
from cupyinfer.cli.replay.stats import ReplayStats
from cupyinfer.cli.replay.token_values import TokenValues
from cupyinfer.cli.replay.trace import TraceRequest
from cupyinfer.dtypes import itemsize, numpy_dtype
from cupyinfer.errors import WorkspaceError
from cupyinfer.workspace import WorkspaceSize

_NAN_BYTE = 0xFF


@dataclass(frozen=True)
class ReplayConfig:
    """How to replay.

    Attributes:
        shape: heads, width, type and page size.
        limits: batch, chunk and cache sizes.
        check_every: steps from one check against the oracle to the next.
        seed: of values, pages and samples.
    """

    shape: ModelShape
    limits: BatchingLimits
    check_every: int
    seed: int


class ReplaySession:
    """One replay of a trace.

    Args:
        requests: the trace, fitted to the cache.
        config: how to replay.
        memory: where.
    """

    def __init__(self, requests: Sequence[TraceRequest], config: ReplayConfig, memory: Memory) -> None:
        self._config = config
        self._memory = memory
        self._requests = requests
        longest = max(request.num_cached for request in requests)
        most_queries = max(config.limits.chunk, config.limits.max_batch)
        self._values = TokenValues(config.shape, len(requests), longest, most_queries, memory, config.seed)
        self._checker = Checker(config.shape, self._values, memory, config.seed + 1)
        self._cache = self._new_cache(), self._new_cache()
        self._wrappers: dict[str, Any] = {
            "decode": BatchDecodeWithPagedKVCacheWrapper(backend="fa2" if memory.backend == "fa3" else memory.backend),
            "prefill": BatchPrefillWithPagedKVCacheWrapper(backend=memory.backend),
        }
        self.stats = ReplayStats(self._checker.accuracy)

    def _new_cache(self) -> Array:
        """A cache of NaNs: slots that hold no token must not matter."""
        shape, limits = self._config.shape, self._config.limits
        size = (limits.num_pages, limits.page_size, shape.num_kv_heads, shape.head_dim)
        raw = self._memory.filled(int(np.prod(size)) * itemsize(shape.dtype), _NAN_BYTE)
        return raw.view(numpy_dtype(shape.dtype)).reshape(size)

    def run(self, advance: Callable[[int], None]) -> ReplayStats:
        """Replay everything.

        Args:
            advance: called with the number of query tokens each step had.
        """
        batching = ContinuousBatching(self._requests, self._config.limits, self._config.seed)
        start = time.perf_counter()
        for step_idx, step in enumerate(batching.steps()):
            checked = step_idx % self._config.check_every == 0
            batches = [batch for batch in step if batch is not None]
            for batch in batches:
                self._launch(batch, step_idx, checked)
            self.stats.num_steps += 1
            self.stats.num_checked_steps += checked
            advance(sum(batch.num_tokens for batch in batches))
        self.stats.wall_seconds = time.perf_counter() - start
        self.stats.num_requests = batching.num_finished
        self.stats.num_preempted = batching.num_preempted
        return self.stats

    def _launch(self, batch: Batch, step_idx: int, checked: bool) -> None:
        where = f"step {step_idx}, {batch.kind}"
        wrapper, memory, stats = self._wrappers[batch.kind], self._memory, self.stats
        arguments, options = self._plan_arguments(batch)
        size = wrapper.workspace_size(*arguments, **options)
        if checked:
            self._expect_refusal(wrapper, size, arguments, options, where)
        workspaces = GuardedWorkspaces(memory, size)
        wrapper.reset_workspace_buffer(workspaces.float_buffer, workspaces.int_buffer)
        start = time.perf_counter()
        wrapper.plan(*arguments, **options)
        plan_seconds = time.perf_counter() - start
        used = WorkspaceSize(wrapper.plan_info.float_bytes, wrapper.plan_info.int_bytes)
        if used != size:
            stats.faults.append(f"{where}: workspace_size said {tuple(size)} bytes, the plan uses {tuple(used)}")
        self._append(batch)
        q, out, lse = self._values.queries(batch.num_tokens), *self._outputs(batch.num_tokens)
        _, run_seconds = memory.seconds(lambda: wrapper.run(q, self._cache, out=out, lse=lse))
        stats.faults += [f"{where}: {fault}" for fault in workspaces.damaged()]
        stats.record(batch, size, plan_seconds, run_seconds)
        if checked:
            self._checker.check(batch, q, out, lse, where)

    def _plan_arguments(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        shape = self._config.shape
        pages = (batch.page_indptr, self._memory.upload(batch.page_indices), batch.last_page_len)
        heads = (shape.num_qo_heads, shape.num_kv_heads, shape.head_dim, shape.page_size)
        if batch.decode:
            return (*pages, *heads), {"q_data_type": shape.dtype}
        return (batch.qo_indptr, *pages, *heads), {"q_data_type": shape.dtype, "causal": True}

    def _append(self, batch: Batch) -> None:
        entries, positions = batch.token_requests(), batch.token_positions()
        requests = batch.requests[entries]
        append_paged_kv_cache(
            self._memory.upload(self._values.key_rows(requests, positions)),
            self._memory.upload(self._values.value_rows(requests, positions)),
            entries.astype(np.int32),
            positions.astype(np.int32),
            self._cache,
            batch.page_indices,
            batch.page_indptr.astype(np.int32),
            batch.last_page_len.astype(np.int32),
        )

    def _outputs(self, num_tokens: int) -> tuple[Array, Array]:
        """Output and log-sum-exp arrays, NaN until they are written."""
        shape = self._config.shape
        out = self._memory.filled(num_tokens * shape.num_qo_heads * shape.head_dim * itemsize(shape.dtype), _NAN_BYTE)
        lse = self._memory.filled(num_tokens * shape.num_qo_heads * 4, _NAN_BYTE)
        return (
            out.view(numpy_dtype(shape.dtype)).reshape(num_tokens, shape.num_qo_heads, shape.head_dim),
            lse.view(np.float32).reshape(num_tokens, shape.num_qo_heads),
        )

    def _expect_refusal(self, wrapper: Any, size: WorkspaceSize, arguments: tuple[Any, ...], options: dict[str, Any], where: str) -> None:
        """Plan with each workspace one byte short, which must fail and change nothing."""
        for short in (WorkspaceSize(size.float_bytes - 1, size.int_bytes), WorkspaceSize(size.float_bytes, size.int_bytes - 1)):
            if min(short) < 0:
                continue
            workspaces = GuardedWorkspaces(self._memory, short)
            wrapper.reset_workspace_buffer(workspaces.float_buffer, workspaces.int_buffer)
            try:
                wrapper.plan(*arguments, **options)
            except WorkspaceError:
                continue
            self.stats.faults.append(f"{where}: a plan of {tuple(size)} bytes was made in {tuple(short)}")
