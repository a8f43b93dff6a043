# SPDX-License-Identifier: Apache-2.0
"""Tile shapes of the fa2 and fa3 kernels: one pure function of what a kernel must hold and what an SM has."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from cupyinfer.errors import UnsupportedError
from cupyinfer.schedule.counting import scalar

#: Supported (head_dim_qk, head_dim_vo) pairs.
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
#: Query rows of a tile: 16 puts all warps along the keys, 64 and 128 along the rows.
CTA_TILE_Q = (16, 64, 128)

#: Keys per iteration of the schedule for 16-row tiles; finer cuts balance better, coarser ones have fewer fields to scan.
DECODE_KV_TILE = 64
PREFILL_KV_TILE = 64
#: Bytes of K and V an SM asks for at once while decoding. Measured on an H200: 64 KB reach the memory's rate, 128 KB are slower.
DECODE_BYTES_IN_FLIGHT = 64 * 1024
#: Shared memory of an SM from Hopper on, as far as GPUs for data centers go. Compute capability 8.0 has room for three CTAs of 128 rows at
#: head_dim 64 too, but its code spills at 168 registers.
_THREE_CTAS_SMEM = 228 * 1024
#: Static shared memory of the 16-row kernel besides its table of RoPE frequencies.
_STATIC_SMEM = 384

#: Tiles of the fa3 kernels by (head_dim_qk, head_dim_vo): query rows, a consumer warpgroup per 64, and for each the choices of keys. Two
#: consumers have 216 to 232 registers a thread, three 160, four 112: there a tile's output, logits and packed weights must find room,
#: without a soft cap or ALiBi, and so there is none of more than 128 rows for wider 16-bit heads. Of keys the first choice is the most
#: that also leaves two K/V stages room in 227 KB (four consumers have room for 64 only), a power of two where pages of any power of two
#: would not fit otherwise (at head_dim 256 plain logits would leave room for 80 keys, capped ones not). Further choices have no registers
#: for a soft cap or ALiBi.
_FA3_TILES: dict[tuple[int, int], dict[int, tuple[int, ...]]] = {
    (64, 64): {128: (128,), 192: (128,), 256: (64,)},
    (128, 128): {128: (128, 160)},
    (192, 128): {128: (128,)},
    (256, 256): {128: (64,)},
}
#: The same by bytes per element. fp8 packs four weights to a register, and its keys take half the room, but it has rings of values as
#: copied and as turned, and a bank of outputs (fa3_fp8_bank.cuh): at head_dim 128 tiles of 192 keys fill both. Those of 160 are a little
#: slower, but fit pages that the others do not.
FA3_TILES = {2: _FA3_TILES, 1: _FA3_TILES | {(64, 64): {128: (128,), 192: (128,)}, (128, 128): {128: (128, 160, 192)}}}
FA3_ARCH = "sm_90a"
#: Times that tiles of 128, 192 and 256 rows take for as many keys, in one unit. Measured on an H200 at head_dim 64, full attention of 4 x
#: 4096: 459, 543 and 557 TFLOP/s, rows of 192 padded by 0.8%.
_FA3_TILE_TIME = {128: 8, 192: 10, 256: 13}
#: By bytes per element, times per key of tiles among which a batch chooses, where no tile holds padding. Measured on an H200 at head_dim
#: 128, padding included: of 16 bits 653, 653 and 677 TFLOP/s with 128 keys, 666, 663 and 675 with 160 (full and causal attention of 16384,
#: causal of 4 x 4096), and 666 and 683 on 2048 queries over 32768 keys; of fp8 718, 747 and 703 with 128 keys, 806, 795 and 743 with 160,
#: 855, 831 and 757 with 192, and causal attention of 16 x 1024 544, 545 and 535.
_FA3_KEY_TIME = {2: {128: 1.01, 160: 1.0}, 1: {128: 1.05, 160: 1.03, 192: 1.0}}
#: The copy engine's swizzle repeats every 8 rows, so that is the smallest box of a paged cache.
FA3_LEAST_PAGE = 8


@dataclass(frozen=True)
class TileConfig:
    """Shape of one fa2 or fa3 kernel.

    Attributes:
        cta_tile_q: packed query rows per CTA.
        kv_tile: keys per iteration of the schedule.
        num_warps: warps per CTA.
        num_stages: slots of the K/V ring in shared memory: whole tiles for 64 and 128 rows (fa3 too), half-blocks of a warp for 16.
        smem_bytes: dynamic shared memory per CTA.
        ctas_per_sm: CTAs of this kernel one SM holds.
        join_slots: segments of a 16-row kernel on their way out at a time.
        block_keys: keys that one warp of a 16-row kernel works on at a time; 0 for the others.
    """

    cta_tile_q: int
    kv_tile: int
    num_warps: int
    num_stages: int
    smem_bytes: int
    ctas_per_sm: int
    join_slots: int = 1
    block_keys: int = 0


def check_head_dims(head_dim_qk: int, head_dim_vo: int) -> None:
    """Raise UnsupportedError unless the pair is in HEAD_DIMS."""
    if (head_dim_qk, head_dim_vo) not in HEAD_DIMS:
        supported = ", ".join(str(qk) if qk == vo else f"{qk} (with head_dim_vo {vo})" for qk, vo in HEAD_DIMS)
        raise UnsupportedError(f"head_dim: got {head_dim_qk} (head_dim_vo {head_dim_vo}), supported are {supported}")


@cache
def tile_config(
    cta_tile_q: int,
    head_dim_qk: int,
    head_dim_vo: int,
    kv_itemsize: int,
    smem_per_sm: int,
    smem_per_cta: int,
    rotate_keys: bool = False,
    transforms_logits: bool = False,
) -> TileConfig:
    """Choose warps, stages and shared memory for one kernel.

    Args:
        cta_tile_q: one of CTA_TILE_Q.
        head_dim_qk: width of queries and keys, in elements.
        head_dim_vo: width of values and outputs, in elements.
        kv_itemsize: bytes per element of the KV cache (1 or 2).
        smem_per_sm: shared memory of one SM, bytes.
        smem_per_cta: most dynamic shared memory one CTA may ask for, bytes.
        rotate_keys: the kernel applies RoPE to keys; no schedule depends on it.
        transforms_logits: the kernel has a soft cap, ALiBi, RoPE or a user's code.
    """
    if cta_tile_q == 16:
        return _decode_config(head_dim_qk, head_dim_vo, kv_itemsize, smem_per_cta, rotate_keys)
    most_ctas = prefill_ctas_per_sm(cta_tile_q, head_dim_qk, kv_itemsize, smem_per_sm, transforms_logits)
    return _prefill_config(cta_tile_q, head_dim_qk, head_dim_vo, kv_itemsize, smem_per_sm, smem_per_cta, most_ctas)


def decode_smem_bytes(
    num_warps: int, num_stages: int, join_slots: int, block_keys: int, head_dim_qk: int, head_dim_vo: int, kv_itemsize: int
) -> int:
    """Shared memory of a 16-row kernel: a private ring of half-blocks per warp, the states of one or two segments on their way out,
    and past head_dim 128 the query."""
    ring = num_warps * num_stages * block_keys * max(head_dim_qk, head_dim_vo) * kv_itemsize
    state = num_warps * (16 * head_dim_vo + 2 * 16) * 4
    return ring + join_slots * state + (16 * head_dim_qk * 2 if head_dim_qk > 128 else 0)


def prefill_smem_bytes(cta_tile_q: int, kv_tile: int, num_stages: int, head_dim_qk: int, head_dim_vo: int, kv_itemsize: int) -> int:
    """Shared memory of a 64- or 128-row kernel: the query tile and a ring of K/V tiles shared by all warps."""
    return cta_tile_q * head_dim_qk * 2 + num_stages * kv_tile * (head_dim_qk + head_dim_vo) * kv_itemsize


def _decode_config(head_dim_qk: int, head_dim_vo: int, kv_itemsize: int, smem_per_cta: int, rotate_keys: bool) -> TileConfig:
    # Eight warps with two segments on their way out never wait for each other; four warps suffice at head_dim 256, where a block
    # is twice as large. Where that does not fit, a single segment on its way out costs a barrier, fewer warps cost bytes in flight.
    # Where rows are short, two k-steps of P V make a block worth its fixed work (maxima, page ids, waiting). Rotating the keys of two
    # would not fit in registers.
    row_bytes = max(head_dim_qk, head_dim_vo) * kv_itemsize
    block_keys = 32 if row_bytes <= 128 and not rotate_keys else 16
    half_block = block_keys * row_bytes
    for num_warps in (8, 4, 2) if head_dim_vo <= 128 else (4, 2):
        in_flight = max(2, DECODE_BYTES_IN_FLIGHT // (num_warps * half_block))
        for join_slots in (2, 1) if head_dim_vo <= 128 else (1,):
            for num_stages in range(in_flight + 1, 2, -1):
                smem = decode_smem_bytes(num_warps, num_stages, join_slots, block_keys, head_dim_qk, head_dim_vo, kv_itemsize)
                if smem + _STATIC_SMEM + 4 * head_dim_qk <= smem_per_cta:
                    return TileConfig(16, DECODE_KV_TILE, num_warps, num_stages, smem, 1, join_slots, block_keys)
    raise UnsupportedError(f"head_dim {head_dim_qk}: {smem_per_cta} bytes of shared memory per CTA are too few")


def prefill_ctas_per_sm(cta_tile_q: int, head_dim_qk: int, kv_itemsize: int, smem_per_sm: int, transforms_logits: bool) -> int:
    """Most CTAs of a 64- or 128-row kernel on an SM: three where 168 registers per thread suffice, else two.

    Converting fp8, a soft cap, ALiBi, RoPE or a user's code takes registers, and so does code for GPUs before Hopper. Tiles of 64 rows
    would fit, but are not known to gain.
    """
    fits = head_dim_qk == 64 and kv_itemsize == 2 and smem_per_sm >= _THREE_CTAS_SMEM and not transforms_logits
    return 3 if cta_tile_q == 128 and fits else 2


def _prefill_config(
    cta_tile_q: int, head_dim_qk: int, head_dim_vo: int, kv_itemsize: int, smem_per_sm: int, smem_per_cta: int, most_ctas: int
) -> TileConfig:
    # CTAs on one SM hide each other's softmax; a second stage is worth less than that, but more than an idle SM.
    best = None
    for num_stages in (1, 2):
        smem = prefill_smem_bytes(cta_tile_q, PREFILL_KV_TILE, num_stages, head_dim_qk, head_dim_vo, kv_itemsize)
        ctas_per_sm = min(most_ctas, smem_per_sm // (smem + 1024))  # 1 KB of each CTA's share is the system's
        if smem <= smem_per_cta and (best is None or ctas_per_sm >= best.ctas_per_sm):
            best = TileConfig(cta_tile_q, PREFILL_KV_TILE, 4, num_stages, smem, ctas_per_sm)
    if best is None:
        raise UnsupportedError(
            f"head_dim {head_dim_qk}: {smem_per_cta} bytes of shared memory per CTA are too few for a tile of {cta_tile_q} rows"
        )
    return best


def fa3_key_choices(head_dim_qk: int, head_dim_vo: int, transforms_logits: bool, kv_itemsize: int = 2) -> tuple[int, ...]:
    """Keys that some fa3 tile of that width has."""
    rows = FA3_TILES[kv_itemsize][head_dim_qk, head_dim_vo]
    found = (fa3_kv_tiles(cta_tile_q, head_dim_qk, head_dim_vo, 1, transforms_logits, kv_itemsize) for cta_tile_q in rows)
    return tuple(dict.fromkeys(itertools.chain.from_iterable(found)))


@cache
def fa3_tile_qs(head_dim_qk: int, head_dim_vo: int, page_size: int, transforms_logits: bool, kv_itemsize: int = 2) -> tuple[int, ...]:
    """Query rows of the fa3 kernels that fit a cache's pages; arguments as for `fa3_kv_tiles`."""
    rows = FA3_TILES[kv_itemsize][head_dim_qk, head_dim_vo]
    return tuple(tile_q for tile_q in rows if fa3_kv_tiles(tile_q, head_dim_qk, head_dim_vo, page_size, transforms_logits, kv_itemsize))


