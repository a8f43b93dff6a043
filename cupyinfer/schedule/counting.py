# SPDX-License-Identifier: Apache-2.0
"""What planning does often, at less than the usual price: consecutive and single integers for NumPy, ends of a range, named tuples."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

#: Makes a named tuple of all its fields in half of the time that its constructor takes, which is a Python function around this one.
tuple_new = tuple.__new__
#: Longer sequences are made anew every time, so that one huge batch does not hold memory for ever.
_MOST_KEPT = 1 << 16


def room_for(count: int) -> int:
    """The power of two from 256 on that holds `count`: what is kept by it and cut to size serves batches of changing sizes."""
    return max(256, 1 << (count - 1).bit_length()) if count > 0 else 256


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
        kept = _made(room_for(count))
        if len(kept) <= _MOST_KEPT:
            _kept = kept
    return kept[:count]


@lru_cache(maxsize=256)
def scalar(value: int) -> npt.NDArray[np.int64]:
    """An integer as a read-only array without dimensions: a Python int costs NumPy a conversion that takes as long as 200 additions."""
    array = np.array(value, np.int64)
    array.flags.writeable = False
    return array


def ends(values: npt.NDArray[Any]) -> tuple[int, int]:
    """Least and largest of at least one integer. Finding where they are takes a quarter of the time of a reduction."""
    return values.item(values.argmin()), values.item(values.argmax())


def least(values: npt.NDArray[Any]) -> int:
    """Least of at least one integer."""
    smallest: int = values.item(values.argmin())
    return smallest


def most(values: npt.NDArray[Any]) -> int:
    """Largest of at least one integer."""
    largest: int = values.item(values.argmax())
    return largest
