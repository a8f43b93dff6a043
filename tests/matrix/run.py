# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.matrix.run`: compile what the matrix needs, run its cells on many processes, write the report."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Before NumPy is imported, here and in the processes: its threads would get in each other's way.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("CUPYINFER_CACHE_DIR", str(Path(__file__).resolve().parents[2] / ".cache" / "kernels"))

from cupyinfer.jit.ahead import CompileOutcome, compile_variants
from cupyinfer.jit.variant import KernelVariant
from cupyinfer.schedule.tiles import FA3_ARCH
from tests.matrix.axes import BACKENDS
from tests.matrix.cells import Cell, kernels_of, matrix_cells
from tests.matrix.pool import run_cells
from tests.matrix.report import ROOT, Log, fingerprint, make_report

FAILED, UNFINISHED = 1, 3


class _TimeUp(Exception):
    """The seconds of --seconds have passed while kernels were compiled."""


class Progress:
    """One line that counts: redrawn on a terminal, elsewhere printed every few seconds."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._begin, self._shown = what, total, time.monotonic(), 0.0
        self._redraw = sys.stderr.isatty()

    def show(self, done: int, failed: int) -> None:
        """Say how far it is, at most every five seconds (a terminal: ten times a second)."""
        now = time.monotonic()
        if done < self._total and now - self._shown < (0.1 if self._redraw else 5.0):
            return
        self._shown = now
        elapsed = max(now - self._begin, 1e-9)
        left = elapsed / max(done, 1) * (self._total - done)
        line = f"{self._what}: {done}/{self._total}, {failed} failed, {elapsed:.0f} s, about {left:.0f} s left"
        sys.stderr.write(f"\r\033[K{line}" + ("\n" if done == self._total else "") if self._redraw else line + "\n")
        sys.stderr.flush()


def chosen(cells: Sequence[Cell], shard: str, limit: int | None) -> list[Cell]:
    """Every n-th cell, and of these at most `limit`, evenly spread."""
    at, _, of = shard.partition("/")
    cells = list(cells[int(at) :: int(of)])
    if limit is None or limit >= len(cells):
        return cells
    return [cells[index * len(cells) // limit] for index in range(limit)]


def compile_kernels(variants: Sequence[KernelVariant], arch: str, workers: int, time_left: Callable[[], float]) -> list[CompileOutcome]:
    """Compile kernels into the cache; the outcomes of those that failed."""
    progress = Progress(f"kernels for {arch}", len(variants))
    failed: list[CompileOutcome] = []

    def on_progress(outcome: CompileOutcome, done: int, total: int) -> None:
        failed.extend([outcome] if outcome.error else [])
        progress.show(done, len(failed))
        if time_left() <= 0:
            raise _TimeUp

    compile_variants(variants, [arch], on_progress, workers)
    return failed


def describe(backend: str) -> dict[str, str]:
    """What results depend on besides the cell."""
    gpu = "none"
    if backend != "host":
        from cupyinfer.backends.device import read_profile

        gpu = read_profile(0).name
    return {"backend": backend, "gpu": gpu, "sources": fingerprint()}


def run_matrix(cells: Sequence[Cell], backend: str, arguments: argparse.Namespace, time_left: Callable[[], float]) -> dict[str, Any]:
    """Run what the log does not hold yet, and make the report."""
    out, begin = arguments.out / backend, time.monotonic()
    about = describe(backend)
    log = Log(out / "cells.jsonl", about)
    if log.discarded:
        print(f"{log.discarded} results of other sources or another GPU dropped")
    rest = [cell for cell in cells if str(cell) not in log.done]
    if len(rest) < len(cells):
        print(f"{len(cells) - len(rest)} of {len(cells)} cells were finished before")
    progress = Progress(f"cells on {backend}", len(rest))
    failed = 0
    for done, (cell, outcome) in enumerate(run_cells(rest, backend, arguments.workers, arguments.timeout, time_left), 1):
        log.add(cell, outcome)
        if "failed" in outcome:
            failed += 1
            print(f"FAILED {cell}\n  {outcome['failed']}", flush=True)
        progress.show(done, failed)
    log.close()
    report = make_report(cells, log.done, {**about, "seconds": round(time.monotonic() - begin, 1)})
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(prog="python -m tests.matrix.run", description=__doc__)
    parser.add_argument("--backend", choices=BACKENDS, help="only this one; by default all that this GPU has")
    parser.add_argument("--every-kernel", action="store_true", help="the whole product of the kernel axes: several times the cells")
    parser.add_argument("--limit", type=int, help="at most this many cells, evenly spread")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="every N-th cell, beginning with the I-th")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after this long; run again to go on")
    parser.add_argument("--workers", type=int, default=max(1, cpus - max(0, cpus // 4)), help="processes that run cells")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a cell may take")
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "matrix", help="where BACKEND/cells.jsonl and report.json go")
    parser.add_argument("--compile-only", metavar="ARCH", help="only compile the kernels, for a GPU that need not be there (sm_90a)")
    parser.add_argument("--list", action="store_true", help="only count cells and kernels")
    return parser.parse_args(argv)


def chosen_backends(requested: str | None, arch: str) -> list[str]:
    """The backends to run: the one asked for, or those of a GPU of that arch."""
    if requested:
        return [requested]
    return ["fa2", "fa3"] if arch == FA3_ARCH else ["fa2"]


def summary(report: dict[str, Any], path: Path) -> str:
    """A report in one line."""
    return (
        f"{report['backend']}: {report['run']} of {report['cells']} cells run: {report['passed']} passed, {report['failed']} failed; "
        f"largest error {report['worst_output']:.2f} of its bound; {path}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0 if every cell passed, 1 if one failed, 3 if time was up first."""
    arguments = parse(argv)
    end = time.monotonic() + arguments.seconds

    def time_left() -> float:
        return end - time.monotonic()

    arch = arguments.compile_only or (FA3_ARCH if arguments.backend == "host" or arguments.list else gpu_arch())
    backends = chosen_backends(arguments.backend, arch)
    cells = {backend: chosen(matrix_cells(backend, arguments.every_kernel), arguments.shard, arguments.limit) for backend in backends}
    kernels = [
        variant for backend in backends if backend != "host" or arguments.compile_only for variant in kernels_of(cells[backend], backend)
    ]
    for backend in backends:
        print(f"{backend}: {len(cells[backend])} cells, {len(kernels_of(cells[backend], backend))} kernels", flush=True)
    if arguments.list:
        return 0
    try:
        failed = compile_kernels(kernels, arch, len(os.sched_getaffinity(0)), time_left) if kernels else []
    except _TimeUp:
        print("time is up; run again to go on")
        return UNFINISHED
    for outcome in failed:
        print(f"FAILED to compile {outcome.variant}: {outcome.error}")
    if arguments.compile_only:
        return FAILED if failed else 0
    reports = [run_matrix(cells[backend], backend, arguments, time_left) for backend in backends]
    for report in reports:
        print(summary(report, arguments.out / report["backend"] / "report.json"))
    if any(report["failed"] for report in reports):
        return FAILED
    return 0 if all(report["complete"] for report in reports) else UNFINISHED


def gpu_arch() -> str:
    """Arch of the current GPU."""
    from cupyinfer.backends.device import read_profile

    return read_profile(0).arch


if __name__ == "__main__":
    sys.exit(main())
