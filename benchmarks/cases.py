# SPDX-License-Identifier: Apache-2.0
"""The named workloads every benchmark runs: what is attended to, how many bytes and operations that must cost."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cupyinfer.dtypes import itemsize


@dataclass(frozen=True)
class Case:
    """One attention batch.

    Attributes:
        name: stable id in words, the key of a result row.
        kind: "decode" (one query token per request) or "prefill".
        num_qo_heads: query heads.
        num_kv_heads: KV heads.
        head_dim: width of q, k, v and o in elements.
        qo_lens: query tokens of each request.
        kv_lens: keys of each request, its own query tokens included.
        page_size: tokens per page where the cache is paged.
        causal: query i of a request sees keys up to ``kv_len - qo_len + i``.
        kv_dtype: element type of the cache; outputs are bfloat16.
        q_dtype: element type of the queries.
        tags: what `select` picks cases by.
    """

    name: str
    kind: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    qo_lens: tuple[int, ...] = field(repr=False)
    kv_lens: tuple[int, ...] = field(repr=False)
    page_size: int = 16
    causal: bool = False
    kv_dtype: str = "bfloat16"
    q_dtype: str = "bfloat16"
    tags: frozenset[str] = frozenset()

    @property
    def batch_size(self) -> int:
        """Requests in the batch."""
        return len(self.kv_lens)

    @property
    def label(self) -> str:
        """The name without its kind, short enough for a plot axis."""
        return self.name.split(", ", 1)[1]

    @property
    def equal_lengths(self) -> bool:
        """Whether the batch is also a dense tensor."""
        return len(set(self.kv_lens)) == 1 and len(set(self.qo_lens)) == 1

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V the batch must read once."""
        return 2 * sum(self.kv_lens) * self.num_kv_heads * self.head_dim * itemsize(self.kv_dtype)

    @property
    def flops(self) -> int:
        """Floating-point operations of both matrix products over the visible (query, key) pairs."""
        pairs = 0
        for qo_len, kv_len in zip(self.qo_lens, self.kv_lens, strict=True):
            pairs += qo_len * kv_len - (qo_len * (qo_len - 1) // 2 if self.causal else 0)
        return 4 * pairs * self.num_qo_heads * self.head_dim

    @property
    def pages_per_request(self) -> tuple[int, ...]:
        """Pages each request holds."""
        return tuple(-(-kv_len // self.page_size) for kv_len in self.kv_lens)


def _words(count: int, kv_len: int) -> str:
    return f"{count} request of {kv_len}" if count == 1 else f"{count} requests of {kv_len}"


def decode_case(
    qo_heads: int,
    kv_heads: int,
    batch: int,
    kv_len: int,
    *tags: str,
    head_dim: int = 128,
    page_size: int = 16,
    kv_dtype: str = "bfloat16",
) -> Case:
    """A decode batch of equal lengths."""
    extras = [
        text
        for text, wanted in (
            (f"head_dim {head_dim}", head_dim != 128),
            (f"page {page_size}", page_size != 16),
            (f"{kv_dtype.partition('_')[0]} cache", kv_dtype != "bfloat16"),
        )
        if wanted
    ]
    name = ", ".join([f"decode, {qo_heads} over {kv_heads} heads, {_words(batch, kv_len)}", *extras])
    all_tags = frozenset({"decode", *tags})
    return Case(name, "decode", qo_heads, kv_heads, head_dim, (1,) * batch, (kv_len,) * batch, page_size, False, kv_dtype, tags=all_tags)


def prefill_case(head_dim: int, causal: bool, batch: int, length: int, *tags: str, context: int = 0, dtype: str = "bfloat16") -> Case:
    """A prefill batch of equal lengths at 32 query and 8 KV heads, queries and cache of one type; `context` keys precede the new tokens."""
    if context:
        name = f"prefill, chunk head_dim {head_dim}, {batch} x {length} new over {context}"
    else:
        name = f"prefill, {'causal' if causal else 'full'} head_dim {head_dim}, {_words(batch, length)}"
    name += "" if dtype == "bfloat16" else f", {dtype.partition('_')[0]}"
    all_tags = frozenset({"prefill", *tags} | ({"chunked"} if context else set()))
    return Case(name, "prefill", 32, 8, head_dim, (length,) * batch, (context + length,) * batch, 16, causal, dtype, dtype, all_tags)


_DECODE_ROWS = (
    (32, 8, 1, 8192),
    (32, 8, 1, 131072),
    (32, 8, 16, 4096),
    (32, 8, 64, 4096),
    (32, 8, 256, 2048),
    (64, 8, 64, 4096),
    (64, 4, 64, 4096),
    (32, 32, 16, 4096),
    (64, 8, 8, 65536),
)
_PREFILL_SHAPES = ((16, 1024), (8, 2048), (4, 4096), (2, 8192), (1, 16384))
_CHUNKS = ((1, 512, 16384), (1, 2048, 32768), (4, 512, 8192), (16, 64, 4096))


def _build() -> tuple[Case, ...]:
    cases = []
    for row in _DECODE_ROWS:
        cases.append(decode_case(*row, "table", *(["smoke"] if row == (32, 8, 16, 4096) else [])))
    for head_dim in (64, 256):
        cases += [decode_case(32, 8, batch, kv_len, "head_dim", head_dim=head_dim) for batch, kv_len in ((16, 4096), (64, 4096))]
    for page_size in (1, 64):
        cases += [decode_case(32, 8, batch, kv_len, "page", page_size=page_size) for batch, kv_len in ((16, 4096), (64, 4096))]
    for qo_heads, kv_heads, batch, kv_len in _DECODE_ROWS:
        # Rows whose bf16 cache is 537 MB or more: below that an 8-bit cache is too small to show a stream.
        if 4 * batch * kv_len * kv_heads * 128 >= 500e6:
            cases.append(decode_case(qo_heads, kv_heads, batch, kv_len, "fp8", kv_dtype="float8_e4m3fn"))
    for head_dim in (128, 64):
        for causal in (True, False):
            for batch, length in _PREFILL_SHAPES:
                smoke = ["smoke"] if (head_dim, causal, batch) == (128, True, 4) else []
                cases.append(prefill_case(head_dim, causal, batch, length, "table", *smoke))
    cases += [prefill_case(128, True, batch, new, "table", context=context) for batch, new, context in _CHUNKS]
    for causal in (True, False):
        for batch, length in ((4, 4096), (1, 16384)):
            cases.append(prefill_case(128, causal, batch, length, "fp8", dtype="float8_e4m3fn"))
    return tuple(cases)


CASES: tuple[Case, ...] = _build()


def trace_case(path: Path, batch: int = 128, qo_heads: int = 32, kv_heads: int = 8, head_dim: int = 128, seed: int = 0) -> Case:
    """The decode batch a server would hold in the middle of a request trace.

    `batch` requests are drawn with probability proportional to their GeneratedTokens, since a request is in the decode
    batch for that many steps, each at a uniformly drawn point of its generation.

    Args:
        path: CSV with columns TIMESTAMP, ContextTokens, GeneratedTokens.
        batch: requests in the batch.
        qo_heads: query heads.
        kv_heads: KV heads.
        head_dim: width of a head in elements.
        seed: of the draw.

    Raises:
        ValueError: the file has no usable row.
    """
    with path.open(newline="", encoding="utf-8") as file:
        rows = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
    lengths = np.array([row for row in rows if row[1] > 0], dtype=np.int64).reshape(-1, 2)
    if not len(lengths):
        raise ValueError(f"{path}: no row with GeneratedTokens > 0")
    rng = np.random.default_rng(seed)
    picks = lengths[rng.choice(len(lengths), size=batch, p=lengths[:, 1] / lengths[:, 1].sum())]
    kv_lens = picks[:, 0] + 1 + (rng.random(batch) * picks[:, 1]).astype(np.int64)
    name = f"decode, {qo_heads} over {kv_heads} heads, {batch} requests of {path.stem}"
    lens = tuple(int(n) for n in kv_lens)
    return Case(name, "decode", qo_heads, kv_heads, head_dim, (1,) * batch, lens, tags=frozenset({"decode", "trace"}))


def select(cases: Iterable[Case], tags: Iterable[str] = (), names: Iterable[str] = ()) -> list[Case]:
    """Cases that carry any of `tags` (all if none is given) and whose name contains any of `names` (likewise)."""
    tags, names = frozenset(tags), tuple(names)
    return [case for case in cases if (not tags or tags & case.tags) and (not names or any(part in case.name for part in names))]
