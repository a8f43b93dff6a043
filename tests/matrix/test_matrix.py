# SPDX-License-Identifier: Apache-2.0
"""The matrix in small: every legal pair on the host backend, every refused combination, and the table and its tools themselves."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyinfer.errors import CupyInferError
from tests.matrix import pool, run
from tests.matrix.arena import Arena
from tests.matrix.axes import AXES, KERNEL_AXES, PATH_AXES, RULES, STRENGTH, Cell, kernels_of, matrix_cells, matrix_size, pairwise_cells
from tests.matrix.check import run_cell
from tests.matrix.cover import Rule, combinations_of, cover, legal_combinations
from tests.matrix.document import PAGE, RESULTS, table_part
from tests.matrix.illegal import ILLEGAL, Illegal
from tests.matrix.report import Log, make_report
from tests.matrix.sanitizer import sanitizer_cells

Row = dict[str, str]


@cache
def full() -> list[Cell]:
    return matrix_cells("fa2")


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    yield Arena(on_gpu=False)


@pytest.mark.parametrize("cell", pairwise_cells(), ids=str)
def test_cell(cell: Cell, arena: Arena) -> None:
    run_cell(cell, "host", arena)


@pytest.mark.parametrize(("op", "illegal"), [(op, illegal) for illegal in ILLEGAL for op in illegal.ops], ids=str)
def test_a_refused_combination(illegal: Illegal, op: str) -> None:
    for method in ("workspace_size", "plan"):
        with pytest.raises(illegal.error, match=illegal.words) as failure:
            illegal.provoke(op, method)
        # A keyword that an operation does not have is Python's error, every other one is the library's.
        assert isinstance(failure.value, CupyInferError) or illegal.error is TypeError


def test_the_subset_has_every_legal_pair() -> None:
    rows = [cell.row for cell in pairwise_cells()]
    assert not any(rule.broken_by(row) for row in rows for rule in RULES)
    assert set().union(*(combinations_of(row, 2) for row in rows)) == legal_combinations(AXES, RULES, 2)


def test_the_matrix_has_every_legal_pair_and_kernels_of_every_four() -> None:
    cells = full()
    assert 3000 <= len(cells) <= 8000 and 300 <= len(kernels_of(cells)) <= 500
    assert (len(set(cells)), len(kernels_of(cells))) == matrix_size("fa2") and len(set(cells)) == len(cells)
    rows = [cell.row for cell in cells]
    assert not any(rule.broken_by(row) for row in rows for rule in RULES)
    assert set().union(*(combinations_of(row, 2) for row in rows)) == legal_combinations(AXES, RULES, 2)
    kernel_axes = {**KERNEL_AXES, "mask": ("none", "packed")}
    of_kernels = [{axis: cell.row[axis] for axis in kernel_axes} for cell in cells if cell.mask in kernel_axes["mask"]]
    have = set().union(*(combinations_of(row, STRENGTH) for row in of_kernels))
    assert have >= legal_combinations(kernel_axes, RULES, STRENGTH)
    # Whatever of the path axes one cell of a kernel has, with the same operation, all have.
    paths: dict[Any, set[Any]] = {}
    for cell in cells:
        paths.setdefault((cell.variant, cell.op), set()).add((cell.mask, *(cell.row[axis] for axis in PATH_AXES)))
    for (variant, op), found in paths.items():
        splits = {path[-1] for path in found}
        masks = 1 if op == "decode" else 2
        assert len(found) == masks * 4 * len(splits), (str(variant), op, found)


def test_the_same_cells_every_time() -> None:
    assert matrix_cells("fa2") == full()
    assert pairwise_cells() == pairwise_cells()
    cell = full()[0]
    assert cell.case() == cell.case()


def test_cover_keeps_rules() -> None:
    axes = {"a": ("0", "1", "2"), "b": ("0", "1", "2"), "c": ("0", "1")}
    rules = (Rule(("a", "b"), lambda a, b: a != "2" or b == "2", "two goes with two"),)
    rows = cover(axes, rules, 2)
    assert all(row["a"] != "2" or row["b"] == "2" for row in rows)
    want = {
        tuple(sorted(((first, x), (second, y))))
        for first, second in itertools.combinations(axes, 2)
        for x in axes[first]
        for y in axes[second]
        if (first, second, x) != ("a", "b", "2") or y == "2"
    }
    assert set().union(*(combinations_of(row, 2) for row in rows)) == want
    assert len(rows) < 3 * 3 * 2


def test_a_write_past_an_array_is_seen(arena: Arena) -> None:
    arena.reset()
    given = arena.put(np.arange(6, dtype=np.float32))
    room = arena.reserve("out", 40)
    arena.send()
    assert (arena.get(room, np.uint8, (40,)) == 0xFF).all()
    room.bytes[:] = 1
    arena.assert_rest_intact()
    past = arena._block[room.end : room.end + 1]
    kept = past.copy()
    past[:] = 0
    with pytest.raises(AssertionError, match=r"1 bytes outside .* the first 40 bytes from the start of the out of 40 bytes"):
        arena.assert_rest_intact()
    past[:] = kept
    given[2] = 7
    with pytest.raises(AssertionError, match="outside of outputs and workspaces"):
        arena.assert_rest_intact()


def test_a_wrong_result_fails_its_cell(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupyinfer.backends import host

    cell = next(cell for cell in full() if cell.sinks == "no" and cell.op == "decode" and cell.lse == "yes" and cell.split == "fixed")
    run_cell(cell, "host", arena)
    attend = host.attend

    def off_by_one_key(problem: Any, tile: Any, head: int, begin: int, end: int) -> Any:
        return attend(problem, tile, head, begin, max(begin, end - 1))

    monkeypatch.setattr(host, "attend", off_by_one_key)
    with pytest.raises(AssertionError, match="eager run"):
        run_cell(cell, "host", arena)


def fake_outcome(cell: Cell, backend: str, arena: Any) -> dict[str, Any]:
    """Stands in for a cell: dies, hangs, fails or passes by its page size."""
    if cell.page == "1":
        os._exit(9)
    return {"failed": "as told"} if cell.page == "3" else {"output": 0.5, "lse": 0.0}


def test_cells_that_kill_their_process_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked process, which has the stand-in for running a cell."""
    from multiprocessing import get_context

    monkeypatch.setattr(pool, "outcome", fake_outcome)
    monkeypatch.setattr(pool, "get_context", lambda _: get_context("fork"))
    cells = [cell for page in ("16", "1", "64", "3", "512") for cell in [next(c for c in full() if c.page == page)]]
    found = {cell.page: outcome for cell, outcome in pool.run_cells(cells, "host", 1, 60.0, lambda: 1.0)}
    assert found.keys() == {"16", "1", "64", "3", "512"}
    assert found["1"] == {"failed": "the process died with exit code 9"} and found["3"] == {"failed": "as told"}
    assert all(found[page] == {"output": 0.5, "lse": 0.0} for page in ("16", "64", "512"))


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--backend", "host", "--limit", "4", "--workers", "1", "--out", str(tmp_path)]
    assert run.main([*arguments, "--seconds", "0"]) == run.UNFINISHED
    assert run.main(arguments) == 0
    path = tmp_path / "host" / "cells.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 5
    path.write_text("\n".join([*lines[:3], lines[3][:20]]), encoding="utf-8")
    capsys.readouterr()
    assert run.main(arguments) == 0
    assert "2 of 4 cells were finished before" in capsys.readouterr().out
    report = json.loads((tmp_path / "host" / "report.json").read_text(encoding="utf-8"))
    assert (report["run"], report["passed"], report["failed"], report["complete"]) == (4, 4, 0, True)
    assert sum(found["run"] for found in report["axes"]["op"].values()) == 4
    assert 0 < report["worst_output"] <= 1


