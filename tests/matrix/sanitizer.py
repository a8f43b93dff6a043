# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.matrix.sanitizer`: some cells and the helper kernels under compute-sanitizer's tools, all tools at once."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("CUPYINFER_CACHE_DIR", str(Path(__file__).resolve().parents[2] / ".cache" / "kernels"))

from cupyinfer.errors import CupyInferError
from cupyinfer.jit.cache import CubinCache
from cupyinfer.jit.compiler import DEFAULT_OPTIONS, compile_cubin
from cupyinfer.jit.source import kernel_source
from cupyinfer.jit.variant import HELPER_KERNELS, HelperVariant, KernelVariant
from cupyinfer.schedule.profile import profile_for_arch
from cupyinfer.schedule.tiles import FA3_ARCH
from tests.matrix import fa3_calls
from tests.matrix.cells import Cell, kernels_of, matrix_cells
from tests.matrix.findings import BEGIN, count_reported, describe, parse_findings
from tests.matrix.report import ROOT
from tests.matrix.run import gpu_arch

#: A sanitizer exits with this when it found something; this program exits with one of the others.
FOUND, FAILED, UNFINISHED, UNAVAILABLE = 86, 1, 3, 2
#: Everything is printed, and summed up by task.
_COMMON = ("--error-exitcode", str(FOUND), "--target-processes", "application-only", "--print-limit", "0")
#: Kernels with line numbers, by which a sanitizer names its findings. They are the same machine code.
_CACHE = ROOT / ".cache" / "sanitizer"
#: A process of a tool runs one of these, so that what it finds is known to be theirs.
FAMILIES = ("helpers", "fa2_decode", "fa2_prefill", "fa3")
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
#: away: no kernel is excluded, no finding excused, and warnings count. What it does not join is a __syncwarp and an arrival of one lane
#: for its warp: so all threads arrive where they hand over what they stored or read themselves, which is once per segment. Nor does it
#: know that bytes a vector load takes besides those that were asked for go unused: records in shared memory are aligned to 16.
#:
#: initcheck: reads of global memory that nothing has written since it was allocated, on the device and in copies to the host. Before
#: release 2025.4 it did not know bulk copies as writes, by which whole boxes of 32 output rows leave fa3 (cp.async.bulk.tensor): every
#: 32 bytes of just those counted as never written. So outputs of fa3, but no workspace and no log-sum-exp, are filled before each run;
#: with bits that are no number, so that the comparison finds what a run leaves out.
TOOLS = {
    "memcheck": ("--tool", "memcheck", "--padding", "256", "--ignore-getprocaddress-notfound"),
    "racecheck": ("--tool", "racecheck", "--racecheck-report", "analysis"),
    "initcheck": ("--tool", "initcheck"),
}
_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
_SUMMARY = re.compile(r"(ERROR|RACECHECK) SUMMARY: .*")
_COUNTED = re.compile(r"(?P<passed>\d+) of (?P<total>\d+) tasks passed, (?P<failed>\d+) failed")
#: What a sanitizer says where it cannot work, such as in some virtual machines.
_REFUSAL = re.compile(r".*(Device not supported|Unable to find injection|Failed to initialize).*")
_SHOWN_LINES = 60
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
        family: one of FAMILIES.
        run: raises where a result is wrong.
    """

    name: str
    family: str
    run: Callable[[], object]


def family_of(cell: Cell, backend: str) -> str:
    """The kernel file that serves a cell."""
    return "fa3" if backend == "fa3" else "fa2_decode" if cell.tile == "16" else "fa2_prefill"


def cell_task(cell: Cell, backend: str, graph: bool, filled: Sequence[str], crowded: bool = False) -> Task:
    """A cell, named with its kernels; rooms of those names are filled before each run; `crowded` as for `run_cell`."""
    from tests.matrix.arena import Apart
    from tests.matrix.check import run_cell

    kernels = ", ".join(map(str, cell.variants(backend)))
    name = f"{'crowded ' if crowded else ''}{backend} {cell} ({kernels})"
    return Task(name, family_of(cell, backend), lambda: run_cell(cell, backend, Apart(filled), graph, crowded))


def tasks_of(cells: dict[str, list[Cell]], graph: bool, filled: Sequence[str] = (), crowded: bool = False) -> list[Task]:
    """What to run: helper kernels, the cells of the backends in turn, each also `crowded` if asked for, what fa3 has besides its cells."""
    from tests.matrix.helper_calls import HELPER_CALLS

    turns = sorted((at / len(chosen), backend, cell) for backend, chosen in cells.items() for at, cell in enumerate(chosen))
    tasks = [Task(call.__name__, "helpers", call) for call in HELPER_CALLS]
    kinds = (False, True) if crowded else (False,)
    tasks += [cell_task(cell, backend, graph, filled, kind) for _, backend, cell in turns for kind in kinds]
    return tasks + [Task(f"fa3 {name}", "fa3", partial(fa3_calls.run, name)) for name in fa3_calls.CASES if "fa3" in cells]


def run_inside(tasks: Sequence[Task], seconds: float) -> None:
    """Run tasks in this process until the time is up, and say how it went: a sanitizer takes an exit code for a fault of its own."""
    end, failed, done = time.monotonic() + seconds, 0, 0
    for task in tasks:
        if time.monotonic() > end:
            break
        begin = time.monotonic()
        print(f"{BEGIN}{task.name}", flush=True)
        try:
            task.run()
        except Exception as error:
            failed += 1
            print(f"FAILED {task.name}\n  {type(error).__name__}: {error}", flush=True)
        done += 1
        print(f"task {done}: {time.monotonic() - begin:.1f} s, {task.name}", flush=True)
    print(f"{done - failed} of {len(tasks)} tasks passed, {failed} failed", flush=True)


def compile_with_lines(variant: KernelVariant, arch: str) -> str | None:
    """Compile a kernel with line numbers into _CACHE, where it stands for the one without; what went wrong, or None."""
    kernels = CubinCache(_CACHE)
    try:
        source = kernel_source(variant, profile_for_arch(arch))
        if kernels.lookup(source, arch) is None:
            kernels.store(source, arch, compile_cubin(source, arch, (*DEFAULT_OPTIONS, "-lineinfo")))
    except CupyInferError as error:
        return f"FAILED to compile {variant}: {error}"
    return None


def inside_command(tool: str, family: str) -> list[str]:
    """What a tool is given to run, but for what is the same for all."""
    # Racecheck follows shared memory, which a replay uses as an eager run does, and CTAs that do one segment never use twice.
    shared = ["--eager", "--crowded"] if tool == "racecheck" else []
    filled = ["--fill-outputs"] if (tool, family) == ("initcheck", "fa3") else []
    return [sys.executable, "-m", "tests.matrix.sanitizer", "--inside", "--family", family, *shared, *filled]


def run_tools(sanitizer: str, tools: Sequence[str], families: Sequence[str], arguments: Sequence[str], seconds: float) -> int:
    """Start one process per tool and family, wait for all, and say what each found; 0 if nothing.

    Args:
        sanitizer: path of compute-sanitizer.
        tools: names in TOOLS.
        families: names in FAMILIES.
        arguments: of the processes inside.
        seconds: until no new task is begun; a tool that is not done _GRACE seconds later is killed.
    """
    begin, codes = time.monotonic(), []
    environment = {**os.environ, "CUPYINFER_CACHE_DIR": str(_CACHE)}
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for tool in tools:
            for family in families:
                inside = [*inside_command(tool, family), "--seconds", str(seconds), *arguments]
                log = Path(folder) / f"{tool}-{family}"
                # Not a pipe: a process whose turn to be read comes late would stop at a full one.
                command = [sanitizer, *_COMMON, *TOOLS[tool], *inside]
                with log.open("w") as out:
                    process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=environment)
                running[tool, family] = process, log
        for (tool, family), (process, log) in running.items():
            killed = ""
            try:
                process.wait(timeout=max(1.0, seconds + _GRACE - (time.monotonic() - begin)))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                killed = f"\nkilled after {seconds + _GRACE:g} seconds"
            output = log.read_text(encoding="utf-8", errors="replace") + killed
            codes.append(judge(tool, family, process.returncode, output, time.monotonic() - begin))
    return next((code for code in (FAILED, UNAVAILABLE, UNFINISHED) if code in codes), 0)


def judge(tool: str, family: str, exit_code: int, output: str, seconds: float) -> int:
    """Say what a tool found; FAILED, UNAVAILABLE (the tool does not work here), UNFINISHED (and nothing found so far) or 0."""
    refusal, summary, counted = (pattern.search(output) for pattern in (_REFUSAL, _SUMMARY, _COUNTED))
    if refusal is not None:
        print(f"{tool} of {family}: cannot work on this machine: {refusal.group().strip()}", flush=True)
        return UNAVAILABLE
    # Warnings alone may leave the exit code at 0.
    passed = exit_code == 0 and count_reported(output) == 0 and counted is not None and counted["failed"] == "0"
    finished = counted is not None and counted["passed"] == counted["total"]
    state = "FAILED" if not passed else "passed" if finished else "unfinished"
    print(f"{tool} of {family}: {state}, exit code {exit_code}, {seconds:.0f} s")
    lines = [found.group() if found else f"no {what}" for found, what in ((summary, "summary"), (counted, "count of tasks"))]
    if not passed:
        said = [line for line in output.splitlines() if not line.startswith(("task ", BEGIN, "========="))]
        lines += [*said[-_SHOWN_LINES // 2 :], *describe(parse_findings(output))[:_SHOWN_LINES]]
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
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="kernels to run")
    parser.add_argument("--family", choices=FAMILIES, help="with --inside: the tasks of these kernels alone")
    parser.add_argument("--eager", action="store_true", help="with --inside: no CUDA graphs")
    parser.add_argument("--crowded", action="store_true", help="with --inside: each cell also on what is planned as one SM")
    parser.add_argument("--fill-outputs", action="store_true", help="with --inside: outputs are written before each run")
    arguments = parser.parse_args(argv)
    arch = FA3_ARCH if arguments.list else gpu_arch()
    numbers = {"fa2": arguments.cells, **({"fa3": arguments.cells // 2} if arch == FA3_ARCH else {})}
    cells = {backend: sanitizer_cells(backend, number) for backend, number in numbers.items()}
    if arguments.list:
        print("\n".join(task.name for task in tasks_of(cells, True)))
        return 0
    if arguments.inside:
        tasks = tasks_of(cells, not arguments.eager, ("out",) if arguments.fill_outputs else (), arguments.crowded)
        run_inside([task for task in tasks if arguments.family in (None, task.family)], arguments.seconds)
        return 0
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("compute-sanitizer was not found on PATH; it comes with the CUDA toolkit (Debian, Ubuntu: cuda-sanitizer-12-9)")
        return UNAVAILABLE
    kernels: list[KernelVariant] = [HelperVariant(kernel) for kernel in HELPER_KERNELS]
    kernels += [variant for backend, chosen in cells.items() for variant in kernels_of(chosen, backend)]
    kernels += fa3_calls.kernels() if "fa3" in cells else []
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")) as pool:
        failures = [failure for failure in pool.map(compile_with_lines, kernels, [arch] * len(kernels)) if failure is not None]
    print("\n".join([f"{len(kernels) - len(failures)} of {len(kernels)} kernels compiled for {arch}", *failures]), flush=True)
    if failures:
        return FAILED
    families = [family for family in arguments.families if family != "fa3" or "fa3" in cells]
    return run_tools(sanitizer, arguments.tools, families, ["--cells", str(arguments.cells)], arguments.seconds)


if __name__ == "__main__":
    sys.exit(main())
