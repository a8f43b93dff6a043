# SPDX-License-Identifier: Apache-2.0
"""What a sanitizer printed: each finding with the task it belongs to."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

#: What the process inside prints before each task.
BEGIN = "begins: "
_PREFIX = "========="
#: Lines of a sanitizer that are no findings.
_FRAME = re.compile(r"COMPUTE-SANITIZER|(ERROR|RACECHECK) SUMMARY|Target application returned|Program hit the end of")
_SUMMARY = re.compile(
    r"ERROR SUMMARY: (?P<errors>\d+) errors?"
    r"|RACECHECK SUMMARY: \d+ hazards? displayed \((?P<races>\d+) errors?, (?P<warnings>\d+) warnings?\)"
)


@dataclass(frozen=True)
class Finding:
    """One block of a sanitizer's output.

    Attributes:
        task: the last one that had begun.
        lines: the block.
    """

    task: str
    lines: tuple[str, ...]


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


def describe(findings: Sequence[Finding], shown_lines: int = 24) -> list[str]:
    """Lines that name every task with findings, how many there are of each kind, and the first of each."""
    counts = Counter((finding.task, finding.lines[0]) for finding in findings)
    first = {(finding.task, finding.lines[0]): finding for finding in reversed(findings)}
    lines = []
    for key, number in counts.items():
        lines += [f"{number} in {key[0]}, the first:", *(f"  {line}" for line in first[key].lines[:shown_lines])]
    return lines
