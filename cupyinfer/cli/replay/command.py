# SPDX-License-Identifier: Apache-2.0
"""`cupyinfer replay`: its arguments, and their defaults with and without a GPU."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cupyinfer.attention.backend_choice import fa3_problem
from cupyinfer.backends.device import has_gpu
from cupyinfer.cli.arguments import REAL_MODEL, ModelShape, add_model_arguments, at_least, model_shape
from cupyinfer.cli.output import Report, progress
from cupyinfer.cli.replay.batching import BatchingLimits
from cupyinfer.cli.replay.memory import GpuMemory, HostMemory, Memory
from cupyinfer.cli.replay.session import ReplayConfig, ReplaySession
from cupyinfer.cli.replay.summary import replay_report
from cupyinfer.cli.replay.trace import fit_trace, read_trace
from cupyinfer.errors import BackendUnavailable, CompileError
from cupyinfer.jit.ahead import compile_variants
from cupyinfer.jit.variant import HelperVariant, KernelVariant
from cupyinfer.schedule.tiles import CTA_TILE_Q, max_tile_q

_DESCRIPTION = """\
Serve the requests of a trace: continuous batching with chunked prefill over a paged KV cache. Every step appends its keys and
values, asks for its workspace sizes, allocates exactly those between guard bytes, plans and runs prefill and decode; sampled
steps are compared with attention in float64, and must be refused one byte less. All requests wait from the start, in order of
arrival, so that batches are full.

  cupyinfer replay tests/data/small_trace.csv
  cupyinfer replay azure_llm_2023_conv.csv --requests 500 --json > result.json
  cupyinfer replay mooncake.jsonl --max-batch 64 --num-pages 4096 --head-dim 256

TRACE is CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens, or Mooncake JSON lines with timestamp, input_length
and output_length. With a GPU the defaults are a real model's shape; without one the NumPy backend runs a small shape, and
lengths are scaled down until the longest request fits --max-context.

Exit code 1 when a row is beyond its tolerance, a workspace was not exact, or a guard byte changed.
"""


@dataclass(frozen=True)
class ReplayDefaults:
    """What a backend replays unless told otherwise.

    Attributes:
        shape: the model.
        max_batch: requests at once.
        chunk: prompt tokens of a step.
        max_context: tokens of the longest request.
        num_pages: pages of the cache.
        check_every: steps between checks.
        scale: factor of all lengths, None for what lets the longest request fit.
    """

    shape: ModelShape
    max_batch: int
    chunk: int
    max_context: int
    num_pages: int
    check_every: int
    scale: float | None


_DEFAULTS = {
    "host": ReplayDefaults(ModelShape(4, 2, 64, "float16", 16), 32, 128, 512, 1024, 4, None),
    "gpu": ReplayDefaults(REAL_MODEL, 128, 2048, 32768, 16384, 8, 1.0),
}


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the program's parser."""
    host, gpu = _DEFAULTS["host"], _DEFAULTS["gpu"]
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay", help="serve a request trace, sized exactly and checked", description=_DESCRIPTION
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="CSV or JSON lines file")
    parser.add_argument(
        "--backend",
        choices=("auto", "host", "fa2", "fa3"),
        default="auto",
        help="auto is the fastest for each plan with a GPU, else host; fa3 is for the prefill steps, on Hopper",
    )
    parser.add_argument("--requests", type=at_least(1), metavar="N", help="only the first N requests")
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of all values, page orders and samples (default: 0)")
    for name, field, text in (
        ("--max-batch", "max_batch", "requests in the cache at once"),
        ("--chunk", "chunk", "prompt tokens of one step"),
        ("--max-context", "max_context", "tokens of the longest request; longer ones are clipped"),
        ("--num-pages", "num_pages", "pages of the cache"),
        ("--check-every", "check_every", "check every N-th step against float64"),
    ):
        default = f" (default: {getattr(gpu, field)} on a GPU, {getattr(host, field)} without)"
        parser.add_argument(name, type=at_least(1), metavar="N", help=text + default)
    parser.add_argument(
        "--scale-lengths",
        type=_scale,
        metavar="FACTOR",
        help="factor of all lengths (default: 1 on a GPU, what fits --max-context without)",
    )
    add_model_arguments(parser, f"with a GPU by default {gpu.shape}; without {host.shape}")
    return parser


def run(args: argparse.Namespace) -> Report:
    """Replay the trace with a progress bar."""
    requests = read_trace(args.trace, args.requests)
    memory = _memory(args.backend)
    defaults = _DEFAULTS["host" if memory.backend == "host" else "gpu"]
    given = {name: getattr(args, name) for name in ("max_batch", "chunk", "max_context", "num_pages", "check_every")}
    chosen = replace(defaults, **{name: value for name, value in given.items() if value is not None})
    shape = model_shape(args, defaults.shape)
    limits = BatchingLimits(chosen.max_batch, chosen.chunk, chosen.num_pages, shape.page_size)
    longest = min(chosen.max_context, limits.num_pages * limits.page_size)
    fitted = fit_trace(requests, longest, defaults.scale if args.scale_lengths is None else args.scale_lengths)
    config = ReplayConfig(shape, limits, chosen.check_every, args.seed)
    if memory.backend != "host":
        _compile(shape, memory)
    session = ReplaySession(fitted.requests, config, memory)
    total = sum(request.num_cached for request in fitted.requests)
    with progress(total, "replaying", "token") as advance:
        stats = session.run(advance)
    return replay_report(args.trace, fitted, config, memory.profile, memory.backend, stats)


def _scale(text: str) -> float:
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not 0 < scale <= 1000:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a factor above 0")
    return scale


def _memory(backend: str) -> Memory:
    if backend == "host" or (backend == "auto" and not has_gpu()):
        return HostMemory()
    if not has_gpu():
        raise BackendUnavailable(f"--backend {backend}: no CUDA GPU is visible through CuPy (cupyinfer info says more)")
    return GpuMemory(backend)


def _kernels(shape: ModelShape, memory: Memory) -> set[KernelVariant]:
    """The kernels that plans of this replay may take."""
    decode, prefill = shape.options(decode=True), shape.options(decode=False, causal=True)
    variants: set[KernelVariant] = {
        decode.variant(16 if shape.num_qo_heads // shape.num_kv_heads <= 16 else 64, False),
        HelperVariant("append_paged_kv_cache"),
    }
    if memory.backend != "fa3":
        variants |= {prefill.variant(tile_q, False) for tile_q in CTA_TILE_Q if tile_q <= max_tile_q(shape.head_dim)}
    if memory.backend != "fa2" and fa3_problem(prefill, memory.profile.arch, False) is None:
        fa3 = prefill.fa3_shape
        for tile_q in fa3.possible_tile_qs:
            variants |= {prefill.variant(tile_q, False, "fa3", kv_tile) for kv_tile in fa3.kv_tiles(tile_q)}
    return variants


def _compile(shape: ModelShape, memory: Memory) -> None:
    """Have the kernels of this replay in the cache, so that plan times are those of a warm start."""
    variants = _kernels(shape, memory)
    with progress(len(variants), "compiling", "kernel") as advance:
        outcomes = compile_variants(variants, [memory.profile.arch], lambda outcome, done, of: advance(1))
    for outcome in outcomes:
        if outcome.error is not None:
            raise CompileError(f"{outcome.variant} for {outcome.arch}: {outcome.error}")
