# SPDX-License-Identifier: Apache-2.0
"""Every standard kernel for every arch, and kernels of every feature on some arch, compile with no GPU, no spill and no warning.

Cubins go to the cache that all tests share, so only a changed kernel is compiled again, and a GPU run begins with a warm cache.
"""

from __future__ import annotations

import itertools

import pytest

from cupyinfer.attention.options import make_options
from cupyinfer.dtypes import FP8_QUERY_TYPE, itemsize
from cupyinfer.jit.ahead import fa3_variants, standard_variants
from cupyinfer.jit.cache import default_cache
from cupyinfer.jit.source import kernel_source
from cupyinfer.jit.variant import POS_ENCODINGS, AttentionVariant, KernelVariant
from cupyinfer.schedule.profile import ARCHS, profile_for_arch
from cupyinfer.schedule.tiles import CTA_TILE_Q, FA3_ARCH, FA3_TILES, HEAD_DIMS, max_tile_q

# The machine number of a CUDA program in an ELF header.
_EM_CUDA = 190


def feature_variants() -> tuple[AttentionVariant, ...]:
    """Kernels beyond the standard ones: each tile, paged and ragged, with every cache type, width, mask, cap and position encoding.

    Features take turns instead of multiplying: every value of a feature meets every tile, and every other value of most features.
    """
    caches = (("float16", "float8_e4m3fn"), ("bfloat16", "bfloat16"), ("bfloat16", "float8_e5m2"), ("float16", "float16"))
    found = []
    for at, (tile, paged, (qk, vo)) in enumerate(itertools.product(CTA_TILE_Q, (True, False), HEAD_DIMS)):
        if tile > max_tile_q(vo):
            continue
        q_dtype, kv_dtype = caches[at % 4]
        found.append(
            AttentionVariant(
                q_dtype,
                kv_dtype,
                qk,
                vo,
                tile,
                paged,
                custom_mask=not paged or at % 2 == 0,
                soft_cap=at % 3 == 0,
                pos_encoding=POS_ENCODINGS[at % 3],
            )
        )
    return tuple(found)


def fa3_feature_variants() -> tuple[AttentionVariant, ...]:
    """Hopper kernels beyond the standard ones: every width, paged and ragged, capped, with ALiBi in turn."""
    found = []
    for dtype in ("float16", FP8_QUERY_TYPE):
        for at, (qk, vo) in enumerate(FA3_TILES[itemsize(dtype)]):
            for paged in (True, False):
                alibi = "ALIBI" if (at + paged) % 2 else "NONE"
                found.append(
                    AttentionVariant(dtype, dtype, qk, vo, 128, paged, soft_cap=True, pos_encoding=alibi, backend="fa3", o_dtype="float16")
                )
    return tuple(found)


def check(variant: KernelVariant, arch: str) -> None:
    kernel = default_cache().get(kernel_source(variant, profile_for_arch(arch)), arch)
    assert kernel.report.clean, f"{variant} on {arch}: {kernel.report}"
    assert kernel.report.registers <= 255
    assert kernel.cubin[:4] == b"\x7fELF" and int.from_bytes(kernel.cubin[18:20], "little") == _EM_CUDA


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("variant", standard_variants(), ids=str)
def test_standard_kernel(variant: KernelVariant, arch: str) -> None:
    check(variant, arch)


@pytest.mark.parametrize(("variant", "arch"), [(variant, ARCHS[at % len(ARCHS)]) for at, variant in enumerate(feature_variants())], ids=str)
def test_feature_kernel(variant: AttentionVariant, arch: str) -> None:
    check(variant, arch)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("pos_encoding", "custom_mask", "soft_cap", "paged"),
    [("ROPE_LLAMA", True, True, True), ("ROPE_LLAMA", True, False, False), ("ROPE_LLAMA", False, False, True), ("ALIBI", True, True, True)],
)
def test_the_fullest_decode_kernels(pos_encoding: str, custom_mask: bool, soft_cap: bool, paged: bool, kv_dtype: str) -> None:
    """At head_dim 256 outputs take half of the registers; RoPE (keys to rotate) and ALiBi with a mask (row data) want most of the rest."""
    features = {"pos_encoding": pos_encoding, "custom_mask": custom_mask, "soft_cap": soft_cap}
    check(AttentionVariant("bfloat16", kv_dtype, 256, 256, 16, paged, **features), "sm_90a")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100"])
@pytest.mark.parametrize("paged", [True, False], ids=["paged", "ragged"])
def test_three_ctas_fit_with_a_mask(paged: bool, arch: str) -> None:
    """The planner counts on three CTAs to an SM without knowing of custom masks, so these have to do with 168 registers."""
    profile = profile_for_arch(arch)
    variant = AttentionVariant("bfloat16", "bfloat16", 64, 64, 128, paged, custom_mask=True)
    assert variant.tile_config(profile.smem_per_sm, profile.smem_per_cta).ctas_per_sm == 3
    check(variant, arch)


def test_plans_and_kernels_agree_on_ctas() -> None:
    profile = profile_for_arch("sm_90a")
    common = {"decode": False, "paged": True, "num_qo_heads": 8, "num_kv_heads": 8, "head_dim_qk": 64}
    features = ({}, 3), ({"logits_soft_cap": 30.0}, 2), ({"pos_encoding_mode": "ALIBI"}, 2), ({"pos_encoding_mode": "ROPE_LLAMA"}, 2)
    for feature, ctas in features:
        options = make_options(**common, **feature)
        kernel = options.variant(128, False).tile_config(profile.smem_per_sm, profile.smem_per_cta)
        assert options.shape.config(128, profile) == kernel
        assert kernel.ctas_per_sm == ctas


@pytest.mark.parametrize("variant", (*fa3_variants(), *fa3_feature_variants()), ids=str)
def test_fa3_kernel(variant: AttentionVariant) -> None:
    """Clean also means that no product waits for another: ptxas reports that like a spill."""
    check(variant, FA3_ARCH)


def test_every_feature_is_compiled() -> None:
    variants = feature_variants()
    for tile in CTA_TILE_Q:
        of_tile = [variant for variant in variants if variant.cta_tile_q == tile]
        assert {variant.pos_encoding for variant in of_tile} == set(POS_ENCODINGS)
        assert {variant.kv_dtype for variant in of_tile} >= {"float8_e4m3fn", "float8_e5m2"}
        for feature in ("paged", "custom_mask", "soft_cap"):
            assert {getattr(variant, feature) for variant in of_tile} == {True, False}
