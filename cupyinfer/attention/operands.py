# SPDX-License-Identifier: Apache-2.0
"""Checks of single arrays that the calls around attention share: type, shape, device, contiguous rows."""

from __future__ import annotations

from typing import Any

from cupyinfer.errors import ArgumentError, ArgumentTypeError
from cupyinfer.interop import ArrayView, Device, as_view

INDEX_TYPES = ("int32", "int64")


def index_view(array: Any, argument: str, length: int | None = None, of: str = "") -> ArrayView:
    """View a one-dimensional int32 or int64 array.

    Args:
        array: any array.
        argument: the name errors give it.
        length: entries it must have; None for any number.
        of: what has that many entries, for the message.

    Raises:
        ArgumentTypeError: another element type.
        ArgumentError: another number of dimensions or entries.
    """
    view = typed_view(array, argument, INDEX_TYPES)
    if len(view.shape) != 1:
        raise ArgumentError(f"{argument}: got shape {view.shape}, expected one dimension")
    if length is not None and view.shape[0] != length:
        raise ArgumentError(f"{argument}: has {view.shape[0]} entries, expected {length}, {of}")
    return view


def typed_view(array: Any, argument: str, dtypes: tuple[str, ...]) -> ArrayView:
    """View an array whose element type must be one of `dtypes`."""
    view = as_view(array, argument)
    if view.dtype not in dtypes:
        raise ArgumentTypeError(f"{argument}: got {view.dtype}, expected {' or '.join(dtypes)}")
    return view


def check_shape(view: ArrayView, argument: str, shape: tuple[int, ...], meaning: str) -> None:
    """Raise ArgumentError unless the array has exactly that shape; `meaning` names the axes, as in "[num_rows, num_heads]"."""
    if view.shape != shape:
        raise ArgumentError(f"{argument}: got shape {view.shape}, expected {shape}, {meaning}")


def check_dimensions(view: ArrayView, argument: str, meaning: str) -> None:
    """Raise ArgumentError unless the array has as many axes as `meaning` names."""
    expected = meaning.count(",") + 1
    if len(view.shape) != expected:
        raise ArgumentError(f"{argument}: got shape {view.shape}, expected {expected} dimensions {meaning}")


def check_rows(view: ArrayView, argument: str) -> None:
    """Raise ArgumentError unless the head dimension, the last axis, has at least one element and is contiguous."""
    if view.shape[-1] < 1:
        raise ArgumentError(f"{argument}: got shape {view.shape}, head_dim must be at least 1")
    if view.strides[-1] != 1 and view.shape[-1] > 1 and 0 not in view.shape:
        raise ArgumentError(f"{argument}: the head dimension has stride {view.strides[-1]}, expected 1; other axes may have any stride")


def common_device(views: dict[str, ArrayView]) -> Device:
    """The device all arrays lie on.

    Raises:
        ArgumentError: they lie on more than one.
    """
    (first, view), *others = views.items()
    for name, other in others:
        if other.device != view.device:
            raise ArgumentError(f"{name}: lies on {other.device}, but {first} lies on {view.device}; all must lie on one device")
    return view.device


def index_device(device: Device, views: dict[str, ArrayView]) -> None:
    """Raise ArgumentError unless every index array lies on `device` or on the host, from where it can be copied."""
    for name, view in views.items():
        if view.device not in (device, Device("cpu")):
            raise ArgumentError(f"{name}: lies on {view.device}, expected {device}" + ("" if device.kind == "cpu" else " or the host"))
