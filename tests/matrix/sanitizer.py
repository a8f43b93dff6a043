# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.matrix.sanitizer`: some cells and the helper kernels under compute-sanitizer's tools, all tools at once."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("CUPYINFER_CACHE_DIR", str(Path(__file__).resolve().parents[2] / ".cache" / "kernels"))

from cupyinfer.jit.variant import HELPER_KERNELS, HelperVariant
from cupyinfer.schedule.tiles import FA3_ARCH
from tests.matrix.cells import Cell, kernels_of, matrix_cells
from tests.matrix.report import ROOT
from tests.matrix.run import compile_kernels, gpu_arch

#: A sanitizer exits with this when it found something; this program exits with one of the others.
FOUND, FAILED, UNFINISHED, UNAVAILABLE = 86, 1, 3, 2
_COMMON = ("--error-exitcode", str(FOUND), "--target-processes", "application-only", "--print-limit", "20")
#: Arguments of each tool.
#:
#: memcheck: padding between allocations makes a read just past an array an error, and there is an allocation per array. It knows the
#: bulk copies and warpgroup products of fa3 (--check-bulk-copy and --check-warpgroup-mma, on by default). What it reports about CUDA
#: calls that fail counts too, but for a runtime that asks whether an older driver has a function.
#:
#: racecheck: shared memory only. It follows bar.sync, named barriers, cp.async (--racecheck-memcpy-async, on by default) and mbarriers,
#: whose number per block it finds out. A bulk tensor copy (cp.async.bulk.tensor, the only kind fa3 issues) belongs to no thread, and a
#: warpgroup product reads shared memory without load instructions: of fa3 it sees what threads themselves load and store, which is
#: the queries and outputs in their staging tiles and the records of the queue. That K and V tiles are full when they are read, and free
#: when they are filled, is beyond it: poisoned caches and equal repeats in the matrix are the test of that. It is never told to look
#: away: no kernel is excluded, and warnings count.
#:
#: initcheck: reads of global memory that nothing has written since it was allocated, on the device and in copies to the host.
TOOLS = {
    "memcheck": ("--tool", "memcheck", "--padding", "256", "--ignore-getprocaddress-notfound"),
    "racecheck": ("--tool", "racecheck", "--racecheck-report", "analysis"),
    "initcheck": ("--tool", "initcheck"),
}
_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
_SUMMARY = re.compile(r"(ERROR|RACECHECK) SUMMARY: (?P<found>\d+).*")
_COUNTED = re.compile(r"(?P<passed>\d+) of (?P<total>\d+) tasks passed, (?P<failed>\d+) failed")
#: What a sanitizer says where it cannot work, such as in some virtual machines.
_REFUSAL = re.compile(r".*(Device not supported|Unable to find injection|Failed to initialize).*")
_SHOWN_LINES = 40
#: Seconds that the task at hand may still take when the time is up.
_GRACE = 40.0


def find_sanitizer() -> str | None:
    """Path of compute-sanitizer, or None."""
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *_PLACES]))


def sanitizer_cells(backend: str = "fa2", number: int = 12) -> list[Cell]:
    """Cells for tools that slow a kernel down fiftyfold: short, few heads, and still every operation, tile, mask and kind of split."""
    cheap = [
        cell
        for cell in matrix_cells(backend)
        if cell.group in ("1", "4", "32")
        and cell.lengths in ("pair", "one", "empty")
        and cell.page != "512"
        and (cell.group == "32") == (cell.op == "decode" and cell.tile == "64")
    ]
    chosen: list[Cell] = []
    wanted = ("op", "types", "head_dim", "tile", "mask", "pos", "cap", "window", "sinks", "split", "page", "lengths")
    seen: set[tuple[str, ...]] = set()

    def shows(cell: Cell) -> set[tuple[str, ...]]:
        values = {(axis, cell.row[axis]) for axis in wanted}
        return values | {(cell.op, axis, cell.row[axis]) for axis in ("tile", "mask", "split")}

    while cheap and len(chosen) < number:
        best = max(cheap, key=lambda cell: (len(shows(cell) - seen), str(cell)))
        chosen.append(best)
        seen |= shows(best)
        cheap.remove(best)
    return chosen


@dataclass(frozen=True)
class Task:
    """One thing to run under a tool.

    Attributes:
        name: for messages.
        run: raises where a result is wrong.
    """

    name: str
    run: Callable[[], object]


def tasks_of(cells: dict[str, list[Cell]], graph: bool) -> list[Task]:
    """What to run: the helper kernels, then the cells of the backends in turn, so that a run that is cut short has seen them all."""
    from tests.matrix.arena import Apart
    from tests.matrix.check import run_cell
    from tests.matrix.helper_calls import HELPER_CALLS

    turns = sorted((at / len(chosen), backend, cell) for backend, chosen in cells.items() for at, cell in enumerate(chosen))
    tasks = [Task(call.__name__, call) for call in HELPER_CALLS]
    return tasks + [
        Task(f"{backend} {cell}", lambda cell=cell, backend=backend: run_cell(cell, backend, Apart(), graph)) for _, backend, cell in turns
    ]


