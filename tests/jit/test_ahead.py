# SPDX-License-Identifier: Apache-2.0
"""Compiling ahead of time into a cache, in this process and in several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cupyinfer.errors import ArgumentError
from cupyinfer.jit import source
from cupyinfer.jit.ahead import CompileOutcome, compile_variants, fa3_variants, standard_variants
from cupyinfer.jit.cache import CacheCounters, CubinCache
from cupyinfer.jit.variant import HELPER_KERNELS, AttentionVariant, HelperVariant
from cupyinfer.schedule.profile import ARCHS, profile_for_arch
from tests.jit.conftest import TREE

DECODE = AttentionVariant("bfloat16", "bfloat16", 128, 128, 16, paged=True)
PREFILL = AttentionVariant("float16", "float16", 64, 64, 64, paged=False)


def test_the_catalogue() -> None:
    variants = standard_variants()
    names = [str(variant) for variant in variants]
    # Eight legal (head_dim, cta_tile_q) pairs, two dtypes, paged and ragged.
    assert len(variants) == 8 * 2 * 2 + len(HELPER_KERNELS)
    assert len(set(names)) == len(names)
    assert {"fa2_q16_bfloat16_d128_paged", "fa2_q128_float16_d64_ragged", "fa2_q64_bfloat16_d256_paged", "merge_states"} <= set(names)
    assert not any("q128" in name and "d256" in name for name in names)


def test_the_hopper_catalogue() -> None:
    names = [str(variant) for variant in fa3_variants()]
    assert sorted(names) == sorted(
        f"fa3_{tile_and_width}_{kind}".replace("_d", f"_{dtype}_d")
        for dtype in ("float16", "bfloat16", "float8_e4m3fn_ofloat16", "float8_e4m3fn_obfloat16")
        for tile_and_width in (
            *("q128_d64", "q192_d64", "q256_d64", "q128_d128", "q128x160_d128", "q128x192_d128", "q128_d192x128", "q128_d256"),
        )
        if tile_and_width != ("q256_d64" if "float8" in dtype else "q128x192_d128")
        for kind in ("paged", "ragged")
    )


@pytest.mark.parametrize("arch", ARCHS)
def test_every_standard_kernel_fits_every_arch(arch: str) -> None:
    profile = profile_for_arch(arch)
    for variant in standard_variants():
        if isinstance(variant, AttentionVariant):
            assert variant.tile_config(profile.smem_per_sm, profile.smem_per_cta).smem_bytes <= profile.smem_per_cta


@pytest.mark.parametrize("workers", [1, 2])
def test_everything_is_compiled_then_found(installed_tree: Path, fresh_cache: Path, workers: int) -> None:
    seen: list[tuple[int, int]] = []
    cache = CubinCache(fresh_cache)
    outcomes = compile_variants(
        [DECODE, PREFILL], ["sm_80", "sm_90a"], lambda outcome, done, total: seen.append((done, total)), workers, cache
    )
    assert [(outcome.variant, outcome.arch) for outcome in outcomes] == [
        (v, arch) for arch in ("sm_80", "sm_90a") for v in (DECODE, PREFILL)
    ]
    assert all(outcome.compiled and outcome.error is None and outcome.seconds > 0 for outcome in outcomes)
    assert all(outcome.report is not None and outcome.report.clean for outcome in outcomes)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert cache.counters == CacheCounters(hits=0, misses=4, compiles=4)

    again = CubinCache(fresh_cache)
    found = compile_variants([DECODE, PREFILL], ["sm_80", "sm_90a"], workers=workers, cache=again)
    assert again.counters == CacheCounters(hits=4, misses=0, compiles=0)
    assert [outcome.report for outcome in found] == [outcome.report for outcome in outcomes]
    assert not any(outcome.compiled for outcome in found)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failure_does_not_stop_the_others(
    make_tree: Callable[..., Path], fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    root = make_tree(kernels__fa2_decode=TREE["kernels/fa2_decode.cuh"].replace("scale(", "scales("))
    monkeypatch.setattr(source, "kernels_dir", lambda: root)
    unwritten = HelperVariant("merge_states")
    outcomes = compile_variants([DECODE, unwritten, PREFILL], ["sm_80"], workers=workers)
    by_variant: dict[object, CompileOutcome] = {outcome.variant: outcome for outcome in outcomes}
    assert 'identifier "scales" is undefined' in (by_variant[DECODE].error or "")
    assert "kernels/merge_states.cuh cannot be read" in (by_variant[unwritten].error or "")
    assert by_variant[PREFILL].compiled and by_variant[PREFILL].error is None
    assert [outcome.compiled for outcome in outcomes] == [False, False, True]


def test_bad_arguments(installed_tree: Path) -> None:
    with pytest.raises(ArgumentError, match="arch: got 'sm_75'"):
        compile_variants([DECODE], ["sm_80", "sm_75"])
    with pytest.raises(ArgumentError, match="workers: got 0"):
        compile_variants([DECODE], ["sm_80"], workers=0)
