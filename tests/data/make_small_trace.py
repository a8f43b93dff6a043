# SPDX-License-Identifier: Apache-2.0
"""Generate small_trace.csv, the request trace the demo and the tests replay."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

NUM_REQUESTS = 256
MEDIAN_CONTEXT_TOKENS = 60
MAX_CONTEXT_TOKENS = 400
MAX_GENERATED_TOKENS = 40
MEAN_GAP_SECONDS = 0.25
START = datetime(2024, 1, 1)
TRACE = Path(__file__).with_name("small_trace.csv")


def trace_text(seed: int = 20240101) -> str:
    """The whole trace: Poisson arrivals, log-normal context lengths, and generated lengths that are mostly short."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(MEAN_GAP_SECONDS, NUM_REQUESTS))
    context = np.clip(rng.lognormal(np.log(MEDIAN_CONTEXT_TOKENS), 0.8, NUM_REQUESTS), 1, MAX_CONTEXT_TOKENS).astype(int)
    generated = np.clip(rng.geometric(1 / 12, NUM_REQUESTS), 1, MAX_GENERATED_TOKENS)
    # The first requests hold the extremes, so that every replay meets them.
    context[:3] = 1, MAX_CONTEXT_TOKENS, 16
    generated[:3] = 1, MAX_GENERATED_TOKENS, 1
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for seconds, num_context, num_generated in zip(arrival, context, generated, strict=True):
        # A tick is 100 ns: seven digits, one more than datetime keeps.
        whole, ticks = divmod(int(seconds * 10_000_000), 10_000_000)
        lines.append(f"{START + timedelta(seconds=whole):%Y-%m-%d %H:%M:%S}.{ticks:07d},{num_context},{num_generated}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TRACE.write_text(trace_text(), encoding="ascii")