def run_inside(tasks: Sequence[Task], seconds: float) -> None:
    """Run tasks in this process until the time is up, and say how it went: a sanitizer takes an exit code for a fault of its own."""
    end, failed, done = time.monotonic() + seconds, 0, 0
    for task in tasks:
        if time.monotonic() > end:
            break
        begin = time.monotonic()
        try:
            task.run()
        except Exception as error:
            failed += 1
            print(f"FAILED {task.name}\n  {type(error).__name__}: {error}", flush=True)
        done += 1
        print(f"task {done}: {time.monotonic() - begin:.1f} s, {task.name}", flush=True)
    print(f"{done - failed} of {len(tasks)} tasks passed, {failed} failed", flush=True)


def run_tools(sanitizer: str, tools: Sequence[str], arguments: Sequence[str], seconds: float) -> int:
    """Start one process per tool, wait for all, and say what each found; 0 if nothing.

    Args:
        sanitizer: path of compute-sanitizer.
        tools: names in TOOLS.
        arguments: of the process inside.
        seconds: until no new task is begun; a tool that is not done _GRACE seconds later is killed.
    """
    begin, running = time.monotonic(), {}
    for tool in tools:
        inside = [sys.executable, "-m", "tests.matrix.sanitizer", "--inside", "--seconds", str(seconds), *arguments]
        # Racecheck follows shared memory, which a replay uses as an eager run does.
        inside += ["--eager"] if tool == "racecheck" else []
        running[tool] = subprocess.Popen(
            [sanitizer, *_COMMON, *TOOLS[tool], *inside], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    codes = []
    for tool, process in running.items():
        try:
            output, _ = process.communicate(timeout=max(1.0, seconds + _GRACE - (time.monotonic() - begin)))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            output += f"\nkilled after {seconds + _GRACE:g} seconds"
        codes.append(judge(tool, process.returncode, output, time.monotonic() - begin))
    return next((code for code in (FAILED, UNAVAILABLE, UNFINISHED) if code in codes), 0)


def judge(tool: str, exit_code: int, output: str, seconds: float) -> int:
    """Say what a tool found; FAILED, UNAVAILABLE (the tool does not work here), UNFINISHED (and nothing found so far) or 0."""
    refusal, summary, counted = (pattern.search(output) for pattern in (_REFUSAL, _SUMMARY, _COUNTED))
    if refusal is not None:
        print(f"{tool}: cannot work on this machine: {refusal.group().strip()}", flush=True)
        return UNAVAILABLE
    # Warnings alone may leave the exit code at 0.
    clean = exit_code == 0 and summary is not None and summary["found"] == "0"
    passed = clean and counted is not None and counted["failed"] == "0"
    finished = counted is not None and counted["passed"] == counted["total"]
    state = "FAILED" if not passed else "passed" if finished else "unfinished"
    print(f"{tool}: {state}, exit code {exit_code}, {seconds:.0f} s")
    lines = [found.group() if found else f"no {what}" for found, what in ((summary, "summary"), (counted, "count of tasks"))]
    lines += [] if passed else [line for line in output.splitlines() if not line.startswith("task ")][:_SHOWN_LINES]
    print("".join(f"  {line}\n" for line in lines), end="", flush=True)
    return FAILED if not passed else 0 if finished else UNFINISHED


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0 if no tool found anything, 1 if one did, 2 without a compute-sanitizer that works, 3 if time was up first."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix.sanitizer", description=__doc__)
    parser.add_argument("--cells", type=int, default=12, help="how many cells of fa2; of fa3, on a GPU that has it, half as many")
    parser.add_argument("--tools", nargs="+", choices=list(TOOLS), default=list(TOOLS))
    parser.add_argument("--seconds", type=float, default=100.0, help="begin nothing after this long; compiling comes before")
    parser.add_argument("--list", action="store_true", help="only name the tasks")
    parser.add_argument("--inside", action="store_true", help="run the tasks in this process: what a tool is given")
    parser.add_argument("--eager", action="store_true", help="with --inside: no CUDA graphs")
    arguments = parser.parse_args(argv)
    arch = FA3_ARCH if arguments.list else gpu_arch()
    numbers = {"fa2": arguments.cells, **({"fa3": arguments.cells // 2} if arch == FA3_ARCH else {})}
    cells = {backend: sanitizer_cells(backend, number) for backend, number in numbers.items()}
    if arguments.list:
        print("\n".join(task.name for task in tasks_of(cells, True)))
        return 0
    if arguments.inside:
        run_inside(tasks_of(cells, not arguments.eager), arguments.seconds)
        return 0
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("compute-sanitizer was not found on PATH; it comes with the CUDA toolkit (Debian, Ubuntu: cuda-sanitizer-12-9)")
        return UNAVAILABLE
    kernels = [variant for backend, chosen in cells.items() for variant in kernels_of(chosen, backend)]
    helpers = [HelperVariant(kernel) for kernel in HELPER_KERNELS]
    failed = compile_kernels([*kernels, *helpers], arch, len(os.sched_getaffinity(0)), lambda: float("inf"))
    for outcome in failed:
        print(f"FAILED to compile {outcome.variant}: {outcome.error}")
    if failed:
        return FAILED
    return run_tools(sanitizer, arguments.tools, ["--cells", str(arguments.cells)], arguments.seconds)


if __name__ == "__main__":
    sys.exit(main())