def test_results_of_other_sources_are_dropped(tmp_path: Path) -> None:
    log = Log(tmp_path / "cells.jsonl", {"sources": "a"})
    log.add(full()[0], {"output": 0.1, "lse": 0.0})
    log.close()
    same = Log(tmp_path / "cells.jsonl", {"sources": "a"})
    same.close()
    assert list(same.done) == [str(full()[0])] and not same.discarded
    other = Log(tmp_path / "cells.jsonl", {"sources": "b"})
    other.close()
    assert not other.done and other.discarded == 1


def test_a_report_counts_failures() -> None:
    cells = full()[:3]
    done = {str(cells[0]): {"output": 0.25, "lse": 1e-6}, str(cells[1]): {"failed": "a reason"}}
    report = make_report(cells, done, {})
    assert (report["cells"], report["run"], report["failed"], report["complete"]) == (3, 2, 1, False)
    assert report["failures"] == [{"cell": str(cells[1]), "error": "a reason"}] and report["worst_output"] == 0.25


def test_the_sanitizer_sees_every_kind() -> None:
    cells = sanitizer_cells()
    assert len(cells) == 12
    for axis in ("op", "head_dim", "tile", "mask", "pos", "cap", "window", "sinks", "split", "types"):
        assert {cell.row[axis] for cell in cells} == set(AXES[axis]), axis


def test_the_page_shows_the_table() -> None:
    """`python -m tests.matrix.document REPORT` writes it."""
    assert PAGE.read_text(encoding="utf-8").split(RESULTS)[0] == table_part()
