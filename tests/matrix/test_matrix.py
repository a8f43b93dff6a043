# SPDX-License-Identifier: Apache-2.0
"""The matrix in small: every legal pair on the host backend, every refused combination, and the table and its tools themselves."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyinfer.attention.backend_choice import choose_backend
from cupyinfer.dtypes import FP8_QUERY_TYPE
from cupyinfer.errors import CupyInferError, UnsupportedError
from cupyinfer.jit.ahead import fa3_variants
from cupyinfer.schedule.tiles import FA3_ARCH
from tests.matrix import fa3_calls, findings, pool, run, sanitizer
from tests.matrix.arena import Arena
from tests.matrix.axes import AXES, KERNEL_AXES, PATH_AXES, RULES, STRENGTH, axes_of, fa3_refusals, kernel_axes_of, options_of, rules_of
from tests.matrix.cells import Cell, kernels_of, matrix_cells, matrix_size, pairwise_cells
from tests.matrix.check import run_cell
from tests.matrix.cover import Rule, combinations_of, cover, legal_combinations, product, rules_of_table
from tests.matrix.document import PAGE, RESULTS, table_part
from tests.matrix.illegal import ILLEGAL, Illegal
from tests.matrix.report import ROOT, Log, make_report

Row = dict[str, str]


@cache
def full(backend: str = "fa2") -> list[Cell]:
    return matrix_cells(backend)


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
        assert isinstance(failure.value, CupyInferError)


def test_the_subset_has_every_legal_pair() -> None:
    rows = [cell.row for cell in pairwise_cells()]
    assert not any(rule.broken_by(row) for row in rows for rule in rules_of("host"))
    assert set().union(*(combinations_of(row, 2) for row in rows)) == legal_combinations(AXES, rules_of("host"), 2)


@pytest.mark.parametrize(("backend", "cell_range", "kernel_range"), [("fa2", (3000, 8000), (300, 500)), ("fa3", (1000, 5000), (40, 200))])
def test_the_matrix_has_every_legal_pair_and_kernels_of_every_four(
    backend: str, cell_range: tuple[int, int], kernel_range: tuple[int, int]
) -> None:
    cells, rules, axes = full(backend), rules_of(backend), axes_of(backend)
    kernels = kernels_of(cells, backend)
    assert cell_range[0] <= len(cells) <= cell_range[1] and kernel_range[0] <= len(kernels) <= kernel_range[1]
    assert (len(set(cells)), len(kernels)) == matrix_size(backend) and len(set(cells)) == len(cells)
    rows = [cell.row for cell in cells]
    assert not any(rule.broken_by(row) for row in rows for rule in rules)
    assert set().union(*(combinations_of(row, 2) for row in rows)) == legal_combinations(axes, rules, 2)
    kernel_axes = kernel_axes_of(backend)
    of_kernels = [{axis: cell.row[axis] for axis in kernel_axes} for cell in cells if cell.mask in kernel_axes["mask"]]
    have = set().union(*(combinations_of(row, STRENGTH) for row in of_kernels))
    assert have >= legal_combinations(kernel_axes, rules, STRENGTH)
    # Whatever of the path axes one cell of a kernel has, with the same operation, all have.
    paths: dict[Any, set[Any]] = {}
    for cell in cells:
        paths.setdefault((cell.variants(backend), cell.op), set()).add((cell.mask, *(cell.row[axis] for axis in PATH_AXES)))
    for (variants, op), found in paths.items():
        splits = {path[-1] for path in found}
        masks = 1 if op == "decode" else 2
        assert len(found) == masks * 4 * len(splits), (str(variants[0]), op, found)


def test_fa3_has_every_combination_that_the_library_lets_it_have() -> None:
    """One for one, by asking for it; so a kernel that fa3 is taught comes into the matrix by itself."""
    axes = {axis: values for axis, values in AXES.items() if axis in KERNEL_AXES or axis == "page"}
    legal = {tuple(row.items()) for row in product({axis: axes_of("fa3")[axis] for axis in axes}, rules_of("fa3"))}
    for row in product({**axes, "tile": ("64",)}, RULES):
        try:
            choose_backend("fa3", options_of(row), FA3_ARCH, row["mask"] in ("bool", "packed"), 64)
        except UnsupportedError:
            assert tuple(row.items()) not in legal, row
        else:
            assert tuple(row.items()) in legal, row
    served = {cell.variants("fa3")[0] for cell in full("fa3")}
    # fp8 queries have tests of their own, tests/attention/test_fp8_queries.py.
    assert {variant.backend for variant in served} == {"fa3"}
    of_16_bits = [variant for variant in fa3_variants() if variant.q_dtype != FP8_QUERY_TYPE]
    # Which of its tiles a kernel takes, batches decide.
    assert {replace(variant, cta_tile_q=128, kv_tile=None) for variant in of_16_bits} <= {
        replace(variant, cta_tile_q=128, kv_tile=None) for variant in served
    }
    assert all(words.startswith(("is for", "needs", "has no", "does not")) for words in fa3_refusals().values())


def test_the_same_cells_every_time() -> None:
    """Another process, with another order of sets, goes on with the cells of the first."""
    code = "from tests.matrix.cells import matrix_cells; [print(cell) for cell in matrix_cells('fa2')]"
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(cell) for cell in full()]
    assert full()[0].case() == full()[0].case()


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


def test_rules_of_a_table() -> None:
    axes = {"a": ("0", "1", "2"), "b": ("0", "1", "2"), "c": ("0", "1")}
    rules = rules_of_table(axes, (), lambda row: row["a"] != "2" and (row["b"], row["c"]) != ("1", "1"), "so it is")
    rows = product(axes, rules)
    assert len(rows) == 2 * 5 and not any(row["a"] == "2" or (row["b"], row["c"]) == ("1", "1") for row in rows)
    assert any(rule.axes == ("a",) and rule.broken_by({"a": "2"}) for rule in rules)
    assert any(rule.axes == ("b", "c") and rule.broken_by({"b": "1", "c": "1"}) for rule in rules)
    assert not any(rule.broken_by({"b": "1"}) for rule in rules)


def test_a_run_takes_the_backends_of_the_gpu() -> None:
    assert run.chosen_backends(None, "sm_90a") == ["fa2", "fa3"] and run.chosen_backends(None, "sm_80") == ["fa2"]
    assert run.chosen_backends("host", "sm_90a") == ["host"] and run.chosen_backends("fa3", "sm_80") == ["fa3"]


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


def test_cells_that_kill_their_process_are_failures() -> None:
    cells = [cell for page in ("16", "1", "64", "3", "512") for cell in [next(c for c in full() if c.page == page)]]
    found = {cell.page: outcome for cell, outcome in pool.run_cells(cells, "host", 1, 60.0, lambda: 1.0, fake_outcome)}
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
    report = make_report(cells, done, {"backend": "fa2"})
    assert (report["cells"], report["run"], report["failed"], report["complete"]) == (3, 2, 1, False)
    assert report["failures"] == [{"cell": str(cells[1]), "error": "a reason"}] and report["worst_output"] == 0.25


def test_the_sanitizer_sees_every_kind() -> None:
    cells = sanitizer.sanitizer_cells()
    assert len(cells) == 12
    for axis in ("op", "head_dim", "tile", "mask", "pos", "cap", "window", "sinks", "split", "types"):
        assert {cell.row[axis] for cell in cells} == set(AXES[axis]), axis
    assert {cell.split for cell in cells if cell.op == "decode"} == set(AXES["split"])
    assert {(cell.op, cell.tile) for cell in cells} == {(cell.op, cell.tile) for cell in full()}
    fa3 = sanitizer.sanitizer_cells("fa3", 6)
    for axis in ("op", "head_dim", "tile", "mask", "pos", "cap", "window", "sinks", "split", "types"):
        assert {cell.row[axis] for cell in fa3} == set(axes_of("fa3")[axis]), axis


def test_a_sanitizer_run_has_helper_kernels_and_both_backends() -> None:
    tasks = sanitizer.tasks_of({"fa2": full()[:4], "fa3": full("fa3")[:2]}, graph=False)
    assert [task.name for task in tasks[:3]] == ["appends", "append_indices", "merges"]
    assert [task.name.split()[0] for task in tasks[3:9]] == ["fa2", "fa3", "fa2", "fa2", "fa3", "fa2"]
    assert [task.name for task in tasks[9:]] == ["fa3 192 rows", "fa3 256 rows", "fa3 e4m3 queries"]
    assert {kernel.cta_tile_q for kernel in fa3_calls.kernels()} == {128, 192, 256}
    assert len({kernel.q_dtype for kernel in fa3_calls.kernels()}) == 2
    assert {task.family for task in tasks} < set(sanitizer.FAMILIES) and tasks[4].family == "fa3" and "(fa3_q" in tasks[4].name
    crowded = sanitizer.tasks_of({"fa2": full()[:2]}, graph=False, crowded=True)
    assert [task.name for task in crowded[4::2]] == [f"crowded {task.name}" for task in crowded[3::2]]
    with_crowds = {tool for tool in sanitizer.TOOLS if "--crowded" in sanitizer.inside_command(tool, "fa3")}
    assert with_crowds == {"racecheck"}


def test_tasks_inside_a_sanitizer(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise AssertionError("as told")

    good, bad = sanitizer.Task("good", "fa3", lambda: None), sanitizer.Task("bad", "fa3", fails)
    sanitizer.run_inside([bad, good], 60)
    out = capsys.readouterr().out
    assert "FAILED bad\n  AssertionError: as told" in out and "1 of 2 tasks passed, 1 failed" in out
    sanitizer.run_inside([good, good], -1)
    assert "0 of 2 tasks passed, 0 failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("exit_code", "output", "verdict"),
    [
        (0, "3 of 3 tasks passed, 0 failed\n========= ERROR SUMMARY: 0 errors", 0),
        (0, "2 of 3 tasks passed, 0 failed\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", sanitizer.UNFINISHED),
        (86, "3 of 3 tasks passed, 0 failed\n========= ERROR SUMMARY: 1 error", sanitizer.FAILED),
        (0, "2 of 3 tasks passed, 1 failed\n========= ERROR SUMMARY: 0 errors", sanitizer.FAILED),
        (0, "3 of 3 tasks passed, 0 failed", sanitizer.FAILED),
        (0, "========= ERROR SUMMARY: 0 errors", sanitizer.FAILED),
        (0, "3 of 3 tasks passed, 0 failed\n========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)", sanitizer.FAILED),
        (-9, "killed after 140 seconds", sanitizer.FAILED),
        (1, "========= Error: Device not supported. Please refer to the documentation", sanitizer.UNAVAILABLE),
    ],
)
def test_what_a_sanitizer_says_is_judged(exit_code: int, output: str, verdict: int) -> None:
    assert sanitizer.judge("memcheck", "fa3", exit_code, output, 1.0) == verdict


def test_findings_belong_to_the_task_before_them() -> None:
    first, second = "========= One\n=========   more\n========= \n", "========= Two\n========= ERROR SUMMARY: 2 errors"
    output = f"{findings.BEGIN}a\n{first}{findings.BEGIN}b\n{second}"
    found = findings.parse_findings(output)
    assert [(finding.task, finding.lines) for finding in found] == [("a", ("One", "more")), ("b", ("Two",))]
    assert findings.count_reported(output) == 2 and findings.count_reported("") is None


def test_outputs_are_filled_where_initcheck_does_not_see_their_writes() -> None:
    processes = [(tool, family) for tool in sanitizer.TOOLS for family in sanitizer.FAMILIES]
    filled = {process for process in processes if "--fill-outputs" in sanitizer.inside_command(*process)}
    assert filled == {("initcheck", "fa3")}


def test_the_page_shows_the_table() -> None:
    """`python -m tests.matrix.document REPORT` writes it."""
    assert PAGE.read_text(encoding="utf-8").split(RESULTS)[0] == table_part()
