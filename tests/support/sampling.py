# SPDX-License-Identifier: Apache-2.0
"""Random cases out of the same few kernels, so that a sweep explores batches rather than compiles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from tests.support.batches import Case

_T = TypeVar("_T")

#: Element type and head width: every further pair is several more kernels to compile.
_KERNELS = (("float16", 128), ("bfloat16", 64))
_HEADS = ((1, 1), (4, 4), (8, 2), (10, 2), (6, 1), (7, 1), (16, 2), (12, 1), (16, 1), (32, 1), (64, 1))


class Chooser(ABC):
    """A source of choices."""

    @abstractmethod
    def integer(self, low: int, high: int) -> int:
        """An integer in [low, high], small ones rather than large ones where the source prefers any."""

    def one_of(self, options: Sequence[_T]) -> _T:
        """One of a few options."""
        return options[self.integer(0, len(options) - 1)]


class RandomChooser(Chooser):
    """Choices of a generator."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def integer(self, low: int, high: int) -> int:
        return int(self._rng.integers(low, high + 1))


def sample_case(choose: Chooser, max_requests: int, max_kv_len: int, max_qo_len: int) -> Case:
    """A plain batch: any operation, lengths, heads, pages and split options."""
    op = choose.one_of(("decode", "paged", "ragged"))
    num_requests = choose.integer(0, max_requests)
    # Lengths of every magnitude: mostly short ones, and now and then the longest.
    kv_lens = tuple(choose.integer(0, choose.one_of((3, 40, max_kv_len))) for _ in range(num_requests))
    qo_lens = None if op == "decode" else tuple(choose.integer(0, choose.one_of((1, 5, max_qo_len))) for _ in range(num_requests))
    dtype, head_dim = choose.one_of(_KERNELS)
    page_size = choose.one_of((1, 3, 16, 64))
    split = choose.one_of((None, None, "fixed", "disabled"))
    return Case(
        kv_lens,
        qo_lens,
        op,
        heads=choose.one_of(_HEADS),
        head_dims=(head_dim, head_dim),
        page_size=page_size,
        layout=choose.one_of(("NHD", "HND")),
        dtype=dtype,
        causal=op != "decode" and bool(choose.integer(0, 1)),
        window_left=choose.one_of((-1, -1, 0, 50)),
        fixed_split_size=choose.integer(1, 20 if op != "ragged" else 300) if split == "fixed" else None,
        disable_split_kv=split == "disabled",
        indices_on=choose.one_of(("device", "host")),
        seed=choose.integer(0, 1000),
    )
