# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.run``: cupyinfer and every peer that is installed, on the named cases, in one process."""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cases import CASES, Case, select, trace_case
from benchmarks.results import Results, Row, commit, fill_ratios, gpu, versions
from benchmarks.variant import Adapter, Prepared

_TRACE_BATCHES = (64, 256)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    tags = sorted({tag for case in CASES for tag in case.tags} | {"trace"})
    parser.add_argument("--tags", nargs="+", default=[], choices=tags, help="only cases with one of these tags")
    parser.add_argument("--case", nargs="+", default=[], help="only cases whose name contains one of these")
    parser.add_argument("--trace", type=Path, help="request trace CSV (TIMESTAMP, ContextTokens, GeneratedTokens): adds its decode mixes")
    parser.add_argument("--variants", nargs="+", default=[], help="only variants whose name contains one of these")
    parser.add_argument("--no-peers", action="store_true", help="measure cupyinfer alone, against the ceilings")
    parser.add_argument("--backend", default="auto", help="backend of cupyinfer (default: auto)")
    parser.add_argument("--repeats", type=int, default=31, help="timed rounds per case (default: 31)")
    parser.add_argument("--seconds-budget", type=float, help="start no further case after this many seconds")
    parser.add_argument("--out", type=Path, default=Path("results.json"), help="JSON, rewritten after every case (default: results.json)")
    parser.add_argument("--plot", type=Path, help="PNG of share of ceiling per case")
    parser.add_argument("--commit", help="commit to record where the files are no checkout")
    parser.add_argument("--no-check", action="store_true", help="skip the sampled float64 check")
    parser.add_argument("--list", action="store_true", help="print the selected cases and stop")
    return parser.parse_args(argv)


def chosen_cases(args: argparse.Namespace) -> list[Case]:
    """The cases the command line asks for."""
    cases = [*CASES, *([trace_case(args.trace, batch) for batch in _TRACE_BATCHES] if args.trace else [])]
    return select(cases, args.tags, args.case)


def chosen_adapters(args: argparse.Namespace, results: Results) -> list[Adapter]:
    """Ours, and the peers that are installed; the others go on record as missing."""
    from benchmarks import ours, peers

    adapters = list(ours.adapters(args.backend))
    for peer in () if args.no_peers else peers.PEERS:
        if peer.missing is None:
            adapters.append(peer)
        else:
            results.missing_peers[peer.name] = peer.missing
    return [adapter for adapter in adapters if not args.variants or any(part in adapter.name for part in args.variants)]


def is_ours(name: str) -> bool:
    """Whether a variant is cupyinfer."""
    return name.startswith("cupyinfer")


def measure_case(case: Case, adapters: Sequence[Adapter], bench: object, repeats: int, check: bool) -> list[Row]:
    """All variants of one case, prepared, checked and timed together."""
    from benchmarks.check import relative_error
    from benchmarks.data import CaseData
    from benchmarks.timing import Bench

    assert isinstance(bench, Bench)
    data = CaseData(case)
    rows: dict[str, Row] = {}
    prepared: list[Prepared] = []
    for adapter in adapters:
        if not adapter.supports(case):
            continue
        fp8_queries = case.q_dtype != "bfloat16"
        row = rows[adapter.name] = Row(case.name, case.label, case.kind, adapter.name, is_ours(adapter.name), fp8_queries=fp8_queries)
        try:
            variant = adapter.prepare(data)
            variant.launch()
            bench.stream.synchronize()
            row.float_bytes, row.int_bytes = variant.float_bytes, variant.int_bytes
            row.relative_error = relative_error(data, variant.output()) if check else None
            row.plan_us = bench.host_time(variant.plan).median if variant.plan else None
            row.run_us = None if variant.self_timed else bench.host_time(variant.launch).median
            prepared.append(variant)
        except Exception as error:  # one variant must not cost the others their figures; the row says what happened
            row.failure = f"{type(error).__name__}: {error}"[:500]
            traceback.print_exc(limit=8)
    if case.kind == "decode":
        stream = Prepared("read-only stream", bench.stream_launch(case.kv_bytes), lambda: None)
        samples = bench.interleaved([stream, *prepared], repeats)
        work, ceiling = case.kv_bytes / 1e6, case.kv_bytes / 1e6 / samples.pop(stream.name).median
    else:
        samples = bench.interleaved(prepared, repeats)
        work, ceiling = case.flops / 1e6, bench.matmul_tflops()
    for name, sample in samples.items():
        row = rows[name]
        row.us, row.us_min, row.us_max = sample.median, sample.low, sample.high
        row.rate, row.ceiling = work / sample.median, ceiling
        row.share = row.rate / ceiling
    fill_ratios(list(rows.values()))
    return list(rows.values())


def release_memory() -> None:
    """Hand the last case's arrays back, from every allocator that took part."""
    import cupy

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    with contextlib.suppress(ImportError):
        import torch

        torch.cuda.empty_cache()


def describe(row: Row) -> str:
    """One line for the terminal."""
    if row.us is None:
        return f"  {row.variant:24s} {row.failure}"
    error = "" if row.relative_error is None else f"  error {row.relative_error:.1e}{' WRONG' if row.wrong else ''}"
    ratio = "" if row.ratio_to_best_peer is None else f"  {row.ratio_to_best_peer:.3f} of best peer"
    host = "".join(f"  {name} {value:.0f} us" for name, value in (("plan", row.plan_us), ("run", row.run_us)) if value is not None)
    return f"  {row.variant:24s} {row.us:9.1f} us  {row.rate:7.2f} {row.unit}  {100 * (row.share or 0):5.1f}%{ratio}{host}{error}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parse(argv)
    cases = chosen_cases(args)
    if args.list or not cases:
        print("\n".join(f"{case.name}  [{' '.join(sorted(case.tags))}]" for case in cases) or "no case matches")
        return 0 if cases else 2
    from benchmarks.timing import Bench

    started = time.monotonic()
    results = Results({"gpu": gpu(), "versions": versions(), "commit": args.commit or commit(), "repeats": args.repeats})
    adapters = chosen_adapters(args, results)
    for name, reason in results.missing_peers.items():
        print(f"without {name}: {reason}")
    with Bench() as bench:
        for number, case in enumerate(cases, start=1):
            if args.seconds_budget and time.monotonic() - started > args.seconds_budget:
                results.skipped_cases.append(case.name)
                continue
            print(f"[{number}/{len(cases)}, {time.monotonic() - started:.0f} s] {case.name}", flush=True)
            rows = measure_case(case, adapters, bench, args.repeats, not args.no_check)
            results.rows += rows
            results.save(args.out)
            print("\n".join(describe(row) for row in rows), flush=True)
            release_memory()
    results.environment["seconds"] = round(time.monotonic() - started, 1)
    results.save(args.out)
    if args.plot:
        from benchmarks.plot import draw

        draw(results, args.plot)
    if results.skipped_cases:
        print(f"out of time for {len(results.skipped_cases)} cases")
    return 1 if any(row.ours and (row.failure or row.wrong) for row in results.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
