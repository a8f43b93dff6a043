# SPDX-License-Identifier: Apache-2.0
"""One self-contained CUDA text per kernel: generated constants, then the kernel file with our own headers expanded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cupyinfer.errors import CompileError
from cupyinfer.jit.variant import AttentionVariant, HelperVariant, KernelVariant
from cupyinfer.schedule.profile import DeviceProfile
from cupyinfer.schedule.tiles import TileConfig

_ELEMENT = {"float16": "kFloat16", "bfloat16": "kBfloat16", "float8_e4m3fn": "kE4m3", "float8_e5m2": "kE5m2"}
_POS_ENCODING = {"NONE": "kNone", "ROPE_LLAMA": "kRopeLlama", "ALIBI": "kAlibi"}
_ELEMENT_ENUM = "enum class Element { kFloat16, kBfloat16, kE4m3, kE5m2 };"

_DIRECTIVE = re.compile(r"\s*#\s*(\w+)(.*)")
_OWN_HEADER = re.compile(r'\s*"([^"]+)"\s*(?://.*)?')


@dataclass(frozen=True)
class KernelSource:
    """A kernel as NVRTC sees it. Every kernel family ends up as one of these.

    Attributes:
        name: readable name, used in messages and file names; not part of the cache key.
        text: the whole translation unit; it includes nothing.
        entry: the ``extern "C"`` name of the kernel.
        smem_bytes: most dynamic shared memory a launch asks for.
    """

    name: str
    text: str
    entry: str
    smem_bytes: int = 0


def kernels_dir() -> Path:
    """The folder of CUDA sources: inside the package in a wheel, beside it in a checkout or an editable install.

    Raises:
        CompileError: neither exists, so the installation is broken.
    """
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "kernels_cu", package.parent / "kernels_cu"):
        if (candidate / "params.cuh").is_file():
            return candidate
    raise CompileError("the CUDA sources (kernels_cu) are missing from this installation of cupyinfer; reinstall it")


def kernel_source(variant: KernelVariant, profile: DeviceProfile, root: Path | None = None) -> KernelSource:
    """Assemble the source of any variant for a GPU.

    Args:
        variant: which kernel.
        profile: the GPU; tile shapes depend on its shared memory.
        root: folder of CUDA sources, by default `kernels_dir()`.

    Raises:
        UnsupportedError: the kernel does not fit the shared memory.
        CompileError: a source file is missing or includes something that is not ours.
    """
    if isinstance(variant, AttentionVariant):
        return attention_source(variant, variant.tile_config(profile.smem_per_sm, profile.smem_per_cta), root)
    return helper_source(variant, root)


def attention_source(variant: AttentionVariant, config: TileConfig, root: Path | None = None) -> KernelSource:
    """Assemble the source of one attention kernel with that tile shape."""
    kernel = "kernels/fa2_decode.cuh" if variant.cta_tile_q == 16 else f"kernels/{variant.backend}_prefill.cuh"
    constants = attention_constants(variant, config)
    if variant.user is not None:
        constants += expand_headers(kernels_dir() if root is None else root, "tile/user_element.cuh") + variant.user.source()
    return assemble(str(variant), constants, kernel, "attention", config.smem_bytes, root)


def helper_source(variant: HelperVariant, root: Path | None = None) -> KernelSource:
    """Assemble the source of one of the kernels around attention."""
    # Their text does not depend on the cache's element type, but headers they share with attention kernels name it.
    constants = f"{_ELEMENT_ENUM}\nconstexpr Element kKvElement = Element::kBfloat16;\n"
    return assemble(str(variant), constants, f"kernels/{variant.kernel}.cuh", variant.kernel, 0, root)


def attention_constants(variant: AttentionVariant, config: TileConfig) -> str:
    """The compile-time constants every attention kernel relies on."""
    lines = (
        _ELEMENT_ENUM,
        f"constexpr Element kQElement = Element::{_ELEMENT[variant.q_dtype]};",
        f"constexpr Element kOElement = Element::{_ELEMENT[variant.o_dtype]};",
        f"constexpr Element kKvElement = Element::{_ELEMENT[variant.kv_dtype]};",
        f"constexpr int kHeadDimQk = {variant.head_dim_qk}, kHeadDimVo = {variant.head_dim_vo};",
        f"constexpr int kCtaTileQ = {config.cta_tile_q}, kKvTile = {config.kv_tile}, "
        f"kNumWarps = {config.num_warps}, kNumStages = {config.num_stages}, kJoinSlots = {config.join_slots}, "
        f"kBlockKeys = {config.block_keys}, kCtasPerSm = {config.ctas_per_sm};",
        f"constexpr int kSmemBytes = {config.smem_bytes};",
        f"constexpr bool kPaged = {_bool(variant.paged)}, kCustomMask = {_bool(variant.custom_mask)}, "
        f"kSoftCap = {_bool(variant.soft_cap)};",
        "enum class PosEncoding { kNone, kRopeLlama, kAlibi };",
        f"constexpr PosEncoding kPosEncoding = PosEncoding::{_POS_ENCODING[variant.pos_encoding]};",
    )
    return "\n".join(lines) + "\n"


def assemble(name: str, constants: str, kernel: str, entry: str, smem_bytes: int = 0, root: Path | None = None) -> KernelSource:
    """Put constants in front of a kernel file with its headers expanded.

    ``#line`` directives keep NVRTC's messages pointing at the right file, by its name relative to `root`, so equal
    sources in different checkouts give equal text.

    Args:
        name: readable name of the kernel.
        constants: CUDA text that the kernel file relies on.
        kernel: path of the kernel file relative to `root`.
        entry: ``extern "C"`` name of the kernel.
        smem_bytes: most dynamic shared memory a launch asks for.
        root: folder of CUDA sources, by default `kernels_dir()`.
    """
    text = f'#line 1 "constants of {name}"\n{constants}' + expand_headers(kernels_dir() if root is None else root, kernel)
    return KernelSource(name, text, entry, smem_bytes)


def expand_headers(root: Path, relative: str) -> str:
    """The text of a file under `root` with each header it reaches expanded once, where it is first included.

    Raises:
        CompileError: a file is missing, an include is a cycle, conditional, or not a header under `root`.
    """
    out: list[str] = []
    _expand(root, relative, "", (), set(), out)
    return "\n".join(out) + "\n"


def _expand(root: Path, relative: str, included_at: str, chain: tuple[str, ...], seen: set[str], out: list[str]) -> None:
    try:
        lines = (root / relative).read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CompileError(f"{included_at}{relative} cannot be read from the CUDA sources: {error.__class__.__name__}") from error
    seen.add(relative)
    chain = (*chain, relative)
    out.append(f'#line 1 "{relative}"')
    conditions = 0
    for number, line in enumerate(lines, start=1):
        match = _DIRECTIVE.match(line)
        directive = match[1] if match else ""
        conditions += directive.startswith("if")
        conditions -= directive == "endif"
        if match and directive == "pragma" and match[2].split() == ["once"]:
            out.append("")  # every header is expanded once anyway, and NVRTC warns about it in a main file
        elif match and directive.startswith(("include", "import", "embed")):
            at = f"{relative}:{number}: "
            header = _own_header(root, match, at)
            if conditions:
                # A header is expanded once: dropped by one condition, it would be missing everywhere else.
                raise CompileError(f"{at}{header} is included inside #if; headers use #pragma once and are included unconditionally")
            if header in chain:
                raise CompileError(f"{at}include cycle {' -> '.join((*chain[chain.index(header) :], header))}")
            if header in seen:
                out.append("")
            else:
                _expand(root, header, at, chain, seen, out)
                out.append(f'#line {number + 1} "{relative}"')
        else:
            out.append(line)


def _own_header(root: Path, match: re.Match[str], at: str) -> str:
    quoted = _OWN_HEADER.fullmatch(match[2]) if match[1] == "include" else None
    path = PurePosixPath(quoted[1]) if quoted else PurePosixPath()
    if quoted is None or path.is_absolute() or ".." in path.parts or quoted[1] != path.as_posix() or not (root / path).is_file():
        raise CompileError(
            f'{at}#{match[1]}{match[2]} is refused: kernels may only include "..." of headers under kernels_cu, named from there'
        )
    return path.as_posix()


def _bool(value: bool) -> str:
    return "true" if value else "false"
