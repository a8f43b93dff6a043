# SPDX-License-Identifier: Apache-2.0
"""Both trace formats, and a malformed line named by its number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cupyinfer import ArgumentError
from cupyinfer.cli.replay.trace import TraceRequest, fit_trace, read_trace
from tests.data.make_small_trace import NUM_REQUESTS, TRACE

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD = "2023-11-16 18:15:46.6805900,374,44\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "a trace.txt"


def test_csv(trace: Path) -> None:
    trace.write_text(HEADER + GOOD + "\n2023-11-16 18:15:50.1805900,396,109\n")
    first, second = read_trace(trace)
    assert first == TraceRequest(0.0, 374, 44)
    assert (second.arrival, second.context, second.generated) == (pytest.approx(3.5, abs=1e-4), 396, 109)


def test_csv_columns_in_any_order_and_seconds(trace: Path) -> None:
    trace.write_text("\ufeffGeneratedTokens,Model,TIMESTAMP,ContextTokens\r\n5,a,2.5,10\r\n6,b,1,11\r\n", encoding="utf-8")
    assert read_trace(trace) == [TraceRequest(0.0, 11, 6), TraceRequest(1.5, 10, 5)]


def test_mooncake(trace: Path) -> None:
    rows = [{"timestamp": 27000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}]
    rows.append({"timestamp": 30500, "input_length": 7, "output_length": 1, "hash_ids": [0]})
    trace.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read_trace(trace) == [TraceRequest(0.0, 6758, 500), TraceRequest(3.5, 7, 1)]


def test_limit_stops_before_later_lines(trace: Path) -> None:
    trace.write_text(HEADER + GOOD + "nonsense\n")
    assert len(read_trace(trace, 1)) == 1
    assert len(read_trace(TRACE)) == NUM_REQUESTS


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("TIMESTAMP,ContextTokens\n1,2\n", 1, "GeneratedTokens"),
        ("", 1, "ContextTokens"),
        (HEADER + GOOD + "2023-11-16 18:15:46,374\n", 3, "2 fields"),
        (HEADER + GOOD + GOOD + "yesterday,374,44\n", 4, "yesterday"),
        (HEADER + "2023-11-16 18:15:46,many,44\n", 2, "ContextTokens is 'many'"),
        (HEADER + "2023-11-16 18:15:46,374,0\n", 2, "GeneratedTokens is 0"),
        (HEADER + "2023-11-16 18:15:46,-3,1\n", 2, "ContextTokens is -3"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"timestamp": 0,\n', 2, "not JSON"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n[1]\n', 2, "list"),
        ('{"timestamp": 0, "input_length": 1}\n', 1, "output_length"),
        ('{"timestamp": "0", "input_length": 1, "output_length": 1}\n', 1, "milliseconds"),
        ('{"timestamp": 0, "input_length": 1.5, "output_length": 1}\n', 1, "input_length is 1.5"),
        ('{"timestamp": 0, "input_length": true, "output_length": 1}\n', 1, "input_length is True"),
    ],
)
def test_malformed_lines(trace: Path, text: str, line: int, said: str) -> None:
    trace.write_text(text)
    with pytest.raises(ArgumentError) as caught:
        read_trace(trace)
    message = str(caught.value)
    assert f"line {line}:" in message and said in message and str(trace) in message
    assert "\n" not in message


def test_no_requests(trace: Path) -> None:
    trace.write_text(HEADER)
    with pytest.raises(ArgumentError, match="holds no requests"):
        read_trace(trace)


def test_not_text(trace: Path) -> None:
    trace.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ArgumentError, match="not UTF-8"):
        read_trace(trace)


def test_fit_clips() -> None:
    fitted = fit_trace([TraceRequest(0, 100, 10), TraceRequest(1, 5, 200), TraceRequest(2, 50, 1)], 50, 1.0)
    assert [(request.context, request.generated, request.num_cached) for request in fitted.requests] == [
        (50, 1, 50),
        (5, 46, 50),
        (50, 1, 50),
    ]
    assert (fitted.scale, fitted.num_clipped) == (1.0, 2)


def test_fit_scales_until_the_longest_fits() -> None:
    fitted = fit_trace([TraceRequest(0, 900, 100), TraceRequest(1, 3, 7)], 100, None)
    assert [(request.context, request.generated) for request in fitted.requests] == [(90, 10), (1, 1)]
    assert (fitted.scale, fitted.num_clipped) == (0.1, 0)
    assert fit_trace([TraceRequest(0, 9, 1)], 100, None).scale == 1.0
