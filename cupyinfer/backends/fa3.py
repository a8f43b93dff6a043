# SPDX-License-Identifier: Apache-2.0
"""The fa3 backend: the Hopper prefill kernel, launched with a parameter record that also holds tensor maps of K and V."""

from __future__ import annotations

import struct
from math import prod
from typing import Any

from cupyinfer.backends.arrays import KvStrides, RunArrays
from cupyinfer.backends.fa2 import Fa2Launcher
from cupyinfer.backends.params import FA3_PARAMS
from cupyinfer.backends.tensor_map import MAP_BYTES, CacheShape, cache_map
from cupyinfer.interop import ArrayView
from cupyinfer.jit.variant import AttentionVariant
from cupyinfer.schedule.profile import DeviceProfile

_BOXES = struct.Struct("<2i")
_BOXES_OFFSET, _K_OFFSET, _V_OFFSET = (FA3_PARAMS.fields[name][1] for name in ("box_rows", "k", "v"))  # type: ignore[index]


class Fa3Launcher(Fa2Launcher):
    """A planned fa3 kernel on one device; arguments and methods as for Fa2Launcher."""

    PARAMS = FA3_PARAMS

    def __init__(self, variant: AttentionVariant, profile: DeviceProfile, device_id: int) -> None:
        super().__init__(variant, profile, device_id)
        self._variant = variant
        self._num_kv_heads = 1
        self._page_size = 1

    def prepare(self, fields: dict[str, Any], num_ctas: int, held: object) -> None:
        """As Fa2Launcher.prepare."""
        super().prepare(fields, num_ctas, held)
        self._num_kv_heads, self._page_size = fields["num_kv_heads"], fields["page_size"]

    def _set_maps(self, arrays: RunArrays) -> None:
        box_rows = min(self._page_size, self.config.kv_tile) if self._variant.paged else self.config.kv_tile
        sides = ((_K_OFFSET, arrays.k, arrays.k_strides), (_V_OFFSET, arrays.v, arrays.v_strides))
        for offset, view, strides in sides:
            # A cache without elements is never read, but its map must be a map.
            address, shape = (view.ptr, self._shape(view, strides)) if prod(view.shape) else (arrays.o.ptr, _NOTHING)
            self._bytes[offset : offset + MAP_BYTES] = cache_map(address, shape, box_rows, self._variant.kv_dtype)
        _BOXES.pack_into(self._bytes, _BOXES_OFFSET, box_rows, arrays.k.shape[0])

    def _shape(self, view: ArrayView, strides: KvStrides) -> CacheShape:
        """The cache's sizes; they do not depend on the order of its dimensions."""
        head_dim, num_heads = view.shape[-1], self._num_kv_heads
        if self._variant.paged:
            return CacheShape(head_dim, self._page_size, num_heads, view.shape[0], strides.token, strides.head, strides.page)
        return CacheShape(head_dim, prod(view.shape[:-1]) // num_heads, num_heads, 1, strides.token, strides.head, 0)


_NOTHING = CacheShape(64, 1, 1, 1, 0, 0, 0)
