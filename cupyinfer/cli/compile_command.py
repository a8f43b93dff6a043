# SPDX-License-Identifier: Apache-2.0
"""`cupyinfer compile`: fill the kernel cache ahead of time, with no GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from cupyinfer.cli.arguments import at_least
from cupyinfer.cli.output import Report, count, format_table, progress
from cupyinfer.dtypes import HALF_TYPES, canonical_dtype
from cupyinfer.errors import ArgumentError
from cupyinfer.jit.ahead import CompileOutcome, compile_variants, fa3_variants, standard_variants
from cupyinfer.jit.cache import cache_directory
from cupyinfer.jit.variant import AttentionVariant, KernelVariant
from cupyinfer.schedule.profile import ARCHS, profile_for_arch
from cupyinfer.schedule.tiles import FA3_ARCH

_DESCRIPTION = """\
Compile the standard kernels into the cache with NVRTC. It needs the NVRTC wheel, but no GPU and no CUDA toolkit, so an image
can be built with warm kernels anywhere. Set CUPYINFER_CACHE_DIR to choose where they go.

  cupyinfer compile --arch sm_90a                           the standard kernels for H100 and H200, fa3 among them
  cupyinfer compile --arch sm_80 sm_89 --head-dim 128 --dtype bfloat16
  cupyinfer compile --kernel q16 --jobs 1                   only 16-row tiles, for every arch, in this process

Exit code 1 when a kernel failed, spills registers or could not be written to the cache.
"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the program's parser."""
    parser: argparse.ArgumentParser = commands.add_parser("compile", help="fill the kernel cache, with no GPU", description=_DESCRIPTION)
    parser.add_argument("--arch", nargs="+", metavar="ARCH", default=list(ARCHS), help=f"any of {', '.join(ARCHS)} (default: all)")
    parser.add_argument("--head-dim", nargs="+", type=at_least(1), metavar="N", help="only attention kernels of these widths")
    parser.add_argument("--dtype", nargs="+", metavar="DTYPE", help="only attention kernels with outputs of these types: float16, bfloat16")
    parser.add_argument("--kernel", metavar="TEXT", help="only kernels whose name holds this text, such as q16, paged or append")
    parser.add_argument("--jobs", type=at_least(1), metavar="N", help="compiling processes (default: one per CPU)")
    return parser


def run(args: argparse.Namespace) -> Report:
    """Compile, with a bar per kernel."""
    archs = list(dict.fromkeys(args.arch))
    for arch in archs:
        profile_for_arch(arch)
    # fa3 kernels exist for one arch alone.
    here = [arch for arch in archs if arch == FA3_ARCH]
    everywhere, hopper = _selected(args, [*standard_variants(), *(fa3_variants() if here else ())])
    outcomes: list[CompileOutcome] = []
    with progress(len(everywhere) * len(archs) + len(hopper), "compiling", "kernel") as advance:
        for variants, targets in ((everywhere, archs), (hopper, here)):
            if variants:
                outcomes += compile_variants(variants, targets, lambda outcome, done, of: advance(1), args.jobs)
    return _report(outcomes)


def _selected(args: argparse.Namespace, standard: Sequence[KernelVariant]) -> tuple[list[KernelVariant], list[KernelVariant]]:
    """Those of `standard` that the arguments name: kernels of every arch, and those of FA3_ARCH alone."""
    dtypes = None if args.dtype is None else {canonical_dtype(dtype, "--dtype", HALF_TYPES) for dtype in args.dtype}
    attention = [variant for variant in standard if isinstance(variant, AttentionVariant)]
    known = sorted({variant.head_dim_qk for variant in attention})
    for head_dim in args.head_dim or ():
        if head_dim not in known:
            raise ArgumentError(f"--head-dim: got {head_dim}, standard kernels have {', '.join(map(str, known))}")
    selected = []
    for variant in standard:
        if isinstance(variant, AttentionVariant):
            if args.head_dim is not None and variant.head_dim_qk not in args.head_dim:
                continue
            if dtypes is not None and variant.o_dtype not in dtypes:
                continue
        if args.kernel is None or args.kernel in str(variant):
            selected.append(variant)
    if not selected:
        names = ", ".join(str(variant) for variant in standard)
        raise ArgumentError(f"--head-dim, --dtype, --kernel: no standard kernel fits all of them; there are {names}")
    hopper: list[KernelVariant] = [variant for variant in selected if isinstance(variant, AttentionVariant) and variant.backend == "fa3"]
    return [variant for variant in selected if variant not in hopper], hopper


def _failed(outcome: CompileOutcome) -> bool:
    return outcome.report is None or outcome.report.spill_bytes > 0 or outcome.not_kept is not None


def _report(outcomes: Sequence[CompileOutcome]) -> Report:
    data, rows = [], []
    for outcome in outcomes:
        report = outcome.report
        data.append(
            {
                "variant": str(outcome.variant),
                "arch": outcome.arch,
                "registers": None if report is None else report.registers,
                "spill_bytes": None if report is None else report.spill_bytes,
                "seconds": round(outcome.seconds, 3),
                "cached": not outcome.compiled and outcome.error is None,
                "error": outcome.error,
                "not_kept": outcome.not_kept,
            }
        )
        measured = ("failed", "") if report is None else (str(report.registers), f"{report.spill_bytes:,} B")
        cached = "yes" if data[-1]["cached"] else "no"
        rows.append((str(outcome.variant), outcome.arch, *measured, f"{outcome.seconds:.2f}", cached))
    failed = [outcome for outcome in outcomes if outcome.report is None]
    spilled = [outcome for outcome in outcomes if outcome.report is not None and outcome.report.spill_bytes]
    lines = [format_table(("kernel", "arch", "registers", "spilled", "seconds", "cached"), rows, indent=""), ""]
    lines += [f"{outcome.variant} for {outcome.arch} failed: {outcome.error}" for outcome in failed]
    lines += [f"{outcome.variant} for {outcome.arch} spills {outcome.report.spill_bytes} bytes" for outcome in spilled if outcome.report]
    unkept = [outcome for outcome in outcomes if outcome.not_kept is not None]
    # One reason stands for all: what keeps a directory from being written is the same for every kernel.
    lines += [f"{count(len(unkept), 'kernel')} compiled but not kept: {outcome.not_kept}" for outcome in unkept[:1]]
    compiled = sum(outcome.compiled for outcome in outcomes)
    directory = cache_directory()
    lines.append(
        f"{count(len(outcomes), 'kernel')}: {compiled} compiled, {sum(entry['cached'] is True for entry in data)} cached, "
        f"{len(failed)} failed, {len(spilled)} with spills, {len(unkept)} not kept; cache {directory or 'in memory only'}"
    )
    summary = {
        "cache_directory": str(directory) if directory else None,
        "failed": len(failed),
        "spilled": len(spilled),
        "not_kept": len(unkept),
        "kernels": data,
    }
    return Report(summary, "\n".join(lines), int(any(_failed(outcome) for outcome in outcomes)))
