# SPDX-License-Identifier: Apache-2.0
"""NVRTC, with no GPU and no toolkit: one CUDA text in, one cubin and what ptxas said about it out."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Any

from cupyinfer.errors import ArgumentError, CompileError
from cupyinfer.jit.source import KernelSource
from cupyinfer.schedule.profile import ARCHS

#: Options of every compile. There is no include path among them: a kernel's text is complete. NVRTC's own cache is off, since
#: what it returns comes without a log, and so without a word about spills.
DEFAULT_OPTIONS = ("--std=c++17", "-default-device", "--no-cache", "--ptxas-options=-v")

_ARCH = re.compile(r"sm_(\d+)[af]?")
_INSTALL = "pip install 'cupyinfer[cuda12]' (or 'cupyinfer[cuda13]' for a CUDA 13 driver)"


@dataclass(frozen=True)
class CompileReport:
    """What ptxas reports about a cubin; of several functions in one cubin, the largest figure of each.

    Attributes:
        registers: registers per thread.
        spill_bytes: spill stores plus spill loads per thread, bytes.
        stack_bytes: stack frame per thread, bytes.
        smem_bytes: static shared memory per CTA, bytes.
        warnings: warnings of the front end and of ptxas, and ptxas's C75xx notes on lost performance, one line each.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    smem_bytes: int
    warnings: tuple[str, ...]

    @property
    def clean(self) -> bool:
        """No spill and no warning."""
        return self.spill_bytes == 0 and not self.warnings

    def __str__(self) -> str:
        text = f"{self.registers} registers, {self.spill_bytes} B spilled, {self.stack_bytes} B stack, {self.smem_bytes} B static smem"
        return "; ".join((text, *self.warnings))


@dataclass(frozen=True)
class CompiledKernel:
    """A complete ELF cubin and its report."""

    cubin: bytes
    report: CompileReport


def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC that compiles here.

    Raises:
        CompileError: there is none.
    """
    major, minor = _nvrtc().getVersion()
    return int(major), int(minor)


def compile_cubin(source: KernelSource, arch: str, options: tuple[str, ...] = DEFAULT_OPTIONS) -> CompiledKernel:
    """Compile a kernel for one architecture.

    Args:
        source: the kernel.
        arch: such as "sm_90a".
        options: further NVRTC options.

    Raises:
        ArgumentError: `arch` is not the name of an architecture.
        CompileError: no NVRTC, one too old for `arch`, or it refused the source; then the message holds its log.
    """
    check_arch(arch)
    nvrtc = _nvrtc()
    _check_supported(nvrtc, arch)
    program = nvrtc.createProgram(source.text, source.name, [], [])
    try:
        nvrtc.compileProgram(program, [f"-arch={arch}", *options])
        log = nvrtc.getProgramLog(program)
        cubin = _complete_elf(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        major, minor = nvrtc.getVersion()
        log = nvrtc.getProgramLog(program).rstrip("\0 \n") or str(error)
        raise CompileError(f"NVRTC {major}.{minor} refused {source.name} for {arch}:\n{log}") from error
    finally:
        nvrtc.destroyProgram(program)
    return CompiledKernel(cubin, parse_log(log))


def check_arch(arch: str) -> None:
    """Raise ArgumentError unless `arch` is written like "sm_90a"."""
    if not _ARCH.fullmatch(arch):
        raise ArgumentError(f"arch: got {arch!r}, expected an architecture such as {', '.join(ARCHS)}")


def parse_log(log: str) -> CompileReport:
    """Read the log of a compile with ``--ptxas-options=-v``.

    Raises:
        CompileError: the log reports no register count; without it a spill would go unseen.
    """
    registers = _numbers(r"Used (\d+) registers", log)
    if not registers:
        raise CompileError(f"NVRTC's log reports no register count:\n{log}")
    spills = _numbers(r"(\d+) bytes spill stores", log) + _numbers(r"(\d+) bytes spill loads", log)
    warnings = (line.strip() for line in log.splitlines() if re.search(r"\bwarning\b|\(C75\d\d\)", line, re.IGNORECASE))
    return CompileReport(
        registers=max(registers),
        spill_bytes=sum(spills),
        stack_bytes=max(_numbers(r"(\d+) bytes stack frame", log), default=0),
        smem_bytes=max(_numbers(r"(\d+) bytes smem", log), default=0),
        # The remark names the option that hides a warning and is none itself.
        warnings=tuple(line for line in warnings if not line.startswith("Remark:")),
    )


def _numbers(pattern: str, log: str) -> list[int]:
    return [int(number) for number in re.findall(pattern, log)]


def _nvrtc() -> Any:
    # The low-level binding: CuPy's own compile functions append an arch of their choice and ask for a device.
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()  # the library is only opened by its first call
    except (ImportError, OSError, RuntimeError) as error:
        raise CompileError(f"NVRTC was not found ({error}); it comes with {_INSTALL}") from error
    return nvrtc


def _check_supported(nvrtc: Any, arch: str) -> None:
    match = _ARCH.fullmatch(arch)
    supported = nvrtc.getSupportedArchs()
    if match is None or int(match[1]) not in supported:
        major, minor = nvrtc.getVersion()
        known = ", ".join(f"sm_{number}" for number in supported)
        raise CompileError(f"arch: NVRTC {major}.{minor} cannot compile for {arch}, it knows {known}; another one comes with {_INSTALL}")


def _complete_elf(cubin: bytes) -> bytes:
    # CuPy drops the last byte of the image as if it ended a string. The header tables say where the image really ends.
    if cubin[:5] != b"\x7fELF\x02":
        raise CompileError(f"NVRTC returned {len(cubin)} bytes that are not a 64-bit ELF image")
    table_offsets = struct.unpack_from("<QQ", cubin, 0x20)
    entry_sizes_and_counts = struct.unpack_from("<HHHH", cubin, 0x36)
    end = max(table_offsets[i] + entry_sizes_and_counts[2 * i] * entry_sizes_and_counts[2 * i + 1] for i in range(2))
    if not 0 <= end - len(cubin) <= 1:
        raise CompileError(f"NVRTC returned a cubin of {len(cubin)} bytes whose tables end at {end}")
    return cubin.ljust(end, b"\0")
