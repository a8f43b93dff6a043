# SPDX-License-Identifier: Apache-2.0
"""Request traces: CSV with TIMESTAMP, ContextTokens, GeneratedTokens, or Mooncake JSON lines."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Any

from cupyinfer.errors import ArgumentError

_CSV_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_JSON_FIELDS = ("timestamp", "input_length", "output_length")
#: Longest request taken: far beyond any model, and safe in 32-bit positions.
_MAX_TOKENS = 2**24


@dataclass(frozen=True)
class TraceRequest:
    """One request.

    Attributes:
        arrival: seconds since the trace's first request.
        context: prompt tokens, at least 1.
        generated: tokens to generate, at least 1.
    """

    arrival: float
    context: int
    generated: int

    @property
    def num_cached(self) -> int:
        """Tokens in the KV cache at the end: the last generated token is never fed back."""
        return self.context + self.generated - 1


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a trace file, in order of arrival.

    The prefix blocks of Mooncake traces (hash_ids) are not used: every request gets pages of its own.

    Raises:
        ArgumentError: the file cannot be read, or a line of it, by number, is not a request.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ArgumentError(f"trace: cannot read {path}: {reason}") from error
    rows = _json_rows(path, text) if text.lstrip().startswith("{") else _csv_rows(path, text)
    requests: list[TraceRequest] = []
    for request in rows:
        requests.append(request)
        if limit is not None and len(requests) == limit:
            break
    if not requests:
        raise ArgumentError(f"trace: {path} holds no requests")
    requests.sort(key=lambda request: request.arrival)
    first = requests[0].arrival
    return [replace(request, arrival=request.arrival - first) for request in requests]


def _csv_rows(path: Path, text: str) -> Iterator[TraceRequest]:
    reader = csv.reader(StringIO(text))
    header = [name.strip() for name in next(reader, [])]
    missing = [name for name in _CSV_FIELDS if name not in header]
    if missing:
        raise ArgumentError(
            f"trace: {path}, line 1: has no column {', '.join(missing)}; expected CSV with {', '.join(_CSV_FIELDS)}, "
            f"or JSON lines with {', '.join(_JSON_FIELDS)}"
        )
    columns = [header.index(name) for name in _CSV_FIELDS]
    for row in reader:
        where = f"trace: {path}, line {reader.line_num}"
        if not row:
            continue
        if len(row) != len(header):
            raise ArgumentError(f"{where}: has {len(row)} fields, the header has {len(header)}")
        time, context, generated = (row[column].strip() for column in columns)
        yield TraceRequest(_seconds(time, where), _tokens(context, "ContextTokens", where), _tokens(generated, "GeneratedTokens", where))


def _json_rows(path: Path, text: str) -> Iterator[TraceRequest]:
    for number, line in enumerate(text.splitlines(), 1):
        where = f"trace: {path}, line {number}"
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise ArgumentError(f"{where}: is not JSON: {error.msg} at column {error.colno}") from error
        if not isinstance(row, dict):
            raise ArgumentError(f"{where}: got {type(row).__name__}, expected a JSON object")
        missing = [name for name in _JSON_FIELDS if name not in row]
        if missing:
            raise ArgumentError(f"{where}: has no {', '.join(missing)}")
        time, context, generated = (row[name] for name in _JSON_FIELDS)
        if isinstance(time, bool) or not isinstance(time, int | float):
            raise ArgumentError(f"{where}: timestamp is {time!r}, expected milliseconds")
        yield TraceRequest(time / 1e3, _tokens(context, "input_length", where), _tokens(generated, "output_length", where))


def _seconds(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise ArgumentError(
            f"{where}: TIMESTAMP is {text!r}, expected a date and time such as 2023-11-16 18:15:46.68, or seconds"
        ) from None


def _tokens(value: object, field: str, where: str) -> int:
    try:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError
        tokens = int(value)
    except ValueError:
        raise ArgumentError(f"{where}: {field} is {value!r}, expected a number of tokens") from None
    if not 1 <= tokens <= _MAX_TOKENS:
        raise ArgumentError(f"{where}: {field} is {tokens}, expected 1 to {_MAX_TOKENS}")
    return tokens


@dataclass(frozen=True)
class FittedTrace:
    """Requests made to fit a cache.

    Attributes:
        requests: with their lengths scaled and clipped.
        scale: factor of every length.
        num_clipped: requests that were still too long.
    """

    requests: list[TraceRequest]
    scale: float
    num_clipped: int


def fit_trace(requests: list[TraceRequest], max_tokens: int, scale: float | None) -> FittedTrace:
    """Scale all lengths, then clip what is still longer than `max_tokens` in the cache.

    Args:
        requests: the trace.
        max_tokens: most tokens of one request in the cache.
        scale: factor of prompt and generated lengths, rounded down to at least 1; None to take what lets the longest request fit.
    """
    if scale is None:
        scale = min(1.0, max_tokens / max(request.context + request.generated for request in requests))
    fitted, num_clipped = [], 0
    for request in requests:
        context, generated = (max(1, int(tokens * scale)) for tokens in (request.context, request.generated))
        num_clipped += context + generated - 1 > max_tokens
        context = min(context, max_tokens)
        fitted.append(TraceRequest(request.arrival, context, min(generated, max_tokens - context + 1)))
    return FittedTrace(fitted, scale, num_clipped)
