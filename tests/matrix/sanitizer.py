# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.matrix.sanitizer`: a few cells under compute-sanitizer's memcheck, racecheck and initcheck, all at once."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("CUPYINFER_CACHE_DIR", str(Path(__file__).resolve().parents[2] / ".cache" / "kernels"))

from tests.matrix.axes import Cell, matrix_cells
from tests.matrix.report import ROOT
from tests.matrix.run import compile_cells

#: A sanitizer exits with this when it found something.
_FOUND = 86
_COMMON = ("--error-exitcode", str(_FOUND), "--print-limit", "20")
#: Arguments of each tool. Padding between allocations turns a read just past an array into an error.
TOOLS = {
    "memcheck": ("--tool", "memcheck", "--padding", "256"),
    "racecheck": ("--tool", "racecheck", "--racecheck-report", "all"),
    "initcheck": ("--tool", "initcheck"),
}
_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
_SUMMARY = re.compile(r"(ERROR|RACECHECK) SUMMARY: .*")
_SHOWN_LINES = 30


def find_sanitizer() -> str | None:
    """Path of compute-sanitizer, or None."""
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *_PLACES]))


def sanitizer_cells(number: int = 12) -> list[Cell]:
    """Cells for tools that slow a kernel down fiftyfold: short, few heads, and still every operation, tile, mask and kind of split."""
    cheap = [
        cell
        for cell in matrix_cells("fa2")
        if cell.group in ("1", "4", "32")
        and cell.lengths in ("pair", "one", "empty")
        and cell.page != "512"
        and (cell.group == "32") == (cell.op == "decode" and cell.tile == "64")
    ]
    chosen: list[Cell] = []
    wanted = ("op", "types", "head_dim", "tile", "mask", "pos", "cap", "window", "sinks", "split", "page", "lengths")
    seen: set[tuple[str, ...]] = set()

    def pairs(cell: Cell) -> set[tuple[str, ...]]:
        values = [(axis, getattr(cell, axis)) for axis in wanted]
        both = [(*values[0], *values[3], *values[9]), (*values[0], *values[4])]
        return {*values, *both}

    while cheap and len(chosen) < number:
        best = max(cheap, key=lambda cell: (len(pairs(cell) - seen), str(cell)))
        chosen.append(best)
        seen |= pairs(best)
        cheap.remove(best)
    return chosen


def run_inside(cells: Sequence[Cell], graph: bool) -> int:
    """Run cells in this process, each array in an allocation of its own."""
    from tests.matrix.arena import Apart
    from tests.matrix.check import run_cell

    failed = 0
    for cell in cells:
        try:
            run_cell(cell, "fa2", Apart(), graph)
        except Exception as error:
            failed += 1
            print(f"FAILED {cell}\n  {type(error).__name__}: {error}", flush=True)
    print(f"{len(cells) - failed} of {len(cells)} cells passed", flush=True)
    return 1 if failed else 0


def run_tools(sanitizer: str, tools: Sequence[str], number: int, seconds: float) -> int:
    """Start one process per tool, wait for all, and say what each found; 0 if nothing."""
    begin, running = time.monotonic(), {}
    for tool in tools:
        # Racecheck follows shared memory, which a replay uses as an eager run does.
        inside = [sys.executable, "-m", "tests.matrix.sanitizer", "--inside", "--cells", str(number)]
        inside += ["--eager"] if tool == "racecheck" else []
        running[tool] = subprocess.Popen(
            [sanitizer, *_COMMON, *TOOLS[tool], *inside], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    found = 0
    for tool, process in running.items():
        try:
            output, _ = process.communicate(timeout=max(1.0, seconds - (time.monotonic() - begin)))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            output += f"\nstopped after {seconds:g} seconds"
        summary = _SUMMARY.search(output)
        passed = process.returncode == 0 and summary is not None
        found += not passed
        print(f"{tool}: {'passed' if passed else 'FAILED'}, exit code {process.returncode}, {time.monotonic() - begin:.0f} s")
        print(f"  {summary.group() if summary else 'no summary'}")
        lines = [line for line in output.splitlines() if "cells passed" in line]
        lines += [] if passed else output.splitlines()[:_SHOWN_LINES]
        print("".join(f"  {line}\n" for line in lines), end="", flush=True)
    return min(found, 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0 if no tool found anything, 1 otherwise, 2 without compute-sanitizer."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix.sanitizer", description=__doc__)
    parser.add_argument("--cells", type=int, default=12, help="how many cells")
    parser.add_argument("--tools", nargs="+", choices=list(TOOLS), default=list(TOOLS))
    parser.add_argument("--seconds", type=float, default=300.0, help="stop a tool after this long")
    parser.add_argument("--inside", action="store_true", help="run the cells in this process: what a tool is given")
    parser.add_argument("--eager", action="store_true", help="with --inside: no CUDA graphs")
    arguments = parser.parse_args(argv)
    cells = sanitizer_cells(arguments.cells)
    if arguments.inside:
        return run_inside(cells, not arguments.eager)
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("compute-sanitizer was not found on PATH; it comes with the CUDA toolkit (Debian, Ubuntu: cuda-sanitizer-12-9)")
        return 2
    from cupyinfer.backends.device import read_profile

    failed = compile_cells(cells, read_profile(0).arch, len(os.sched_getaffinity(0)), lambda: float("inf"))
    for outcome in failed:
        print(f"FAILED to compile {outcome.variant}: {outcome.error}")
    return 1 if failed else run_tools(sanitizer, arguments.tools, arguments.cells, arguments.seconds)


if __name__ == "__main__":
    sys.exit(main())
