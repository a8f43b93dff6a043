# SPDX-License-Identifier: Apache-2.0
"""What a plan takes besides options: page tables, masks and per-head values, wherever they lie."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupyinfer.errors import ArgumentError, ArgumentTypeError
from cupyinfer.interop import ArrayView, as_view, cupy_array
from cupyinfer.schedule.counting import tuple_new
from cupyinfer.schedule.geometry import BatchGeometry, Ints, check_flag, host_integers

_INT32_MAX = 2**31 - 1
_INT32 = np.dtype(np.int32)
_UNSIGNED: dict[int, np.dtype[Any]] = {4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}


def is_on_gpu(values: Any) -> bool:
    """Whether `values` is an array in GPU memory."""
    if isinstance(values, (np.ndarray, list, tuple)):
        return False
    device = getattr(values, "__dlpack_device__", None)
    return hasattr(values, "__cuda_array_interface__") or (device is not None and int(device()[0]) in (2, 13))


def to_host(values: Any, argument: str) -> Any:
    """The values of an array on the host. An array in GPU memory costs one synchronising copy."""
    if not is_on_gpu(values):
        return values
    return cupy_array(as_view(values, argument)).get()


def host_indices(values: Any, argument: str) -> Ints:
    """A one-dimensional array of integers as host int64, from the host or from a GPU (one synchronising copy)."""
    return host_integers(values if type(values) is np.ndarray else to_host(values, argument), argument)


def _as_numpy(values: Any, argument: str) -> npt.NDArray[Any]:
    try:
        return np.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentTypeError(f"{argument}: got {type(values).__name__}, expected an array ({error})") from error


class PageTable(NamedTuple):
    """A batch's page table: on the host, to be uploaded with the plan, or a device array.

    Attributes:
        num_entries: entries in use.
        on_host: int32 [num_entries] to upload, or None.
        on_device: contiguous int32 device array of at least num_entries, or None.
        copied: the device array is copied into the int workspace, since a CUDA graph must not depend on its address.
        max_page: largest page id where the host knows it, else -1.
    """

    num_entries: int = 0
    on_host: npt.NDArray[np.int32] | None = None
    on_device: ArrayView | None = None
    copied: bool = False
    max_page: int = -1

    @property
    def in_workspace(self) -> bool:
        """Whether the int workspace holds the entries."""
        return self.on_host is not None or self.copied


#: Of plans without one: ragged keys, or sizing alone.
NO_PAGES = PageTable()


def page_table(indices: Any, num_entries: int, argument: str, copied: bool = False) -> PageTable:
    """Take in a page table of at least `num_entries` entries.

    A contiguous int32 array in GPU memory is read where it is, and must stay there until the last run, unless `copied` asks
    for a copy in the int workspace. Anything else is copied there; int64 or strided GPU arrays cost one synchronising copy.

    Raises:
        ArgumentError: too few entries, a negative page id, or one that 32 bits cannot hold.
        ArgumentTypeError: not integers.
    """
    if type(indices) is not np.ndarray and is_on_gpu(indices):
        view = as_view(indices, argument)
        if view.dtype == "int32" and len(view.shape) == 1 and (view.strides[0] == 1 or view.shape[0] <= 1):
            _check_entries(view.shape[0], num_entries, argument)
            return PageTable(num_entries, on_device=view, copied=copied)
        indices = to_host(indices, argument)
    if copied is not False:
        check_flag(copied, "copy_pages")
    entries = indices if type(indices) is np.ndarray else _as_numpy(indices, argument)
    if entries.dtype != _INT32 or entries.ndim != 1:
        entries = host_integers(entries, argument)
    have = len(entries)
    if have != num_entries:
        _check_entries(have, num_entries, argument)
    used = entries if have == num_entries else entries[:num_entries]
    # One pass finds both ends: seen as unsigned, a negative id is larger than any that is allowed.
    unsigned = used.view(_UNSIGNED[used.itemsize])
    high = unsigned.item(unsigned.argmax()) if num_entries else -1
    if high > _INT32_MAX:
        low = int(used.min())
        raise ArgumentError(f"{argument}: holds page id {low if low < 0 else high}, page ids are 0 to {_INT32_MAX}")
    on_host: Any = used if used.dtype == _INT32 and used.flags.c_contiguous else used.astype(_INT32)
    return tuple_new(PageTable, (num_entries, on_host, None, False, high))


def _check_entries(have: int, need: int, argument: str) -> None:
    if have < need:
        raise ArgumentError(f"{argument}: has {have} page ids, the offsets refer to {need}")


def alibi_slopes(num_heads: int) -> npt.NDArray[np.float32]:
    """The published ALiBi slopes (arXiv 2108.12409) of `num_heads` heads.

    For a power of two ``n``: ``2^(-8 h / n)`` for head ``h = 1 .. n``. Otherwise those of the next lower power of two, followed by every
    second slope of the next higher one.
    """
    closest = 2 ** int(math.log2(num_heads))
    slopes = 2.0 ** (-8.0 * np.arange(1, closest + 1) / closest)
    extra = 2.0 ** (-4.0 * np.arange(1, 2 * (num_heads - closest), 2) / closest)
    return np.concatenate([slopes, extra]).astype(np.float32)


@dataclass(eq=False)
class PlanValues:
    """Per-head values and masks of a plan: host ones in one block for the int workspace, device ones read in place.

    Attributes:
        blocks: host arrays by name, each at a multiple of 16 bytes in the block.
        device: device arrays by name.
        mask_begin: [batch_size] first byte of each request's packed mask, or None.
    """

    blocks: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    device: dict[str, ArrayView] = field(default_factory=dict)
    mask_begin: Ints | None = None

    @property
    def num_bytes(self) -> int | None:
        """Bytes of the block, None without host values."""
        return sum(_padded(array.nbytes) for array in self.blocks.values()) if self.blocks else None

    def offsets(self) -> dict[str, int]:
        """First byte of every host array in the block."""
        ends = accumulate((_padded(array.nbytes) for array in self.blocks.values()), initial=0)
        return dict(zip(self.blocks, ends, strict=False))

    def addresses(self, begin: int) -> dict[str, int]:
        """Device address of every array, host ones in a block that begins at `begin`."""
        in_block = {name: begin + offset for name, offset in self.offsets().items()}
        return {**in_block, **{name: view.ptr for name, view in self.device.items()}}

    def places(self) -> dict[str, str]:
        """Where every array lies, in words: by these a CUDA graph's launch tells one plan from another."""
        in_block = {name: f"given on the host, at byte {offset} of the int workspace's values" for name, offset in self.offsets().items()}
        return {**in_block, **{name: f"read in place at address {view.ptr:#x}" for name, view in self.device.items()}}

    def write(self, block: npt.NDArray[np.uint8]) -> None:
        """Fill the block."""
        for name, offset in self.offsets().items():
            array = self.blocks[name]
            block[offset : offset + array.nbytes] = array.view(np.uint8)

    def add_per_head(self, name: str, values: Any, num_heads: int) -> None:
        """Take in one float32 value per head, from the host or from a GPU.

        Raises:
            ArgumentError: another shape, or a strided or non-float32 GPU array.
        """
        if is_on_gpu(values):
            view = as_view(values, name)
            if view.dtype != "float32" or view.shape != (num_heads,) or (view.strides[0] != 1 and num_heads > 1):
                raise ArgumentError(f"{name}: got {view.dtype} of shape {view.shape}, expected contiguous float32 of shape ({num_heads},)")
            self.device[name] = view
            return
        array = _as_numpy(values, name)
        if array.shape != (num_heads,) or array.dtype.kind not in "fiu":
            raise ArgumentError(f"{name}: got {array.dtype} of shape {array.shape}, expected numbers of shape ({num_heads},)")
        with np.errstate(over="ignore"):
            array = np.ascontiguousarray(array, np.float32)
        # A sink of -inf joins nothing, and is no mistake.
        wrong = ~(np.isfinite(array) | np.isneginf(array)) if name == "sinks" else ~np.isfinite(array)
        if wrong.any():
            at = int(wrong.argmax())
            raise ArgumentError(f"{name}: entry {at} is {values[at]}, must be finite in float32")
        self.blocks[name] = array

    def add_mask(self, geometry: BatchGeometry, custom_mask: Any, packed_custom_mask: Any) -> None:
        """Take in a custom mask: bool [sum of qo_len * kv_len], or packed bits with each request beginning on a byte.

        Raises:
            ArgumentError: both were given, or another length.
            ArgumentTypeError: a mask that is neither bool nor 0 and 1, or a packed one that is not uint8.
        """
        bits = geometry.qo_len * geometry.kv_len
        per_request = -(-bits // 8)
        num_bytes = int(per_request.sum())
        if num_bytes > _INT32_MAX:
            raise ArgumentError(f"custom_mask: needs {num_bytes} bytes packed, at most {_INT32_MAX} are supported")
        self.mask_begin = np.cumsum(per_request) - per_request
        if custom_mask is not None and packed_custom_mask is not None:
            raise ArgumentError("packed_custom_mask: got both this and custom_mask, expected one of them")
        if packed_custom_mask is None:
            self.blocks["mask"] = _pack_mask(to_host(custom_mask, "custom_mask"), bits, per_request)
            return
        if is_on_gpu(packed_custom_mask):
            view = as_view(packed_custom_mask, "packed_custom_mask")
            shape, dtype, contiguous = view.shape, view.dtype, view.strides in ((1,), ()) or view.shape == (0,)
            self.device["mask"] = view
        else:
            packed = _as_numpy(packed_custom_mask, "packed_custom_mask")
            shape, dtype, contiguous = packed.shape, packed.dtype.name, True
            self.blocks["mask"] = np.ascontiguousarray(packed)
        if dtype != "uint8":
            raise ArgumentTypeError(f"packed_custom_mask: got {dtype}, expected uint8")
        if shape != (num_bytes,) or not contiguous:
            raise ArgumentError(
                f"packed_custom_mask: got shape {shape}, expected contiguous ({num_bytes},): "
                "the sum over requests of ceil(qo_len * kv_len / 8)"
            )


#: Of plans without masks and per-head values.
NO_VALUES = PlanValues()


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16


def _pack_mask(custom_mask: Any, bits: Ints, per_request: Ints) -> npt.NDArray[np.uint8]:
    mask = _as_numpy(custom_mask, "custom_mask")
    total = int(bits.sum())
    if mask.shape != (total,):
        raise ArgumentError(
            f"custom_mask: got shape {mask.shape}, expected ({total},): the sum over requests of qo_len * kv_len, flattened"
        )
    if mask.dtype != np.bool_:
        if mask.dtype.kind not in "iu" or (mask.size and (mask.min() < 0 or mask.max() > 1)):
            raise ArgumentTypeError(f"custom_mask: got {mask.dtype}, expected bool (or integers 0 and 1)")
        mask = mask.astype(np.bool_)
    if not (bits % 8).any():
        return np.packbits(mask, bitorder="little")
    # Give every request its own whole bytes, then pack all at once.
    first_bit = (np.cumsum(per_request) - per_request) * 8
    position = np.arange(total) + np.repeat(first_bit - (np.cumsum(bits) - bits), bits)
    spread = np.zeros(int(per_request.sum()) * 8, np.bool_)
    spread[position] = mask
    return np.packbits(spread, bitorder="little")
