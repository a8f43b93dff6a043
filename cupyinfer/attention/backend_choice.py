# SPDX-License-Identifier: Apache-2.0
"""Which GPU kernels serve a plan: a pure function of what was asked for, with a sentence for every refusal."""

from __future__ import annotations

from cupyinfer.attention.options import AttentionOptions
from cupyinfer.dtypes import itemsize
from cupyinfer.errors import UnsupportedError
from cupyinfer.schedule.tiles import FA3_ARCH, FA3_LEAST_PAGE, FA3_TILES, fa3_key_choices, max_tile_q


def fa3_problem(options: AttentionOptions, arch: str, custom_mask: bool) -> str | None:
    """Why the fa3 kernels cannot serve a plan, as the end of a sentence; None when they can. Found once for the same options."""
    key = arch, custom_mask
    if key not in options.fa3_problems:
        options.fa3_problems[key] = _fa3_problem(options, arch, custom_mask)
    return options.fa3_problems[key]


def _fa3_problem(options: AttentionOptions, arch: str, custom_mask: bool) -> str | None:
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
    size = itemsize(options.kv_dtype)
    if widths not in FA3_TILES[size]:
        return f"has no tile for head_dim {widths[0]} (head_dim_vo {widths[1]})"
    shape = options.fa3_shape
    if options.paged and (options.page_size == 1 or not shape.possible_tile_qs):
        tiles = " or ".join(map(str, fa3_key_choices(*widths, shape.transforms_logits, size)))
        return f"needs pages of a multiple of {FA3_LEAST_PAGE} keys that divide {tiles} or are a multiple of it, got {options.page_size}"
    return None


def choose_backend(requested: str, options: AttentionOptions, arch: str, custom_mask: bool, tile_q: int) -> str:
    """The kernels that serve a plan: "fa2" or "fa3".

    Args:
        requested: the caller's backend. "fa3" insists; "auto" takes fa3 wherever it is able and faster than fa2. On an H200 that was
            every prefill batch that fills the largest tiles, from 16 requests of 64 tokens (1.5 times) to one of 16384 (1.6 times).
            Batches of few rows have smaller tiles in fa2, where fa3 would multiply padding. Everything else takes fa2, but for fp8
            queries: only fa3 multiplies them.
        options: what is planned.
        arch: the GPU's arch.
        custom_mask: a custom mask was given.
        tile_q: rows per tile that fa2 would take for the batch.

    Raises:
        UnsupportedError: "fa3" was asked for and cannot serve this, or nothing serves fp8 queries like that.
    """
    if options.fp8_queries:
        return _choose_for_fp8(requested, options, arch, custom_mask)
    if requested == "auto" and tile_q == max_tile_q(options.head_dim_vo):
        return "fa2" if fa3_problem(options, arch, custom_mask) else "fa3"
    if requested != "fa3":
        return "fa2"
    problem = fa3_problem(options, arch, custom_mask)
    if problem is not None:
        raise UnsupportedError(f"backend: fa3 {problem}; take 'auto' or 'fa2'")
    return "fa3"


def _choose_for_fp8(requested: str, options: AttentionOptions, arch: str, custom_mask: bool) -> str:
    if requested == "host":
        return "fa2"  # whose tiles the host walks
    if requested == "fa2":
        problem = "fa2 takes float16 and bfloat16 queries, over a cache of any type"
    else:
        unable = fa3_problem(options, arch, custom_mask)
        if unable is None:
            return "fa3"
        problem = f"fa3 {unable}"
    raise UnsupportedError(f"backend: {problem}; {options.q_dtype} queries are served by fa3 (prefill on {FA3_ARCH}) and by host alone")
