# SPDX-License-Identifier: Apache-2.0
"""The fa3 backend: the Hopper prefill kernel, launched with a parameter record that also holds tensor maps of its arrays."""

from __future__ import annotations

import struct
from math import prod
from typing import Any

from cupyinfer.backends.arrays import RunScales
from cupyinfer.backends.fa2 import Fa2Kernel, Fa2Launcher, PlanAddresses
from cupyinfer.backends.params import FA3_PARAMS
from cupyinfer.backends.tensor_map import MAP_BYTES, CacheShape, RowsShape, cache_map, rows_map
from cupyinfer.dtypes import itemsize
from cupyinfer.jit.variant import AttentionVariant
from cupyinfer.schedule.profile import DeviceProfile

_BOXES, _FLAG = struct.Struct("<2i"), struct.Struct("<i")
_BOXES_OFFSET, _K_OFFSET, _V_OFFSET = (FA3_PARAMS.fields[name][1] for name in ("box_rows", "k", "v"))  # type: ignore[index]
_ROWS_OFFSETS = tuple((FA3_PARAMS.fields[f"{name}_boxes"][1], FA3_PARAMS.fields[name][1]) for name in "qo")  # type: ignore[index]
#: Packed query rows that a box holds: what one warp carries of a consumer.
_BOX_ROWS = 32
_NOTHING = CacheShape(128, 1, 1, 1, 0, 0, 0)


class Fa3Kernel(Fa2Kernel):
    """A loaded fa3 kernel; arguments as for Fa2Kernel."""

    PARAMS = FA3_PARAMS

    def __init__(
        self, variant: AttentionVariant, profile: DeviceProfile, device_id: int, fields: dict[str, Any], scales: RunScales
    ) -> None:
        super().__init__(variant, profile, device_id, fields, scales)
        self.paged, self.dtype, self.o_dtype = variant.paged, variant.kv_dtype, variant.o_dtype
        group_size = int(fields["group_size"])
        #: Heads and tokens of a box of packed rows; None where groups do not fill one.
        self.rows_box = (group_size, _BOX_ROWS // group_size) if _BOX_ROWS % group_size == 0 else None
        self.num_kv_heads, self.page_size = int(fields["num_kv_heads"]), int(fields["page_size"])
        self.box_rows = min(self.page_size, self.config.kv_tile) if self.paged else self.config.kv_tile
        #: What the record holds maps of.
        self.mapped: tuple[Any, ...] = ()
        self.mapped_rows: tuple[Any, ...] = ()
        # fp8 heads that are no multiple of 128 bytes are copied in blocks of 64, see kBlockRowBytes of fa3_layout.cuh.
        widths = variant.head_dim_qk, variant.head_dim_vo
        self.box_bytes = 128 if all(width * itemsize(self.dtype) % 128 == 0 for width in widths) else 64


class Fa3Launcher(Fa2Launcher):
    """A planned fa3 kernel on one device; arguments and methods as for Fa2Launcher."""

    def __init__(
        self,
        kernel: Fa3Kernel,
        addresses: PlanAddresses,
        steps: tuple[int, int, int, int],
        values: dict[str, int],
        num_ctas: int,
        held: object,
    ) -> None:
        super().__init__(kernel, addresses, steps, values, num_ctas, held)
        self._maps = kernel
        # In the workspace, so it is a device address of 16-byte alignment whatever a run's arrays are.
        self._some_address = addresses.cta_work

    def _set_maps(self, addresses: tuple[int, ...], shapes: tuple[tuple[int, ...], ...], strides: tuple[int, ...]) -> None:
        q, k, v, o, _ = addresses
        q_shape, k_shape, v_shape, o_shape = shapes
        kernel = self._maps
        rows = q, o, q_shape[0], strides
        if rows != kernel.mapped_rows:
            kernel.mapped_rows = ()  # until both are written
            self._set_rows_maps((q, o), (q_shape, o_shape), strides)
            kernel.mapped_rows = rows
        mapped = k, v, k_shape, v_shape, strides[2:8]
        if mapped == kernel.mapped:
            return
        box_rows = kernel.box_rows
        # The driver may refuse either map: both are made before one is written.
        k_map, v_map = self._cache_map(k, k_shape, strides[2:5]), self._cache_map(v, v_shape, strides[5:8])
        kernel.record[_K_OFFSET : _K_OFFSET + MAP_BYTES] = k_map
        kernel.record[_V_OFFSET : _V_OFFSET + MAP_BYTES] = v_map
        _BOXES.pack_into(kernel.record, _BOXES_OFFSET, box_rows, k_shape[0])
        kernel.mapped = mapped

    def _cache_map(self, address: int, shape: tuple[int, ...], steps: tuple[int, ...]) -> bytes:
        # A cache without elements is never read, but its map must be a map.
        address, cache = (address, self._cache_shape(shape, steps)) if prod(shape) else (self._some_address, _NOTHING)
        return cache_map(address, cache, self._maps.box_rows, self._maps.box_bytes, self._maps.dtype)

    def _set_rows_maps(self, addresses: tuple[int, ...], shapes: tuple[tuple[int, ...], ...], strides: tuple[int, ...]) -> None:
        box = self._maps.rows_box
        if box is None or not shapes[0][0]:
            return
        kinds = (self._maps.dtype, self._maps.box_bytes), (self._maps.o_dtype, 128)
        arrays = zip(_ROWS_OFFSETS, addresses, shapes, (strides[:2], strides[8:]), kinds, strict=True)
        for (flag, offset), address, (num_tokens, num_heads, head_dim), (token, head), (dtype, box_bytes) in arrays:
            encoded = rows_map(address, RowsShape(head_dim, num_heads, num_tokens, head, token), *box, box_bytes, dtype)
            # An array that the driver cannot describe, such as one row for many tokens, is moved by threads.
            _FLAG.pack_into(self._maps.record, flag, encoded is not None)
            if encoded is not None:
                self._maps.record[offset : offset + MAP_BYTES] = encoded

    def _cache_shape(self, shape: tuple[int, ...], steps: tuple[int, ...]) -> CacheShape:
        """The cache's sizes, which do not depend on the order of its dimensions; `steps` are strides of page, token and head."""
        head_dim, num_heads = shape[-1], self._maps.num_kv_heads
        page, token, head = steps
        if self._maps.paged:
            return CacheShape(head_dim, self._maps.page_size, num_heads, shape[0], token, head, page)
        return CacheShape(head_dim, prod(shape[:-1]) // num_heads, num_heads, 1, token, head, 0)
