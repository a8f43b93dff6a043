# SPDX-License-Identifier: Apache-2.0
"""Compiling without a GPU: complete cubins, honest reports, errors that say where."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cupyinfer.errors import ArgumentError, CompileError
from cupyinfer.jit import compiler
from cupyinfer.jit.compiler import CompileReport, compile_cubin, nvrtc_version, parse_log
from cupyinfer.jit.source import KernelSource, kernel_source
from cupyinfer.jit.variant import AttentionVariant
from cupyinfer.schedule.profile import ARCHS, profile_for_arch
from tests.jit.conftest import TREE

DECODE = AttentionVariant("bfloat16", "bfloat16", 128, 128, 16, paged=True)
# 1024 threads leave 64 registers each, and 96 values are alive across the loop.
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024) spill(float* x, int n) {
  float live[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) live[i] = x[i * n + threadIdx.x];
  for (int step = 0; step < n; ++step) {
#pragma unroll
    for (int i = 0; i < 96; ++i) live[i] = live[i] * live[(i + 7) % 96] + x[step];
  }
#pragma unroll
  for (int i = 0; i < 96; ++i) x[i * n + threadIdx.x] = live[i];
}
"""
STATIC_SMEM = """
extern "C" __global__ void rotate(int* x) {
  __shared__ int row[77];
  row[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = row[76 - threadIdx.x];
}
"""


@pytest.mark.parametrize("arch", ARCHS)
def test_every_arch_gives_a_complete_image(tree: Path, arch: str) -> None:
    compiled = compile_cubin(kernel_source(DECODE, profile_for_arch(arch), tree), arch)
    assert compiled.report.clean
    assert 0 < compiled.report.registers <= 255
    header_offsets = struct.unpack_from("<QQ", compiled.cubin, 0x20)
    program_size, program_count, section_size, section_count = struct.unpack_from("<4H", compiled.cubin, 0x36)
    assert max(header_offsets[0] + program_size * program_count, header_offsets[1] + section_size * section_count) == len(compiled.cubin)
    assert b"attention\0" in compiled.cubin


def test_equal_sources_give_equal_cubins(tree: Path) -> None:
    source = kernel_source(DECODE, profile_for_arch("sm_80"), tree)
    assert compile_cubin(source, "sm_80") == compile_cubin(source, "sm_80")


def test_a_spill_is_reported() -> None:
    report = compile_cubin(KernelSource("spill", SPILLING, "spill"), "sm_90a").report
    assert report.registers == 64
    assert report.spill_bytes > 0
    assert report.stack_bytes > 0
    assert not report.clean
    assert f"{report.spill_bytes} B spilled" in str(report)


def test_static_shared_memory_is_reported() -> None:
    report = compile_cubin(KernelSource("rotate", STATIC_SMEM, "rotate"), "sm_80").report
    assert (report.smem_bytes, report.spill_bytes, report.stack_bytes, report.warnings) == (77 * 4, 0, 0, ())


def test_a_warning_of_the_front_end_is_reported() -> None:
    report = compile_cubin(KernelSource("rotate", STATIC_SMEM.replace("  row[", "  int spare;\n  row[", 1), "rotate"), "sm_80").report
    assert len(report.warnings) == 1
    assert 'variable "spare" was declared but never referenced' in report.warnings[0]
    assert not report.clean


def test_the_log_of_ptxas_is_read() -> None:
    log = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to a function call\n"
        "ptxas info    : Function properties for inner\n"
        "ptxas         .     16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Function properties for outer\n"
        "    48 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers, 48 bytes cumulative stack size, 1056 bytes smem, 400 bytes cmem[0]\n"
        "ptxas info    : Used 24 registers, used 0 barriers\n"
    )
    assert parse_log(log) == CompileReport(168, 24, 48, 1056, (log.splitlines()[0],))


def test_a_log_without_registers_is_refused() -> None:
    with pytest.raises(CompileError, match="no register count"):
        parse_log("")


def test_an_error_in_a_header_names_it_and_its_line(make_tree: Callable[..., Path]) -> None:
    root = make_tree(tile__scale=TREE["tile/scale.cuh"].replace("x * p.n", "x * q.n"))
    with pytest.raises(CompileError, match=r"refused fa2_q16_bfloat16_d128_paged for sm_90a:\n") as raised:
        compile_cubin(kernel_source(DECODE, profile_for_arch("sm_90a"), root), "sm_90a")
    assert 'tile/scale.cuh(5): error: identifier "q" is undefined' in str(raised.value)


def test_an_error_after_an_include_has_its_own_line(make_tree: Callable[..., Path]) -> None:
    root = make_tree(kernels__fa2_decode=TREE["kernels/fa2_decode.cuh"].replace("threadIdx.x", "thread.x"))
    with pytest.raises(CompileError, match=r'kernels/fa2_decode\.cuh\(6\): error: identifier "thread" is undefined'):
        compile_cubin(kernel_source(DECODE, profile_for_arch("sm_90a"), root), "sm_90a")


@pytest.mark.parametrize("arch", ["90", "sm_90x", "compute_90", "sm_", "sm_90a "])
def test_a_misspelt_arch(arch: str) -> None:
    with pytest.raises(ArgumentError, match=r"arch: got .*expected an architecture such as sm_80"):
        compile_cubin(KernelSource("rotate", STATIC_SMEM, "rotate"), arch)


def test_an_arch_this_nvrtc_does_not_know() -> None:
    major, minor = nvrtc_version()
    with pytest.raises(CompileError, match=rf"NVRTC {major}\.{minor} cannot compile for sm_999, it knows .*sm_80.*cupyinfer\[cuda12\]"):
        compile_cubin(KernelSource("rotate", STATIC_SMEM, "rotate"), "sm_999")


def test_no_nvrtc_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", None)
    with pytest.raises(CompileError, match=r"NVRTC was not found .*pip install 'cupyinfer\[cuda12\]'"):
        compile_cubin(KernelSource("rotate", STATIC_SMEM, "rotate"), "sm_80")


@pytest.mark.parametrize("image", [b"", b"\x7fELF\x01" + bytes(100)])
def test_what_is_not_a_cubin_is_refused(image: bytes) -> None:
    with pytest.raises(CompileError, match="not a 64-bit ELF"):
        compiler._complete_elf(image)


def test_a_truncated_image_is_refused(tree: Path) -> None:
    cubin = compile_cubin(kernel_source(DECODE, profile_for_arch("sm_80"), tree), "sm_80").cubin
    assert compiler._complete_elf(cubin[:-1]) == cubin
    assert compiler._complete_elf(cubin) == cubin
    with pytest.raises(CompileError, match=f"cubin of {len(cubin) - 2} bytes whose tables end at {len(cubin)}"):
        compiler._complete_elf(cubin[:-2])
