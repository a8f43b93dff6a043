# SPDX-License-Identifier: Apache-2.0
"""A user's CUDA source on its way into a kernel: checks, layout, messages, and no spills in any kernel of the worked examples."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest

from cupyinfer.backends.params import ATTENTION_PARAMS
from cupyinfer.errors import ArgumentError, ArgumentTypeError, CompileError
from cupyinfer.jit.cache import cache_key, default_cache
from cupyinfer.jit.compiler import compile_cubin
from cupyinfer.jit.source import KernelSource, expand_headers, kernel_source, kernels_dir
from cupyinfer.jit.user_variant import UserVariant
from cupyinfer.jit.variant import AttentionVariant
from cupyinfer.schedule.profile import profile_for_arch
from tests.support.user_variants import EVERYTHING, documented_variants

EXAMPLES = documented_variants()
DECODE = AttentionVariant("float16", "float16", 64, 64, 16, paged=True)
#: One kernel of each kind: the narrowest on registers first. The arch of the last, an fp8 cache of the widest heads, takes turns.
KERNELS = (
    AttentionVariant("bfloat16", "bfloat16", 128, 128, 16, paged=True),
    AttentionVariant("bfloat16", "bfloat16", 128, 128, 128, paged=False),
)
WIDE = tuple(AttentionVariant("bfloat16", "float8_e4m3fn", 256, 256, tile, paged=True, soft_cap=True) for tile in (16, 64))
ARCHS = ("sm_80", "sm_90a", "sm_120")
VARIANTS = (*EXAMPLES.values(), EVERYTHING)


def named(**fields: Any) -> UserVariant:
    return UserVariant(**{"name": "some", "mask": "true", **fields})


def test_the_docs_define_the_examples() -> None:
    assert set(EXAMPLES) == {"sigmoid_gate", "document_mask", "alibi_by_hand"}


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize(
    ("user", "arch"),
    [(user, arch) for at, user in enumerate(VARIANTS) for arch in (ARCHS if user is EVERYTHING else ARCHS[at : at + 1])],
    ids=str,
)
def test_compiles_without_spills(user: UserVariant, kernel: AttentionVariant, arch: str) -> None:
    _check_compiles(replace(kernel, user=user), arch)


@pytest.mark.parametrize("kernel", WIDE, ids=str)
@pytest.mark.parametrize(("user", "arch"), [(user, ARCHS[at % 3]) for at, user in enumerate(VARIANTS)], ids=str)
def test_wide_kernels_compile_without_spills(user: UserVariant, arch: str, kernel: AttentionVariant) -> None:
    _check_compiles(replace(kernel, user=user), arch)


def _check_compiles(variant: AttentionVariant, arch: str) -> None:
    kernel = default_cache().get(kernel_source(variant, profile_for_arch(arch)), arch)
    assert kernel.report.clean, f"{variant} on {arch}: {kernel.report}"


def _at(struct_name: str, member: str, offset: int) -> str:
    # NVRTC has no offsetof; this is what its front end makes of it.
    return f"__INTADDR__(&((({struct_name}*)0)->{member})) == {offset}"


@pytest.mark.parametrize("user", [*VARIANTS, named(), named(scalars=[("a", "int")])], ids=lambda user: user.name)
def test_the_record_has_the_layout_of_the_struct(user: UserVariant) -> None:
    codes = user.struct_format.lstrip("<").rstrip("48x")
    names = [name for name, _ in (*user.tensors, *user.scalars)]
    assert len(codes) == len(names)
    size = ATTENTION_PARAMS.itemsize + struct.calcsize(user.struct_format)
    claims = [f"sizeof(AttentionParams) == {size}", _at("AttentionParams", "user", ATTENTION_PARAMS.itemsize)]
    for at, name in enumerate(names):
        offset = struct.calcsize("<" + codes[: at + 1]) - struct.calcsize("<" + codes[at])
        claims.append(_at("UserParams", name, offset))
    text = expand_headers(kernels_dir(), "tile/user_element.cuh") + user.source() + expand_headers(kernels_dir(), "params.cuh")
    text += "".join(f'static_assert({claim}, "{claim}");\n' for claim in claims)
    compile_cubin(KernelSource("layout", text + 'extern "C" __global__ void nothing() {}\n', "nothing"), "sm_90a")


def test_plain_kernels_have_the_plain_layout() -> None:
    """Every field of the record, where no variant follows it."""
    fields = ATTENTION_PARAMS.fields or {}
    claims = [_at("AttentionParams", name, offset) for name, (_, offset, *_) in fields.items()]
    claims.append(f"sizeof(AttentionParams) == {ATTENTION_PARAMS.itemsize}")
    text = expand_headers(kernels_dir(), "params.cuh") + "".join(f'static_assert({claim}, "{claim}");\n' for claim in claims)
    compile_cubin(KernelSource("layout", text + 'extern "C" __global__ void nothing() {}\n', "nothing"), "sm_90a")


def test_the_source_is_part_of_the_key() -> None:
    profile = profile_for_arch("sm_90a")
    users = [None, named(), named(mask="kv_token > 0"), named(mask="true", scalars=(("a", "int"),)), named(declarations="int a;")]
    keys = {cache_key(kernel_source(replace(DECODE, user=user), profile), "sm_90a") for user in users}
    assert len(keys) == len(users)


def test_a_mistake_is_reported_at_its_line() -> None:
    broken = {
        "query_transform": "\n query + nothing",
        "logit_transform": "float x = logit;\nreturn x + nothing;",
        "mask": "// a comment that says return\nnothing(kv_token)",
        "output_transform": "\noutput + nothing",
    }
    for field, source in broken.items():
        made = kernel_source(replace(DECODE, user=UserVariant("broken", **{field: source})), profile_for_arch("sm_90a"))
        with pytest.raises(CompileError, match=rf'{field} of broken\(2\): error: identifier "nothing" is undefined'):
            compile_cubin(made, "sm_90a")


@pytest.mark.parametrize("name", ["", "1a", "a-b", "a b", "_a", "a__b", "int", "naïve", "a\n"])
def test_names_are_identifiers(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"^name: got .* expected an identifier"):
        named(name=name)
    for field, kind in (("scalars", "int"), ("tensors", "int32")):
        with pytest.raises(ArgumentError, match=rf"^{field}: got .* expected an identifier"):
            named(**{field: ((name, kind),)})


@pytest.mark.parametrize(
    "name", ["logit", "kv_token", "q_position", "mask_hook", "out", "q", "return_lse", "UserParams", "Float16", "query"]
)
def test_names_that_are_taken(name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^scalars: '{name}' is taken"):
        named(scalars=((name, "float"),))


def test_variants_that_make_no_sense() -> None:
    with pytest.raises(ArgumentError, match=r"^variant some: two parameters are named 'a'"):
        named(scalars=(("a", "int"),), tensors=(("a", "int32"),))
    with pytest.raises(ArgumentError, match=r"^scalars: a has type 'double', expected one of float, int"):
        named(scalars=(("a", "double"),))
    with pytest.raises(ArgumentError, match=r"^tensors: a has type 'float64', expected one of float32, "):
        named(tensors=(("a", "float64"),))
    with pytest.raises(ArgumentError, match=r"^variant some: changes nothing"):
        UserVariant("some", scalars=(("a", "int"),), declarations="int b;")
    with pytest.raises(ArgumentError, match=r"^mask: is empty"):
        named(mask=" /* nothing */ // here\n")
    with pytest.raises(ArgumentError, match=r"^variant some: has 65 parameters, at most 64"):
        named(scalars=tuple((f"a{i}", "int") for i in range(65)))
    for wrong in ("ab", (("a",),), ((1, 2, 3),), {"a": "int"}):
        with pytest.raises(ArgumentTypeError, match=r"^scalars: got .* expected pairs"):
            named(scalars=wrong)
    with pytest.raises(ArgumentTypeError, match=r"^scalars: got 1, expected a string"):
        named(scalars=((1, "int"),))
    with pytest.raises(ArgumentTypeError, match=r"^mask: got int, expected CUDA source"):
        named(mask=1)


def test_variants_are_values() -> None:
    listed = named(scalars=[["a", "int"]])
    assert listed == named(scalars=(("a", "int"),)) and hash(listed) == hash(named(scalars=(("a", "int"),)))
    assert str(replace(DECODE, user=listed)) == "fa2_q16_float16_d64_paged_user_some"
