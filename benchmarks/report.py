# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.report results.json``: the Markdown tables of a run, printed or written into a README between its marks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.results import Results, Row

BEGIN, END = "<!-- results -->", "<!-- end of results -->"
_HEAD = ("case", "variant", "us", "rate", "of ceiling", "best peer, us", "time ratio", "plan, us", "run, CPU us", "workspace", "error")


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _bytes(row: Row) -> str:
    return "" if row.float_bytes is None else f"{row.float_bytes} + {row.int_bytes}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _ours(row: Row, best: Row | None) -> str:
    if row.failure:
        return _line([row.label, row.variant, row.failure.replace("|", "/"), *[""] * (len(_HEAD) - 3)])
    rate = f"{_number(row.rate, 2 if row.kind == 'decode' else 0)} {row.unit}"
    peer = "" if best is None else f"{best.variant} {_number(best.us)}"
    share = "" if row.share is None else f"{100 * row.share:.0f}%"
    ratio = "" if row.ratio_to_best_peer is None else f"{row.ratio_to_best_peer:.3f}"
    error = "" if row.relative_error is None else f"{row.relative_error:.1e}" + (" wrong" if row.wrong else "")
    host = [_number(row.plan_us, 0), _number(row.run_us, 0)]
    return _line([row.label, row.variant, _number(row.us), rate, share, peer, ratio, *host, _bytes(row), error])


def _all_variants(results: Results, kind: str) -> list[str]:
    """A matrix of case against variant: microseconds, each with the host time and workspace its README reader may want."""
    variants = list(dict.fromkeys(row.variant for row in results.rows if row.kind == kind))
    lines = [_line(["us", *variants]), _line(["---", *["---:"] * len(variants)])]
    for case in results.case_names(kind):
        rows = {row.variant: row for row in results.of_case(case)}
        fastest = min((row.us for row in rows.values() if row.us is not None), default=None)
        cells = []
        for variant in variants:
            row = rows.get(variant)
            text = "" if row is None else "failed" if row.us is None else _number(row.us)
            cells.append(f"**{text}**" if row is not None and row.us is not None and row.us == fastest else text)
        lines.append(_line([next(iter(rows.values())).label, *cells]))
    return lines


def _peer_costs(results: Results, kind: str) -> list[str]:
    """Host times and workspaces of the peers, where they can tell."""
    rows = [row for row in results.rows if row.kind == kind and not row.ours and row.plan_us is not None]
    if not rows:
        return []
    lines = [_line(["case", "peer", "plan, us", "run, CPU us", "workspace, bytes"]), _line(["---", "---", "---:", "---:", "---:"])]
    lines += [_line([row.label, row.variant, _number(row.plan_us, 0), _number(row.run_us, 0), _bytes(row)]) for row in rows]
    return lines


def _environment(results: Results) -> str:
    env = results.environment
    gpu = env.get("gpu", {})
    parts = [gpu.get("name", "unknown GPU"), *(f"{name} {version}" for name, version in env.get("versions", {}).items())]
    parts.append(f"commit {env.get('commit') or 'unknown'}")
    return ", ".join(parts) + f". Medians of {env.get('repeats', '?')} interleaved rounds."


def markdown(results: Results) -> str:
    """Tables of everything in the run."""
    blocks = [_environment(results)]
    for kind, title in (("decode", "Decode"), ("prefill", "Prefill")):
        cases = results.case_names(kind)
        if not cases:
            continue
        lines = [_line(_HEAD), _line(["---", "---", *["---:"] * (len(_HEAD) - 2)])]
        for case in cases:
            rows = results.of_case(case)
            best = next((row for row in rows if row.variant == row.best_peer), None)
            lines += [_ours(row, best) for row in rows if row.ours]
        blocks += [f"### {title}", "\n".join(lines), f"Every variant, {title.lower()}:", "\n".join(_all_variants(results, kind))]
        costs = _peer_costs(results, kind)
        if costs:
            blocks += [f"What the peers cost besides, {title.lower()}:", "\n".join(costs)]
    if results.missing_peers:
        blocks.append("Not measured: " + "; ".join(f"{name} ({reason})" for name, reason in results.missing_peers.items()) + ".")
    if results.skipped_cases:
        blocks.append(f"Out of time for: {'; '.join(results.skipped_cases)}.")
    return "\n\n".join(blocks) + "\n"


def write_between_marks(path: Path, text: str) -> None:
    """Replace what stands between the two marks of a file.

    Raises:
        ValueError: the file lacks a mark.
    """
    old = path.read_text(encoding="utf-8")
    head, begin, rest = old.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path}: needs the lines {BEGIN} and {END}")
    path.write_text(f"{head}{BEGIN}\n{text}{END}{tail}", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("results", type=Path, help="JSON that benchmarks.run wrote")
    parser.add_argument("--write", type=Path, help="README to write the tables into")
    parser.add_argument("--plot", type=Path, help="PNG to draw")
    args = parser.parse_args(argv)
    results = Results.load(args.results)
    if args.plot:
        from benchmarks.plot import draw

        draw(results, args.plot)
    if args.write:
        write_between_marks(args.write, markdown(results))
    else:
        print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
