# SPDX-License-Identifier: Apache-2.0
"""The parameters of a user variant as a run takes them: checked by name, and packed behind the kernel's own."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from cupyinfer.attention.options import check_float32
from cupyinfer.errors import ArgumentError, ArgumentTypeError
from cupyinfer.interop import ArrayView, Device, as_view
from cupyinfer.interop.native import element_type
from cupyinfer.jit.user_variant import UserVariant
from cupyinfer.schedule.geometry import check_int

_INT_MIN = -(2**31)


class UserValues(NamedTuple):
    """The parameters of one run.

    Attributes:
        packed: their bytes in the kernel's record.
        views: the tensors among them.
    """

    packed: bytes
    views: tuple[ArrayView, ...]


def user_values(variant: UserVariant, given: Mapping[str, Any], device: Device) -> UserValues:
    """Check and pack the parameters of one run.

    Args:
        variant: which parameters there are.
        given: their values by name.
        device: where tensors must lie.

    Raises:
        ArgumentError: a parameter is missing or unknown, or a value is out of range, on another device, or strided.
        ArgumentTypeError: a value of another kind or element type than the variant says.
    """
    names = [name for name, _ in (*variant.tensors, *variant.scalars)]
    missing, unknown = [name for name in names if name not in given], [name for name in given if name not in names]
    if missing or unknown:
        found = [f"{word} {', '.join(some)}" for word, some in (("misses", missing), ("does not know", unknown)) if some]
        raise ArgumentError(f"run: variant {variant.name} {' and '.join(found)}; its parameters are {', '.join(names) or 'none'}")
    views = tuple(_tensor(given[name], name, dtype, device) for name, dtype in variant.tensors)
    scalars = (_scalar(given[name], name, kind) for name, kind in variant.scalars)
    return UserValues(_layout(variant).pack(*(view.ptr for view in views), *scalars), views)


@lru_cache
def _layout(variant: UserVariant) -> struct.Struct:
    return struct.Struct(variant.struct_format)


def _scalar(value: Any, name: str, kind: str) -> float | int:
    if kind == "int":
        return check_int(value, name, _INT_MIN)
    return check_float32(value, name)


def _tensor(value: Any, name: str, dtype: str, device: Device) -> ArrayView:
    view = as_view(value, name)
    if view.dtype != dtype:
        raise ArgumentTypeError(f"{name}: got {view.dtype}, the variant says {dtype}")
    if view.device != device:
        raise ArgumentError(f"{name}: lies on {view.device}, the plan is for {device}")
    step = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if 0 not in view.shape and size > 1 and stride != step:
            raise ArgumentError(f"{name}: got strides {view.strides} for shape {view.shape}, hooks index a contiguous array")
        step *= size
    alignment = element_type(dtype).itemsize
    if view.ptr % alignment:
        raise ArgumentError(f"{name}: begins at an address that is no multiple of its {alignment}-byte elements")
    return view
