# SPDX-License-Identifier: Apache-2.0
"""Source assembly: what is expanded, what is refused, and what the text may depend on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cupyinfer.errors import ArgumentError, CompileError
from cupyinfer.jit import source
from cupyinfer.jit.cache import cache_key
from cupyinfer.jit.compiler import compile_cubin
from cupyinfer.jit.source import KernelSource, assemble, expand_headers, kernel_source, kernels_dir
from cupyinfer.jit.variant import HELPER_KERNELS, AttentionVariant, HelperVariant
from cupyinfer.schedule.profile import profile_for_arch
from tests.jit.conftest import TREE

H100 = profile_for_arch("sm_90a")
DECODE = AttentionVariant("bfloat16", "bfloat16", 128, 128, 16, paged=True)
PREFILL = AttentionVariant("float16", "float8_e5m2", 192, 128, 64, paged=False, custom_mask=True, soft_cap=True, pos_encoding="ALIBI")


def test_each_header_is_expanded_once_where_it_is_first_included(tree: Path) -> None:
    assert expand_headers(tree, "kernels/fa2_decode.cuh").splitlines() == [
        '#line 1 "kernels/fa2_decode.cuh"',
        "// One block writes a scaled row.",
        '#line 1 "params.cuh"',
        "",
        *TREE["params.cuh"].splitlines()[1:],
        '#line 3 "kernels/fa2_decode.cuh"',
        '#line 1 "tile/scale.cuh"',
        "",
        "",
        *TREE["tile/scale.cuh"].splitlines()[2:],
        '#line 4 "kernels/fa2_decode.cuh"',
        *TREE["kernels/fa2_decode.cuh"].splitlines()[3:],
    ]


def test_decode_constants() -> None:
    config = DECODE.tile_config(H100.smem_per_sm, H100.smem_per_cta)
    assert source.attention_constants(DECODE, config) == (
        "enum class Element { kFloat16, kBfloat16, kE4m3, kE5m2 };\n"
        "constexpr Element kQElement = Element::kBfloat16;\n"
        "constexpr Element kOElement = Element::kBfloat16;\n"
        "constexpr Element kKvElement = Element::kBfloat16;\n"
        "constexpr int kHeadDimQk = 128, kHeadDimVo = 128;\n"
        f"constexpr int kCtaTileQ = 16, kKvTile = 64, kNumWarps = {config.num_warps}, kNumStages = {config.num_stages}, "
        f"kJoinSlots = {config.join_slots}, kBlockKeys = {config.block_keys}, kCtasPerSm = {config.ctas_per_sm};\n"
        f"constexpr int kSmemBytes = {config.smem_bytes};\n"
        "constexpr bool kPaged = true, kCustomMask = false, kSoftCap = false;\n"
        "enum class PosEncoding { kNone, kRopeLlama, kAlibi };\n"
        "constexpr PosEncoding kPosEncoding = PosEncoding::kNone;\n"
    )


def test_the_compiler_sees_the_fields_of_the_variant(make_tree: Callable[..., Path]) -> None:
    config = PREFILL.tile_config(H100.smem_per_sm, H100.smem_per_cta)
    claims = (
        "kQElement == Element::kFloat16 && kKvElement == Element::kE5m2 && kHeadDimQk == 192 && kHeadDimVo == 128 && kCtaTileQ == 64",
        f"kKvTile == {config.kv_tile} && kNumWarps == {config.num_warps} && kNumStages == {config.num_stages}",
        f"kSmemBytes == {config.smem_bytes}",
        "!kPaged && kCustomMask && kSoftCap && kPosEncoding == PosEncoding::kAlibi",
    )
    asserts = "".join(f'static_assert({claim}, "The constants are those of the variant.");\n' for claim in claims)
    root = make_tree(kernels__fa2_prefill=asserts + TREE["kernels/fa2_prefill.cuh"])
    made = kernel_source(PREFILL, H100, root)
    assert (made.entry, made.smem_bytes) == ("attention", config.smem_bytes)
    assert compile_cubin(made, "sm_90a").report.clean


def test_tile_shapes_follow_the_profile(tree: Path) -> None:
    assert kernel_source(DECODE, H100, tree).text != kernel_source(DECODE, profile_for_arch("sm_89"), tree).text


def test_another_checkout_has_the_same_text_and_key(make_tree: Callable[..., Path]) -> None:
    here, there = (kernel_source(DECODE, H100, make_tree(name)) for name in ("here/kernels_cu", "somewhere/else/kernels_cu"))
    assert here == there
    assert cache_key(here, "sm_90a") == cache_key(there, "sm_90a")


def test_a_changed_header_changes_the_key(make_tree: Callable[..., Path]) -> None:
    before = kernel_source(DECODE, H100, make_tree("before"))
    after = kernel_source(DECODE, H100, make_tree("after", params=TREE["params.cuh"].replace("int n", "long n")))
    assert cache_key(before, "sm_90a") != cache_key(after, "sm_90a")


def test_line_endings_do_not_change_the_text(make_tree: Callable[..., Path]) -> None:
    root = make_tree("crlf")
    for path in TREE:
        (root / path).write_bytes(TREE[path].replace("\n", "\r\n").encode())
    assert kernel_source(DECODE, H100, root) == kernel_source(DECODE, H100, make_tree("lf"))


@pytest.mark.parametrize(
    "directive",
    [
        "#include <cuda_fp16.h>",
        "#include <params.cuh>",
        '#include "missing.cuh"',
        '#include "../outside.cuh"',
        '#include "./params.cuh"',
        '#include "tile"',
        '#include "/etc/hostname"',
        "#include HEADER",
        '#include_next "params.cuh"',
        '  #  include "params.cuh" "tile/scale.cuh"',
    ],
)
def test_other_includes_are_refused(make_tree: Callable[..., Path], directive: str) -> None:
    root = make_tree(tile__scale=f"#pragma once\n\n{directive}\n")
    (root.parent / "outside.cuh").write_text("", encoding="utf-8")
    with pytest.raises(CompileError, match=r"^tile/scale\.cuh:3: #include.* is refused"):
        expand_headers(root, "kernels/fa2_decode.cuh")


def test_cycles_are_refused(make_tree: Callable[..., Path]) -> None:
    root = make_tree(params='#pragma once\n#include "tile/scale.cuh"\n')
    with pytest.raises(CompileError, match=r"tile/scale\.cuh:2: include cycle params\.cuh -> tile/scale\.cuh -> params\.cuh"):
        expand_headers(root, "kernels/fa2_decode.cuh")


def test_conditional_includes_are_refused(make_tree: Callable[..., Path]) -> None:
    root = make_tree(tile__scale='#if 1\n#endif\n#ifdef A\n#  if B\n#  endif\n#include "params.cuh"\n#endif\n')
    with pytest.raises(CompileError, match=r"tile/scale\.cuh:6: params\.cuh is included inside #if"):
        expand_headers(root, "kernels/fa2_prefill.cuh")


def test_a_missing_kernel_file_is_named(tree: Path) -> None:
    with pytest.raises(CompileError, match=r"kernels/merge_states\.cuh cannot be read"):
        kernel_source(HelperVariant("merge_states"), H100, tree)


def test_constants_come_first(tree: Path) -> None:
    made = assemble("mine", "constexpr int kHeadDimQk = 3;\n", "kernels/fa2_decode.cuh", "attention", root=tree)
    assert made == KernelSource("mine", made.text, "attention", 0)
    assert made.text.startswith('#line 1 "constants of mine"\nconstexpr int kHeadDimQk = 3;\n#line 1 "kernels/fa2_decode.cuh"\n')


@pytest.mark.parametrize("kernel", HELPER_KERNELS)
def test_helpers_name_their_entry(kernel: str) -> None:
    made = kernel_source(HelperVariant(kernel), H100)
    assert made.entry == kernel
    assert f" {kernel}(const __grid_constant__ " in made.text


def test_unknown_helper() -> None:
    with pytest.raises(ArgumentError, match="kernel: got 'sort', expected one of append_paged_kv_cache"):
        HelperVariant("sort")


def test_the_sources_of_this_checkout_are_found() -> None:
    assert kernels_dir() == Path(__file__).resolve().parents[2] / "kernels_cu"


@pytest.mark.parametrize("inside", [True, False])
def test_both_layouts_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_tree: Callable[..., Path], inside: bool) -> None:
    monkeypatch.setattr(source, "__file__", str(tmp_path / "site" / "cupyinfer" / "jit" / "source.py"))
    with pytest.raises(CompileError, match="kernels_cu"):
        kernels_dir()
    root = make_tree("site/cupyinfer/kernels_cu" if inside else "site/kernels_cu")
    assert kernels_dir() == root.resolve()
