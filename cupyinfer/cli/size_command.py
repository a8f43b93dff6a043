# SPDX-License-Identifier: Apache-2.0
"""`cupyinfer size`: bytes of both workspaces for a batch, for every step of a trace, or for limits; no GPU is needed."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from cupyinfer.cli.arguments import add_model_arguments, add_profile_arguments, at_least, device_profile, lengths, model_shape
from cupyinfer.cli.output import Report, count, format_bytes, format_table, progress
from cupyinfer.cli.replay.batching import BatchingLimits, ContinuousBatching
from cupyinfer.cli.replay.trace import fit_trace, read_trace
from cupyinfer.cli.reserve import RESERVE
from cupyinfer.cli.sizing import SizingOptions, batch_limits, draft, regions
from cupyinfer.errors import ArgumentError
from cupyinfer.schedule.bounds import WorkspaceLimits, workspace_bound
from cupyinfer.schedule.profile import DeviceProfile
from cupyinfer.workspace import WorkspaceSize

_DESCRIPTION = """\
Say how many bytes the two workspaces of a wrapper need: the exact need of a batch, and a bound that suffices for every batch
within limits. Give one of

  a batch    cupyinfer size --kv-lens 1024,2048x3                         decode of four requests
             cupyinfer size --kv-lens 4096,512 --qo-lens 512x2            prefill of two requests
  limits     cupyinfer size --max-batch-size 256                          decode, every batch of up to 256 requests
             cupyinfer size --max-batch-size 64 --max-qo-tokens 8192      prefill
  a trace    cupyinfer size trace.csv --max-batch-size 128                every step of serving it, as `cupyinfer replay` does

