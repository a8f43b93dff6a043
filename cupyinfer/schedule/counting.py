# SPDX-License-Identifier: Apache-2.0
"""Consecutive integers, kept between plans: making them anew costs more than looking at them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: Longer sequences are made anew every time, so that one huge batch does not hold memory for ever.
_MOST_KEPT = 1 << 16


def _made(count: int) -> npt.NDArray[np.int64]:
    numbers = np.arange(count, dtype=np.int64)
    numbers.flags.writeable = False
    return numbers


_kept = _made(4096)


def counting(count: int) -> npt.NDArray[np.int64]:
    """``0, 1, ... count - 1`` as read-only int64 [count]."""
    global _kept
    kept = _kept
    if count > len(kept):
        kept = _made(1 << (count - 1).bit_length())
        if len(kept) <= _MOST_KEPT:
            _kept = kept
    return kept[:count]
