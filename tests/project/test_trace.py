# SPDX-License-Identifier: Apache-2.0
"""The small trace is the one its script makes, and holds what the demo promises."""

from __future__ import annotations

import csv
import statistics
from datetime import datetime

from tests.data.make_small_trace import MAX_CONTEXT_TOKENS, MAX_GENERATED_TOKENS, TRACE, trace_text


def test_trace_is_the_generated_one() -> None:
    assert TRACE.read_text(encoding="ascii") == trace_text()


def test_trace_is_small_but_varied() -> None:
    assert TRACE.stat().st_size < 20_000
    with TRACE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    context = [int(row["ContextTokens"]) for row in rows]
    generated = [int(row["GeneratedTokens"]) for row in rows]
    times = [datetime.fromisoformat(row["TIMESTAMP"]) for row in rows]
    assert len(rows) >= 240
    assert times == sorted(times)
    assert (min(context), max(context)) == (1, MAX_CONTEXT_TOKENS)
    assert (min(generated), max(generated)) == (1, MAX_GENERATED_TOKENS)
    assert 50 <= statistics.median(context) <= 70
