# SPDX-License-Identifier: Apache-2.0
"""What a run of the matrix found: a log of finished cells that a later run goes on from, and the report made of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.matrix.axes import axes_of
from tests.matrix.cells import Cell, kernels_of

ROOT = Path(__file__).resolve().parents[2]
_SOURCES = ("cupyinfer", "kernels_cu", "tests/matrix", "tests/support")
Outcome = dict[str, Any]


def fingerprint() -> str:
    """A name of the sources that a result depends on; after a change of them old results say nothing."""
    digest = hashlib.sha256()
    for directory in _SOURCES:
        for path in sorted((ROOT / directory).rglob("*")):
            if path.suffix in (".py", ".cuh", ".cu"):
                digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


class Log:
    """One JSON line per finished cell, below a line that says of what.

    Attributes:
        done: outcomes by cell, as `str(cell)`.
        discarded: lines of an earlier run that belong to other sources or another GPU, and were dropped.
    """

    def __init__(self, path: Path, about: Mapping[str, str]) -> None:
        self.done: dict[str, Outcome] = {}
        self.discarded = 0
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        entries = [entry for entry in map(_parsed, lines) if entry is not None]
        if entries and entries[0] == dict(about):
            self.done = {entry.pop("cell"): entry for entry in entries[1:]}
        else:
            self.discarded = max(0, len(lines) - 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written anew: an interrupted run may have left half a line.
        self._file = path.open("w", encoding="utf-8")
        self._write(dict(about))
        for cell, outcome in self.done.items():
            self._write({"cell": cell, **outcome})

    def add(self, cell: Cell, outcome: Outcome) -> None:
        """Keep an outcome."""
        self.done[str(cell)] = outcome
        self._write({"cell": str(cell), **outcome})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, entry: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return None
    return entry if isinstance(entry, dict) else None


def make_report(cells: Sequence[Cell], done: Mapping[str, Outcome], about: Mapping[str, Any]) -> dict[str, Any]:
    """Count and compare outcomes, in all and for every value of every axis.

    Args:
        cells: everything that was to be run.
        done: outcomes by `str(cell)`.
        about: what else to say: at least the backend.
    """
    finished = [(cell, done[str(cell)]) for cell in cells if str(cell) in done]
    axes = {
        axis: {value: _summary([outcome for cell, outcome in finished if getattr(cell, axis) == value]) for value in values}
        for axis, values in axes_of(about["backend"]).items()
    }
    return {
        **about,
        "cells": len(cells),
        "complete": len(finished) == len(cells),
        **_summary([outcome for _, outcome in finished]),
        "kernels": len(kernels_of(cells, about["backend"])),
        "axes": axes,
        "failures": [{"cell": str(cell), "error": outcome["failed"]} for cell, outcome in finished if "failed" in outcome],
    }


def _summary(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    outcomes = list(outcomes)
    passed = [outcome for outcome in outcomes if "failed" not in outcome]
    return {
        "run": len(outcomes),
        "passed": len(passed),
        "failed": len(outcomes) - len(passed),
        "worst_output": round(max((outcome["output"] for outcome in passed), default=0.0), 4),
        "worst_lse": float(f"{max((outcome['lse'] for outcome in passed), default=0.0):.3g}"),
    }
