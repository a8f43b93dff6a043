# SPDX-License-Identifier: Apache-2.0
"""Which GPU kernels serve a plan: a pure function of what was asked for, with a sentence for every refusal."""

from __future__ import annotations

from cupyinfer.attention.options import AttentionOptions
from cupyinfer.errors import UnsupportedError
from cupyinfer.schedule.tiles import FA3_ARCH, FA3_KV_TILES, max_tile_q

#: The copy engine's swizzle repeats every 8 rows, so that is the smallest box of a paged cache.
_LEAST_PAGE = 8


def fa3_problem(options: AttentionOptions, arch: str, custom_mask: bool) -> str | None:
    """Why the fa3 kernels cannot serve a plan, as the end of a sentence; None when they can."""
    if arch != FA3_ARCH:
        return f"runs on {FA3_ARCH} only, this GPU is {arch}"
    if options.decode:
        return "is for prefill; decode reads each key once and is bound by memory"
    if options.kv_dtype != options.q_dtype:
        return f"needs a cache of the queries' type, got {options.kv_dtype} for {options.q_dtype} queries"
    if options.user_variant is not None:
        return "does not take a user variant"
    if custom_mask:
        return "has no custom masks"
    if options.pos_encoding_mode == "ROPE_LLAMA":
        return "does not rotate queries and keys (pos_encoding_mode 'ROPE_LLAMA')"
    widths = options.head_dim_qk, options.head_dim_vo
    if widths not in FA3_KV_TILES:
        return f"has no tile for head_dim {widths[0]} (head_dim_vo {widths[1]})"
    kv_tile = FA3_KV_TILES[widths]
    if options.paged and fa3_box_rows(options.page_size, kv_tile) is None:
        return f"needs pages of a multiple of {_LEAST_PAGE} keys that divide {kv_tile} or are a multiple of it, got {options.page_size}"
    return None


def fa3_box_rows(page_size: int, kv_tile: int) -> int | None:
    """Keys per box of the copy engine: a page, or a tile of a larger page; None when tiles and pages do not fit together."""
    if page_size % _LEAST_PAGE == 0 and kv_tile % page_size == 0:
        return page_size
    return kv_tile if page_size % kv_tile == 0 else None


def choose_backend(requested: str, options: AttentionOptions, arch: str, custom_mask: bool, tile_q: int) -> str:
    """The kernels that serve a plan: "fa2" or "fa3".

    Args:
        requested: the caller's backend. "fa3" insists; "auto" takes fa3 wherever it is able and faster than fa2. On an H200 that was
            every prefill batch that fills the largest tiles, from 16 requests of 64 tokens (1.5 times) to one of 16384 (1.6 times).
            Batches of few rows have smaller tiles in fa2, where fa3 would multiply padding. Everything else takes fa2.
        options: what is planned.
        arch: the GPU's arch.
        custom_mask: a custom mask was given.
        tile_q: rows per tile that fa2 would take for the batch.

    Raises:
        UnsupportedError: "fa3" was asked for and cannot serve this.
    """
    if requested == "auto" and tile_q == max_tile_q(options.head_dim_vo):
        return "fa2" if fa3_problem(options, arch, custom_mask) else "fa3"
    if requested != "fa3":
        return "fa2"
    problem = fa3_problem(options, arch, custom_mask)
    if problem is not None:
        raise UnsupportedError(f"backend: fa3 {problem}; take 'auto' or 'fa2'")
    return "fa3"
