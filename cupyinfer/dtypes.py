# SPDX-License-Identifier: Apache-2.0
"""The element types attention works on, and how users may name them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cupyinfer.errors import ArgumentTypeError

#: Element types of queries, outputs and 16-bit caches.
HALF_TYPES = ("float16", "bfloat16")
#: Element type of 8-bit queries, with a cache of the same.
FP8_QUERY_TYPE = "float8_e4m3fn"
#: Element types of 8-bit KV caches.
FP8_TYPES = ("float8_e4m3fn", "float8_e5m2")

_NUMPY: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
_ALIASES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a canonical name."""
    return _NUMPY[name]


def itemsize(name: str) -> int:
    """Bytes per element of a canonical name."""
    return int(_NUMPY[name].itemsize)


def canonical_dtype(value: Any, argument: str, allowed: tuple[str, ...]) -> str:
    """Turn a dtype as users write it (a string, a NumPy, ml_dtypes, JAX or PyTorch dtype) into its canonical name.

    Raises:
        ArgumentTypeError: `value` names no element type in `allowed`.
    """
    name = value if isinstance(value, str) else getattr(value, "name", None)
    if not isinstance(name, str):
        try:
            name = np.dtype(value).name
        except TypeError:
            name = str(value)
    name = name.rpartition(".")[2]
    name = _ALIASES.get(name, name)
    if name not in allowed:
        raise ArgumentTypeError(f"{argument}: got {value!r}, expected one of {', '.join(allowed)}")
    return name
