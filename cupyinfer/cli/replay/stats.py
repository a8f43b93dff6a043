# SPDX-License-Identifier: Apache-2.0
"""What a replay measures, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

from cupyinfer.cli.replay.batching import Batch
from cupyinfer.cli.replay.check import Accuracy
from cupyinfer.workspace import WorkspaceSize


@dataclass
class KindStats:
    """Measurements of all decode batches, or of all prefill batches.

    Attributes:
        num_batches: batches.
        num_tokens: query tokens.
        num_keys: keys read, summed over requests.
        attention_seconds: time of all runs.
        peak_float_bytes: largest float workspace.
        peak_int_bytes: largest int workspace.
        most_pages: page-table entries of the largest batch.
    """

    num_batches: int = 0
    num_tokens: int = 0
    num_keys: int = 0
    attention_seconds: float = 0.0
    peak_float_bytes: int = 0
    peak_int_bytes: int = 0
    most_pages: int = 0


@dataclass
class ReplayStats:
    """Measurements of a whole replay.

    Attributes:
        accuracy: what the checks found.
        faults: one line per workspace that was not exact or whose guard bytes changed.
        num_steps: steps.
        num_checked_steps: steps whose batches were compared with the oracle.
        num_requests: requests finished.
        num_preempted: how often a request gave its pages back.
        wall_seconds: time of the replay.
        plan_seconds: time of every plan.
        kinds: measurements by kind of batch.
    """

    accuracy: Accuracy
    faults: list[str] = field(default_factory=list)
    num_steps: int = 0
    num_checked_steps: int = 0
    num_requests: int = 0
    num_preempted: int = 0
    wall_seconds: float = 0.0
    plan_seconds: list[float] = field(default_factory=list)
    kinds: dict[str, KindStats] = field(default_factory=lambda: {"prefill": KindStats(), "decode": KindStats()})

    def record(self, batch: Batch, size: WorkspaceSize, plan_seconds: float, run_seconds: float) -> None:
        """Add one batch."""
        self.plan_seconds.append(plan_seconds)
        kind = self.kinds[batch.kind]
        kind.num_batches += 1
        kind.num_tokens += batch.num_tokens
        kind.num_keys += int(batch.kv_len.sum())
        kind.attention_seconds += run_seconds
        kind.peak_float_bytes = max(kind.peak_float_bytes, size.float_bytes)
        kind.peak_int_bytes = max(kind.peak_int_bytes, size.int_bytes)
        kind.most_pages = max(kind.most_pages, len(batch.page_indices))
