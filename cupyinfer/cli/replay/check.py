# SPDX-License-Identifier: Apache-2.0
"""Sampled rows of a batch against attention in float64, with the error an honest 16-bit computation makes as the yardstick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyinfer.cli.arguments import ModelShape
from cupyinfer.cli.replay.batching import Batch
from cupyinfer.cli.replay.memory import Array, Memory
from cupyinfer.cli.replay.token_values import TokenValues

Floats = npt.NDArray[np.float64]
_LOG2_E = 1 / np.log(2.0)
_REQUESTS_PER_BATCH = 4
_TOKENS_PER_REQUEST = 2
#: Allowance of a log-sum-exp in float32 epsilons, for the approximate exp2 and log2 of a GPU.
_LSE_EPSILONS = 16


@dataclass
class Accuracy:
    """What checking found so far.

    Attributes:
        num_rows: rows (one query token, one head) compared.
        worst_error: largest difference of an output element.
        worst_ratio: largest error of a row as a fraction of its tolerance.
        worst_lse_ratio: the same of a log-sum-exp.
        mismatches: one line per row beyond its tolerance.
    """

    num_rows: int
    worst_error: float
    worst_ratio: float
    worst_lse_ratio: float
    mismatches: list[str]

    @classmethod
    def empty(cls) -> Accuracy:
        """Nothing checked yet."""
        return cls(0, 0.0, 0.0, 0.0, [])


class Checker:
    """Compares some rows of a batch with the oracle: of the longest request and of others by chance, the last token and one more.

    Args:
        shape: heads, width and type.
        values: what the tokens hold.
        memory: where results lie.
        seed: of the sample.
    """

    def __init__(self, shape: ModelShape, values: TokenValues, memory: Memory, seed: int) -> None:
        self._shape = shape
        self._values = values
        self._memory = memory
        self._rng = np.random.default_rng(seed)
        self.accuracy = Accuracy.empty()

    def check(self, batch: Batch, q: Array, o: Array, lse: Array, where: str) -> None:
        """Compare a batch's result and add what was found to `accuracy`.

        Args:
            batch: what was computed.
            q: [num_tokens, num_qo_heads, head_dim].
            o: the same shape.
            lse: [num_tokens, num_qo_heads].
            where: what mismatches are called.
        """
        group = self._shape.num_qo_heads // self._shape.num_kv_heads
        for entry in self._sample(len(batch.requests), int(np.argmax(batch.kv_len)), _REQUESTS_PER_BATCH):
            kv_head = int(self._rng.integers(self._shape.num_kv_heads))
            heads = slice(kv_head * group, (kv_head + 1) * group)
            qo_len, kv_len = int(batch.qo_len[entry]), int(batch.kv_len[entry])
            first_token = int(batch.qo_indptr[entry])
            for token in self._sample(qo_len, qo_len - 1, _TOKENS_PER_REQUEST):
                num_keys = kv_len - qo_len + token + 1  # causal: none after its own position
                request = int(batch.requests[entry])
                keys = self._values.head_keys(request, num_keys, kv_head)
                values = self._values.head_values(request, num_keys, kv_head)
                row = first_token + token
                queries, got_o, got_lse = (self._memory.fetch(array[row])[heads] for array in (q, o, lse))
                self._compare(
                    queries, keys, values, got_o, got_lse, f"{where}: request {request}, position {num_keys - 1}, KV head {kv_head}"
                )

    def _sample(self, size: int, always: int, most: int) -> list[int]:
        others = self._rng.permutation(size)[: most - 1].tolist()
        return list(dict.fromkeys([always, *others]))

    def _compare(self, q: Any, k: Any, v: Any, o: Any, lse: Any, where: str) -> None:
        scale = self._shape.head_dim**-0.5
        oracle_o, oracle_lse = oracle(q, k, v, scale)
        reference_o, reference_lse = low_precision(q, k, v, scale)
        o_bound = output_tolerance(oracle_o, reference_o, o.dtype)
        lse_bound = 2 * np.abs(reference_lse - oracle_lse).max() + _LSE_EPSILONS * np.finfo(np.float32).eps * np.maximum(
            1, np.abs(oracle_lse)
        )
        o_error = np.abs(o.astype(np.float64) - oracle_o).max(axis=1)
        lse_error = np.abs(lse.astype(np.float64) - oracle_lse)
        found = self.accuracy
        found.num_rows += len(o_error)
        # NaN passes no comparison, so what counts is what is within.
        wrong = ~((o_error <= o_bound) & (lse_error <= lse_bound))
        o_error, lse_error = (np.nan_to_num(error, nan=np.inf) for error in (o_error, lse_error))
        found.worst_error = max(found.worst_error, float(o_error.max()))
        found.worst_ratio = max(found.worst_ratio, float((o_error / o_bound).max()))
        found.worst_lse_ratio = max(found.worst_lse_ratio, float((lse_error / lse_bound).max()))
        for head in np.flatnonzero(wrong).tolist():
            found.mismatches.append(
                f"{where}, query head {head} of its group: output error {o_error[head]:.3g} (tolerance {o_bound[head]:.3g}), "
                f"log-sum-exp error {lse_error[head]:.3g} (tolerance {lse_bound[head]:.3g})"
            )


def oracle(q: Any, k: Any, v: Any, sm_scale: float) -> tuple[Floats, Floats]:
    """Attention in float64: rows q [num_rows, head_dim] over all of k, v [num_keys, head_dim]; output and base-2 log-sum-exp."""
    logits = sm_scale * (q.astype(np.float64) @ k.astype(np.float64).T)
    largest = logits.max(axis=1)
    weights = np.exp(logits - largest[:, None])
    total = weights.sum(axis=1)
    return weights @ v.astype(np.float64) / total[:, None], (largest + np.log(total)) * _LOG2_E


def low_precision(q: Any, k: Any, v: Any, sm_scale: float) -> tuple[Floats, Floats]:
    """The same with float32 arithmetic, and weights and output rounded to the type of q: what a kernel may honestly get wrong."""
    logits = np.float32(sm_scale) * (q.astype(np.float32) @ k.astype(np.float32).T)
    largest = logits.max(axis=1)
    weights = np.exp(logits - largest[:, None])
    total = weights.sum(axis=1)
    o = weights.astype(q.dtype).astype(np.float32) @ v.astype(np.float32) / total[:, None]
    lse = (largest + np.log(total)) * np.float32(_LOG2_E)
    return o.astype(q.dtype).astype(np.float64), lse.astype(np.float64)


def output_tolerance(oracle_o: Floats, reference_o: Floats, dtype: np.dtype[Any]) -> Floats:
    """Largest permitted error of each row: twice the reference's, plus two roundings at the row's largest magnitude."""
    largest = np.abs(oracle_o).max(axis=1)
    mantissa_bits, smallest_exponent = (10, -14) if dtype == np.float16 else (7, -126)
    exponent = np.maximum(np.frexp(largest)[1] - 1, smallest_exponent)
    bound: Floats = 2 * np.abs(reference_o - oracle_o).max(axis=1) + np.ldexp(1.0, exponent - mantissa_bits)
    return bound
