# SPDX-License-Identifier: Apache-2.0
"""What makes one attention kernel different from another, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from cupyinfer.dtypes import FP8_QUERY_TYPE, FP8_TYPES, HALF_TYPES, itemsize
from cupyinfer.errors import ArgumentError
from cupyinfer.jit.user_variant import UserVariant
from cupyinfer.schedule.tiles import (
    CTA_TILE_Q,
    FA3_TILES,
    TileConfig,
    check_head_dims,
    fa3_kv_tiles,
    fa3_tile_config,
    fa3_tile_qs,
    max_tile_q,
    tile_config,
)

POS_ENCODINGS = ("NONE", "ROPE_LLAMA", "ALIBI")
#: Kernels around attention: cache append and its index arithmetic, merging of attention states.
HELPER_KERNELS = ("append_paged_kv_cache", "batch_indices_positions", "seq_lens", "merge_states")


@dataclass(frozen=True)
class AttentionVariant:
    """One attention kernel: the fields are its compile-time constants. Causal, windows, scales, sinks and LSE are run-time values.

    Attributes:
        q_dtype: element type of q, "float16" or "bfloat16"; for fa3 also "float8_e4m3fn".
        kv_dtype: element type of the cache, q_dtype or, with 16-bit queries, an fp8 type.
        head_dim_qk: width of q and k in elements.
        head_dim_vo: width of v and o in elements.
        cta_tile_q: packed query rows per tile.
        paged: K and V are reached through a page table.
        custom_mask: a packed bit mask removes more keys.
        soft_cap: logits pass through ``cap * tanh(s / cap)``.
        pos_encoding: one of POS_ENCODINGS.
        user: CUDA source that changes the attention, or None.
        backend: "fa2", or "fa3" for the Hopper prefill kernel.
        kv_tile: keys per tile of an fa3 kernel, by default the first choice of FA3_TILES; None for fa2, whose tiles follow.
        o_dtype: element type of o, "float16" or "bfloat16"; by default that of 16-bit queries.
    """

    q_dtype: str
    kv_dtype: str
    head_dim_qk: int
    head_dim_vo: int
    cta_tile_q: int
    paged: bool
    custom_mask: bool = False
    soft_cap: bool = False
    pos_encoding: str = "NONE"
    user: UserVariant | None = None
    backend: str = "fa2"
    kv_tile: int | None = None
    o_dtype: str = ""

    def __post_init__(self) -> None:
        if self.q_dtype == FP8_QUERY_TYPE:
            self._check_fp8()
        elif self.q_dtype not in HALF_TYPES:
            raise ArgumentError(f"q_dtype: got {self.q_dtype}, queries are float16 or bfloat16, for fa3 also {FP8_QUERY_TYPE}")
        elif self.o_dtype not in ("", self.q_dtype):
            raise ArgumentError(f"o_dtype: got {self.o_dtype}, outputs of {self.q_dtype} queries are {self.q_dtype}")
        elif self.kv_dtype != self.q_dtype and self.kv_dtype not in FP8_TYPES:
            raise ArgumentError(
                f"kv_dtype: got {self.kv_dtype}, a cache is {self.q_dtype} like its queries or one of {', '.join(FP8_TYPES)}"
            )
        object.__setattr__(self, "o_dtype", self.o_dtype or self.q_dtype)
        check_head_dims(self.head_dim_qk, self.head_dim_vo)
        if self.backend == "fa3":
            widths = self.head_dim_qk, self.head_dim_vo
            kv_tile = fa3_tile_config(self.cta_tile_q, *widths, self.kv_tile, itemsize(self.kv_dtype)).kv_tile
            rows = fa3_tile_qs(*widths, 1, self.transforms_logits, itemsize(self.kv_dtype))
            if self.cta_tile_q not in rows:
                raise ArgumentError(f"cta_tile_q: got {self.cta_tile_q}, this fa3 kernel has tiles of {' or '.join(map(str, rows))} rows")
            if kv_tile not in fa3_kv_tiles(self.cta_tile_q, *widths, 1, self.transforms_logits, itemsize(self.kv_dtype)):
                raise ArgumentError(f"kv_tile: got {self.kv_tile}, a tile of so many keys has no room for a soft cap or ALiBi")
            object.__setattr__(self, "kv_tile", kv_tile)  # one value per kernel, whether it was named or not
        elif self.kv_tile is not None:
            raise ArgumentError(f"kv_tile: got {self.kv_tile}, fa2 has no choice of keys per tile")
        elif self.cta_tile_q not in CTA_TILE_Q or self.cta_tile_q > max_tile_q(self.head_dim_vo):
            raise ArgumentError(
                f"cta_tile_q: got {self.cta_tile_q}, a tile at head_dim_vo {self.head_dim_vo} has 16 to {max_tile_q(self.head_dim_vo)} rows"
            )
        if self.pos_encoding not in POS_ENCODINGS:
            raise ArgumentError(f"pos_encoding_mode: got {self.pos_encoding}, expected one of {', '.join(POS_ENCODINGS)}")

    def _check_fp8(self) -> None:
        if self.backend != "fa3":
            raise ArgumentError(f"q_dtype: got {self.q_dtype} for {self.backend}, which takes float16 and bfloat16 queries")
        if self.kv_dtype != self.q_dtype:
            raise ArgumentError(f"kv_dtype: got {self.kv_dtype}, a cache of {self.q_dtype} queries has their type")
        if self.o_dtype not in HALF_TYPES:
            raise ArgumentError(f"o_dtype: got {self.o_dtype}, outputs of {self.q_dtype} queries are float16 or bfloat16")

    def __str__(self) -> str:
        widths = self.head_dim_qk, self.head_dim_vo
        is_first = self.kv_tile is None or self.kv_tile == FA3_TILES[itemsize(self.kv_dtype)][widths][self.cta_tile_q][0]
        name = f"{self.backend}_q{self.cta_tile_q}" + ("" if is_first else f"x{self.kv_tile}") + f"_{self.q_dtype}"
        name += f"_o{self.o_dtype}" if self.o_dtype != self.q_dtype else ""
        name += f"_kv{self.kv_dtype}" if self.kv_dtype != self.q_dtype else ""
        name += f"_d{self.head_dim_qk}" + (f"x{self.head_dim_vo}" if self.head_dim_vo != self.head_dim_qk else "")
        name += "_paged" if self.paged else "_ragged"
        name += "_mask" if self.custom_mask else ""
        name += "_cap" if self.soft_cap else ""
        name += "" if self.pos_encoding == "NONE" else "_" + self.pos_encoding.split("_")[0].lower()
        return name + ("" if self.user is None else f"_user_{self.user.name}")

    @property
    def transforms_logits(self) -> bool:
        """True if logits are more than products and masks: tile shapes and schedules depend on the registers that takes."""
        return self.soft_cap or self.pos_encoding != "NONE" or self.user is not None

    def tile_config(self, smem_per_sm: int, smem_per_cta: int) -> TileConfig:
        """Tile shape of this kernel on a GPU with that much shared memory."""
        if self.backend == "fa3":
            return fa3_tile_config(self.cta_tile_q, self.head_dim_qk, self.head_dim_vo, self.kv_tile, itemsize(self.kv_dtype))
        widths = (self.head_dim_qk, self.head_dim_vo, itemsize(self.kv_dtype))
        rotate_keys = self.pos_encoding == "ROPE_LLAMA"
        return tile_config(self.cta_tile_q, *widths, smem_per_sm, smem_per_cta, rotate_keys, self.transforms_logits)


@dataclass(frozen=True)
class HelperVariant:
    """One of the kernels around attention. They take element types as run-time values, so there is one of each.

    Attributes:
        kernel: one of HELPER_KERNELS; also its entry point and its file.
    """

    kernel: str

    def __post_init__(self) -> None:
        if self.kernel not in HELPER_KERNELS:
            raise ArgumentError(f"kernel: got {self.kernel!r}, expected one of {', '.join(HELPER_KERNELS)}")

    def __str__(self) -> str:
        return self.kernel


#: Everything `cupyinfer.jit.source.kernel_source` can turn into CUDA text.
KernelVariant = AttentionVariant | HelperVariant