The need depends on the GPU only through its architecture and number of SMs: --profile names one, --num-sms with --arch describes one.
"""
_CHUNK = 2048
_TRACE_BATCH = 128
_TRACE_PAGES = 16384


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the program's parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "size", help="bytes of both workspaces, for a named GPU, without one", description=_DESCRIPTION
    )
    parser.add_argument("trace", nargs="?", type=Path, metavar="TRACE", help="a request trace, as for `cupyinfer replay`")
    batch = parser.add_argument_group("batch")
    batch.add_argument("--kv-lens", type=lengths, metavar="LENGTHS", help="keys of each request, such as 1024,2048x3")
    batch.add_argument("--qo-lens", type=lengths, metavar="LENGTHS", help="query tokens of each request; makes it a prefill")
    limits = parser.add_argument_group("limits", "alone they give a bound; with a batch they widen its bound")
    limits.add_argument("--max-batch-size", type=at_least(0), metavar="N", help="requests of a batch")
    limits.add_argument("--max-qo-tokens", type=at_least(0), metavar="N", help="query tokens of a batch; makes it a prefill")
    limits.add_argument("--max-pages", type=at_least(0), metavar="N", help="page-table entries, where the int workspace holds them")
    limits.add_argument("--max-kv-len", type=at_least(0), metavar="N", help="keys of the longest request; for --fixed-split-size")
    trace = parser.add_argument_group("trace")
    trace.add_argument("--requests", type=at_least(1), default=1000, metavar="N", help="only the trace's first N requests (default: 1000)")
    trace.add_argument(
        "--num-pages", type=at_least(1), default=_TRACE_PAGES, metavar="N", help=f"pages of the cache (default: {_TRACE_PAGES})"
    )
    options = parser.add_argument_group("plan options")
    options.add_argument("--ragged", action="store_true", help="prefill over ragged keys instead of pages")
    options.add_argument("--no-causal", action="store_true", help="prefill queries see later keys too")
    options.add_argument("--kv-dtype", metavar="DTYPE", help="element type of the cache, such as float8_e4m3fn (default: --dtype)")
    options.add_argument("--fixed-split-size", type=at_least(1), metavar="N", help="pages (ragged: keys) per part")
    options.add_argument("--disable-split-kv", action="store_true", help="never divide a request's keys")
    options.add_argument("--cuda-graph", action="store_true", help="one size for every batch within the limits")
    options.add_argument(
        "--page-table", choices=("device", "host"), default="device", help="where plan gets its page ids; the int workspace holds host ones"
    )
    add_model_arguments(parser, wide_values=True)
    add_profile_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> Report:
    """Size whatever was given."""
    profile = device_profile(args)
    shape = model_shape(args)
    options = SizingOptions(
        shape,
        decode=args.qo_lens is None and args.max_qo_tokens is None,
        ragged=args.ragged,
        causal=not args.no_causal,
        kv_dtype=args.kv_dtype,
        fixed_split_size=args.fixed_split_size,
        disable_split_kv=args.disable_split_kv,
        cuda_graph=args.cuda_graph,
        host_pages=args.page_table == "host",
    )
    if args.trace is not None:
        if args.kv_lens is not None or args.qo_lens is not None:
            raise ArgumentError("TRACE: makes batches of its own, it goes with neither --kv-lens nor --qo-lens")
        if args.ragged or args.cuda_graph:
            raise ArgumentError("TRACE: sizes paged batches one by one, it goes with neither --ragged nor --cuda-graph")
        return _size_trace(args, options, profile)
    if options.decode and args.ragged:
        raise ArgumentError("--ragged: is for prefill; give --qo-lens or --max-qo-tokens")
    if args.kv_lens is not None:
        if not options.decode and args.qo_lens is None:
            raise ArgumentError("--max-qo-tokens: makes this a prefill, which needs --qo-lens beside --kv-lens")
        return _size_batch(args, options, profile)
    if args.qo_lens is not None:
        raise ArgumentError("--qo-lens: needs --kv-lens, the keys of each request")
    if args.max_batch_size is None:
        raise ArgumentError("size: needs a batch (--kv-lens), limits (--max-batch-size) or a trace; cupyinfer size --help explains")
    return _size_limits(args, options, profile)


def _widened(limits: WorkspaceLimits, args: argparse.Namespace) -> WorkspaceLimits:
    """The limits of a batch, with those given on the command line in their place.

    Raises:
        ArgumentError: a limit that the batch exceeds.
    """
    given = {}
    names = {
        "max_batch_size": "max_batch_size",
        "max_num_qo_tokens": "max_qo_tokens",
        "max_num_pages": "max_pages",
        "max_kv_len": "max_kv_len",
    }
    for field, argument in names.items():
        value, needed = getattr(args, argument), getattr(limits, field)
        if value is None or needed is None:
            continue
        if value < needed:
            raise ArgumentError(f"--{argument.replace('_', '-')}: got {value}, the batch needs {needed}")
        given[field] = value
    return replace(limits, **given)


def _size_batch(args: argparse.Namespace, options: SizingOptions, profile: DeviceProfile) -> Report:
    kv_lens, qo_lens = args.kv_lens, args.qo_lens
    if qo_lens is not None and len(qo_lens) != len(kv_lens):
        raise ArgumentError(f"--qo-lens: has {len(qo_lens)} requests, --kv-lens has {len(kv_lens)}")
    limits = _widened(batch_limits(options, kv_lens, qo_lens), args)
    drafted = draft(options, kv_lens, qo_lens, limits, profile, options.cuda_graph)
    exact, bound = drafted.size, workspace_bound(limits, profile)
    tokens = "" if qo_lens is None else f", {count(sum(qo_lens), 'query token')}"
    subject = f"{limits.kind} of {count(len(kv_lens), 'request')}{tokens}, {count(sum(kv_lens), 'key')}"
    data = _data(options, limits, profile) | {
        "exact": _size_data(exact),
        "bound": _size_data(bound),
        "regions": regions(drafted),
        "num_ctas": drafted.counts.num_ctas,
        "cta_tile_q": drafted.schedule.config.cta_tile_q,
    }
    rows = [("exact need", *exact), (f"bound for {_limits_text(limits)}", *bound)]
    return Report(data, _text(subject, options, profile, rows, data["regions"], "memory map of this batch"))


def _size_limits(args: argparse.Namespace, options: SizingOptions, profile: DeviceProfile) -> Report:
    limits = _widened(batch_limits(options, [], None if options.decode else []), args)
    if options.pages_in_workspace and args.max_pages is None:
        raise ArgumentError("--max-pages: is needed, since the int workspace holds the page table")
    if options.fixed_split_size is not None and args.max_kv_len is None:
        raise ArgumentError("--max-kv-len: is needed with --fixed-split-size, since parts follow from the longest request")
    bound = workspace_bound(limits, profile)
    largest = draft(options, [], None if options.decode else [], limits, profile, within_limits=True)
    data = _data(options, limits, profile) | {"bound": _size_data(bound), "regions": regions(largest)}
    rows = [("bound", *bound)]
    subject = f"every {limits.kind} of up to {_limits_text(limits)}"
    return Report(data, _text(subject, options, profile, rows, data["regions"], "memory map of a plan with room for these limits"))


def _size_trace(args: argparse.Namespace, options: SizingOptions, profile: DeviceProfile) -> Report:
    shape = options.shape
    serving = BatchingLimits(args.max_batch_size or _TRACE_BATCH, args.max_qo_tokens or _CHUNK, args.num_pages, shape.page_size)
    fitted = fit_trace(read_trace(args.trace, args.requests), serving.num_pages * serving.page_size, 1.0)
    sizes: dict[str, list[WorkspaceSize]] = {"prefill": [], "decode": []}
    by_kind = {"prefill": replace(options, decode=False), "decode": replace(options, decode=True)}
    most_pages = longest = 0
    with progress(sum(request.num_cached for request in fitted.requests), "sizing", "token") as advance:
        for step in ContinuousBatching(fitted.requests, serving).steps():
            for batch in (batch for batch in step if batch is not None):
                chosen, qo_lens = by_kind[batch.kind], None if batch.decode else batch.qo_len
                limits = batch_limits(chosen, batch.kv_len.tolist(), qo_lens)
                sizes[batch.kind].append(draft(chosen, batch.kv_len, qo_lens, limits, profile).size)
                most_pages, longest = max(most_pages, len(batch.page_indices)), max(longest, int(batch.kv_len.max()))
                advance(batch.num_tokens)
    data: dict[str, Any] = {"trace": str(args.trace), "requests": len(fitted.requests), "clipped_requests": fitted.num_clipped}
    data |= {"profile": asdict(profile), "model": asdict(shape), "limits": asdict(serving), "fixed_reserve": _size_data(RESERVE)}
    rows: list[tuple[str, int, int]] = []
    for kind, of_kind in sizes.items():
        if not of_kind:
            continue
        whole = replace(
            batch_limits(by_kind[kind], [], None if kind == "decode" else []),
            max_batch_size=serving.max_batch if kind == "decode" else min(serving.max_batch, serving.chunk),
            max_num_qo_tokens=None if kind == "decode" else serving.chunk,
            max_num_pages=serving.num_pages if options.pages_in_workspace else None,
            max_kv_len=longest,
        )
        bound = workspace_bound(whole, profile)
        median, p99, peak = (WorkspaceSize(*map(int, values)) for values in np.percentile(of_kind, (50, 99, 100), axis=0, method="higher"))
        named = {"median": median, "p99": p99, "peak": peak, "bound": bound}
        data[kind] = {"steps": len(of_kind), **{name: _size_data(size) for name, size in named.items()}}
        labels = {"median": "median step", "p99": "99th percentile", "peak": "largest", "bound": "bound for these limits"}
        rows += [(f"{kind}, {labels[name]}", *size) for name, size in named.items()]
    steps = {kind: count(len(of_kind), f"{kind} batch", f"{kind} batches") for kind, of_kind in sizes.items()}
    subject = (
        f"{count(len(fitted.requests), 'request')} of {args.trace.name}: {steps['prefill']} of up to {serving.chunk:,} tokens, "
        f"{steps['decode']} of up to {serving.max_batch:,} requests"
    )
    return Report(data, _text(subject, options, profile, rows, [], ""))


def _data(options: SizingOptions, limits: WorkspaceLimits, profile: DeviceProfile) -> dict[str, Any]:
    return {
        "kind": limits.kind,
        "profile": asdict(profile),
        "model": asdict(options.shape),
        "cuda_graph": options.cuda_graph,
        "limits": asdict(limits),
        "fixed_reserve": _size_data(RESERVE),
    }


def _size_data(size: WorkspaceSize) -> dict[str, int]:
    return {**size._asdict(), "total_bytes": size.total_bytes}


def _limits_text(limits: WorkspaceLimits) -> str:
    parts = [count(limits.max_batch_size, "request")]
    if limits.max_num_qo_tokens is not None:
        parts.append(count(limits.max_num_qo_tokens, "query token"))
    if limits.max_num_pages is not None:
        parts.append(count(limits.max_num_pages, "page"))
    if limits.fixed_split_size is not None:
        parts.append(f"{limits.max_kv_len:,} keys each")
    return ", ".join(parts)


def _text(
    subject: str, options: SizingOptions, profile: DeviceProfile, rows: list[tuple[str, int, int]], mapped: list[dict[str, Any]], title: str
) -> str:
    flags = [
        name for name, on in (("ragged", options.ragged), ("CUDA graph", options.cuda_graph), ("no split", options.disable_split_kv)) if on
    ]
    flags += [f"fixed split of {options.fixed_split_size}"] if options.fixed_split_size else []
    flags += [f"{options.kv_dtype} cache"] if options.kv_dtype else []
    lines = [
        f"Workspaces of {subject}" if not subject.startswith("every") else f"Workspaces that suffice for {subject}",
        f"  GPU           {profile.name}: {profile.num_sms} SMs, {profile.arch}",
        f"  model         {options.shape}" + "".join(f", {flag}" for flag in flags),
        "",
        format_table(
            ("bytes", "float", "int", "total"), [(*row, format_bytes(row[1] + row[2])) for row in (*rows, ("fixed reserve", *RESERVE))]
        ),
    ]
    if mapped:
        table = [(region["workspace"], region["name"], region["offset"], region["bytes"]) for region in mapped]
        lines += ["", title, format_table(("workspace", "region", "offset", "bytes"), table)]
    return "\n".join(lines)
