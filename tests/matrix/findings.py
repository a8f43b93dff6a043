# SPDX-License-Identifier: Apache-2.0
"""What a sanitizer printed: each finding with the task it belongs to, and which findings are known to be false and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from cupyinfer.jit.source import kernels_dir

#: What the process inside prints before each task.
BEGIN = "begins: "
_PREFIX = "========="
#: Lines of a sanitizer that are no findings.
_FRAME = re.compile(r"COMPUTE-SANITIZER|(ERROR|RACECHECK) SUMMARY|Target application returned|Program hit the end of")
_SUMMARY = re.compile(
    r"ERROR SUMMARY: (?P<errors>\d+) errors?"
    r"|RACECHECK SUMMARY: \d+ hazards? displayed \((?P<races>\d+) errors?, (?P<warnings>\d+) warnings?\)"
)
_ACCESS = re.compile(r"(?P<kind>Read|Write) access at .*?(?:\bin \S*?(?P<file>[\w.]+):(?P<line>\d+))?(?: \[\d+ hazards?\])?$")


@dataclass(frozen=True)
class Finding:
    """One block of a sanitizer's output.

    Attributes:
        task: the last one that had begun.
        lines: the block.
    """

    task: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Excuse:
    """A race between two lines of a kernel family that racecheck reports and that is none.

    Attributes:
        family: of the kernels it holds for.
        read: file of the read, and what the line holds.
        write: the same of the write.
        reason: why it is no race.
    """

    family: str
    read: tuple[str, str]
    write: tuple[str, str]
    reason: str


#: Both were read off the machine code. Nothing is excused by a kernel's or file's name alone: lines count by what they say.
EXCUSES = (
    # Every lane of a consumer's warp stores staged outputs and executes fence.proxy.async; then __syncwarp, and lane 0 arrives on the
    # mbarrier (release) on whose phase the rows warps wait (acquire) before they read. PTX orders memory among the threads of a
    # bar.warp.sync, and causality goes on through the mbarrier. Where ptxas knows a warp to be converged it writes that barrier as a
    # NOP. What racecheck counts is each byte that is read, but for those that lane 0 itself stored: 360, 120, 128 and 128 bytes, of
    # 384, 128, 128 and 128, on the first cell of fa3. So it follows the mbarrier, and misses the step from the other lanes to lane 0.
    Excuse(
        "fa3",
        ("fa3_rows.cuh", "output_chunk_offset(row_begin + row, chunk)"),
        ("fa3_output.cuh", "output_chunk_offset(row_in_buffer, "),
        "staged outputs reach the warps that store them through __syncwarp and one lane's mbarrier arrival, which racecheck does not join",
    ),
    # The lines are about different objects. A Work record begins 4 bytes behind a multiple of 16, behind logit_scales[0], and one 16-byte
    # load takes its first 12 bytes and that word: 4 bytes for each of 3 warps of 2 CTAs that read while thread 0 of warp 0 writes, 24 in
    # all. No instruction uses the word, whose register is written again before it is read.
    Excuse(
        "fa2_prefill",
        ("rows.cuh", "tile.row_begin + "),
        ("prefill_load.cuh", "logit_scales[0] = "),
        "a 16-byte load of a tile's record covers the word of its neighbour in shared memory, and nobody uses it",
    ),
)


def parse_findings(output: str) -> list[Finding]:
    """All findings in what a process under a sanitizer printed, in order."""
    findings: list[Finding] = []
    task, owner, block = "before the first task", "", list[str]()

    def end() -> None:
        if block:
            findings.append(Finding(owner, tuple(block)))
            block.clear()

    for line in output.splitlines():
        if line.startswith(BEGIN):
            task = line.removeprefix(BEGIN)
        if not line.startswith(_PREFIX):
            continue
        text = line.removeprefix(_PREFIX).strip()
        if not text or _FRAME.search(text):
            end()
            continue
        if not block:
            owner = task
        block.append(text)
    end()
    return findings


def count_reported(output: str) -> int | None:
    """Errors and warnings as the summary counts them; None without one."""
    found = _SUMMARY.search(output)
    return None if found is None else sum(int(found[name] or 0) for name in ("errors", "races", "warnings"))


@cache
def source_line(file: str, number: int) -> str:
    """That line of the kernel source with that name; empty where there is none, or several."""
    paths = [path for path in kernels_dir().rglob("*.cuh") if path.name == file]
    lines = paths[0].read_text(encoding="utf-8").splitlines() if len(paths) == 1 else []
    return lines[number - 1] if 0 < number <= len(lines) else ""


def excuse_of(finding: Finding, family: str) -> Excuse | None:
    """Why a finding is false; None unless that is known of each pair of accesses in it."""
    accesses = [_ACCESS.search(line) for line in finding.lines]
    found = [access for access in accesses if access is not None and access["file"]]
    # A block is one access, and the others that it races with.
    if len(found) < 2 or len(found) != len(finding.lines) or "Race reported" not in finding.lines[0]:
        return None
    if any(access["kind"] == found[0]["kind"] for access in found[1:]):
        return None
    for excuse in EXCUSES:
        places = {"Read": excuse.read, "Write": excuse.write}
        at = [(places[access["kind"]], access["file"], source_line(access["file"], int(access["line"]))) for access in found]
        if excuse.family == family and all(file == place[0] and place[1] in text for place, file, text in at):
            return excuse
    return None


def describe(findings: Sequence[Finding], shown_lines: int = 24) -> list[str]:
    """Lines that name every task with findings, how many there are of each kind, and the first of each."""
    counts = Counter((finding.task, finding.lines[0]) for finding in findings)
    first = {(finding.task, finding.lines[0]): finding for finding in reversed(findings)}
    lines = []
    for key, number in counts.items():
        lines += [f"{number} in {key[0]}, the first:", *(f"  {line}" for line in first[key].lines[:shown_lines])]
    return lines