def fa3_tile_q(tile_qs: tuple[int, ...], num_units: Callable[[int], int], num_sms: int) -> int:
    """Whichever of `tile_qs` takes least time for a batch that makes `num_units(rows)` units of work.

    Taller tiles are faster, but pad more, and where units are fewer than SMs the time is that of one of them.
    """
    if len(tile_qs) == 1:
        return tile_qs[0]
    return min(reversed(tile_qs), key=lambda tile_q: max(num_units(tile_q), num_sms) * _FA3_TILE_TIME[tile_q])


@cache
def fa3_tile_config(cta_tile_q: int, head_dim_qk: int, head_dim_vo: int, kv_tile: int | None = None, kv_itemsize: int = 2) -> TileConfig:
    """Shape of one fa3 kernel: one CTA per SM, a producer warpgroup and a consumer warpgroup per 64 query rows.

    Args:
        cta_tile_q: query rows.
        head_dim_qk: width of queries and keys.
        head_dim_vo: width of values and outputs.
        kv_tile: one of the choices of keys, by default the first.
        kv_itemsize: bytes per element of cache and queries.

    Raises:
        UnsupportedError: no tile for these widths, or not with that many rows or keys.
    """
    widths = FA3_TILES[kv_itemsize]
    if (head_dim_qk, head_dim_vo) not in widths:
        raise UnsupportedError(f"head_dim: got {head_dim_qk} (head_dim_vo {head_dim_vo}), fa3 has {', '.join(map(str, widths))}")
    rows = widths[head_dim_qk, head_dim_vo]
    if cta_tile_q not in rows:
        raise UnsupportedError(f"cta_tile_q: got {cta_tile_q}, fa3 has {', '.join(map(str, rows))} at head_dim {head_dim_qk}")
    choices = rows[cta_tile_q]
    kv_tile = choices[0] if kv_tile is None else kv_tile
    if kv_tile not in choices:
        raise UnsupportedError(f"kv_tile: got {kv_tile}, fa3 has {', '.join(map(str, choices))} at head_dim {head_dim_qk}")
    num_stages = 4 if cta_tile_q == 256 else 2  # four of 64 keys hold as much as two of 128, and are 1% faster than two
    smem = fa3_smem_bytes(cta_tile_q, kv_tile, num_stages, head_dim_qk, head_dim_vo, kv_itemsize)
    return TileConfig(cta_tile_q, kv_tile, 4 + cta_tile_q // 16, num_stages, smem, 1)


def fa3_smem_bytes(cta_tile_q: int, kv_tile: int, num_stages: int, head_dim_qk: int, head_dim_vo: int, kv_itemsize: int = 2) -> int:
    """Shared memory of an fa3 kernel: K/V ring (fp8: a second one of V, kCopyStages of fa3_layout.cuh), buffers of query rows that outputs
    leave from, records, and of fp8 the bank of outputs."""
    fp8 = kv_itemsize == 1
    ring = num_stages * kv_tile * (head_dim_qk + head_dim_vo) * kv_itemsize
    if fp8:
        ring += (1 if kv_tile > 160 else num_stages) * kv_tile * head_dim_vo
    row_buffers = 1 if head_dim_qk > 128 else 2 if fp8 or kv_tile > 128 else 3
    rows = row_buffers * cta_tile_q * max(head_dim_qk * kv_itemsize, head_dim_vo * 2)
    bank = cta_tile_q * head_dim_vo * 2 if fp8 else 0
    control = 1024 + cta_tile_q * 8 if fp8 else 1280
    return ring + rows + bank + control + 1024  # alignment to the swizzle's period


def fa3_box_rows(page_size: int, kv_tile: int) -> int | None:
    """Keys per box of the copy engine: a page, or a tile of a larger page; None when tiles and pages do not fit together."""
    if page_size % FA3_LEAST_PAGE == 0 and kv_tile % page_size == 0:
        return page_size
    return kv_tile if page_size % kv_tile == 0 else None


@cache
def fa3_kv_tiles(
    cta_tile_q: int, head_dim_qk: int, head_dim_vo: int, page_size: int, transforms_logits: bool, kv_itemsize: int = 2
) -> tuple[int, ...]:
    """Choices of keys per tile that fit a cache's pages.

    Args:
        cta_tile_q: query rows of the tile.
        head_dim_qk: width of queries and keys, with `head_dim_vo` one of FA3_TILES.
        head_dim_vo: width of values and outputs.
        page_size: keys per page, 1 for ragged caches.
        transforms_logits: a soft cap or ALiBi changes the logits.
        kv_itemsize: bytes per element of cache and queries.
    """
    choices = FA3_TILES[kv_itemsize][head_dim_qk, head_dim_vo][cta_tile_q]
    if transforms_logits:
        choices = choices[:1] if cta_tile_q <= 128 else ()
    return choices if page_size == 1 else tuple(tile for tile in choices if fa3_box_rows(page_size, tile) is not None)


def fa3_kv_tile(choices: tuple[int, ...], keys: npt.NDArray[np.integer], kv_itemsize: int = 2) -> int:
    """Keys per tile for a batch: the choice whose tiles take less time, by what each takes per key and pads.

    Args:
        choices: of `fa3_kv_tiles`.
        keys: [num_tiles] keys of each query tile.
        kv_itemsize: bytes per element of cache and queries.
    """
    if len(choices) == 1:
        return choices[0]
    times = _FA3_KEY_TIME[kv_itemsize]
    return min(reversed(choices), key=lambda tile: times[tile] * _padded(keys, tile))


def _padded(keys: npt.NDArray[np.integer], tile: int) -> int:
    """All keys, those of each rounded up to whole tiles."""
    num_tiles = keys + scalar(tile - 1)
    num_tiles //= scalar(tile)
    return tile * int(np.add.reduce(num_tiles))


def max_tile_q(head_dim_vo: int) -> int:
    """Largest query tile whose accumulators stay in registers: 32 rows per warp up to head_dim 128, 16 above."""
    return 128 if head_dim_vo <= 128 else 64
