# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.matrix.document REPORT...`: write docs/MATRIX.md from the declared table and reports of the matrix."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.matrix.axes import KERNEL_AXES, PATH_AXES, RULES, TILE_RULES, TURN_AXES, fa3_refusals
from tests.matrix.cells import matrix_size
from tests.matrix.illegal import ILLEGAL, sentence
from tests.matrix.report import ROOT

PAGE = ROOT / "docs" / "MATRIX.md"
RESULTS = "## Results"
_SHOWN_FAILURES = 20


def table_part() -> str:
    """Everything above the results: what the table declares."""
    (cells, kernels), (all_cells, all_kernels) = matrix_size("fa2"), matrix_size("fa2", every_kernel=True)
    fa3_cells, fa3_kernels = matrix_size("fa3")
    lines = [
        "# The matrix",
        "",
        "Every combination of what selects code is a cell: sized exactly, planned, run eagerly and replayed in a CUDA graph, each twice,",
        "and compared with a float64 oracle. Repeated runs must be equal bit for bit whatever outputs and scratch held before, and nothing",
        "outside of outputs and workspaces may change. `tests/matrix/axes.py` declares the table; this page is written from it and from",
        "the report of a run.",
        "",
        "```",
        "make test-matrix                        # compile, run every cell on the GPU, write .cache/matrix/BACKEND/report.json",
        "make test-matrix ARGS='--seconds 120'   # stop after two minutes; the next call goes on where this one stopped",
        "make test-matrix ARGS='--every-kernel'  # the whole product of the kernel axes",
        "make test-sanitizer                     # memcheck, racecheck and initcheck over a few cells",
        "python -m tests.matrix.document .cache/matrix/*/report.json   # write this page",
        "```",
        "",
        "## Axes",
        "",
        f"There are {cells} cells on {kernels} kernels of fa2, and {fa3_cells} cells on {fa3_kernels} kernels of fa3. The kernels of fa2",
        "hold every legal combination of any four kernel axes, those of fa3 are all there are, and every kernel runs every legal",
        "combination of path axes and of the masks it serves. The other axes take turns: each of their values meets every value of every",
        "other axis that it may meet. With `--every-kernel`, the whole product of the kernel axes, fa2 has",
        f"{all_cells} cells on {all_kernels} kernels. `make test` runs a subset with every legal pair of values on the host backend.",
        "",
        "| axis | selects | values |",
        "|---|---|---|",
    ]
    for axes, selects in ((KERNEL_AXES, "kernel"), (PATH_AXES, "path"), (TURN_AXES, "takes turns")):
        lines += [f"| {axis} | {selects} | {', '.join(values)} |" for axis, values in axes.items()]
    lines += ["", "Values that never meet, because no plan leads there:", ""]
    lines += [f"- {', '.join(rule.axes)}: {rule.reason}." for rule in RULES + TILE_RULES]
    lines += [
        "",
        "Values that only fa2 serves. fa3 has tiles of its own: there `tile` takes turns, and is a batch that would fill that tile of fa2.",
        "",
    ]
    lines += [f"- {value}: fa3 {reason}." for value, reason in fa3_refusals().items()]
    lines += [
        "",
        "Queries in fp8, which fa3 and the host serve, are no value of `types`: `tests/attention/test_fp8_queries.py` takes them through",
        "every width, paged and ragged, with each feature in turn.",
        "",
        "## Refused",
        "",
        "Asking for one of these is an error of sizing and of planning:",
        "",
        "| combination | operations | error |",
        "|---|---|---|",
    ]
    lines += [f"| {entry.what.strip()} | {', '.join(entry.ops)} | {type_and_sentence(entry)} |" for entry in ILLEGAL]
    return "\n".join(lines) + "\n\n"


def type_and_sentence(entry: Any) -> str:
    """The error as a table cell."""
    return f"`{entry.error.__name__}`: " + sentence(entry).replace("|", "\\|")


def results_part(report: dict[str, Any]) -> str:
    """A report as text and a table."""
    total = matrix_size(report["backend"])[0]
    state = f" of {total}" if report["run"] < total else ""
    lines = [
        f"### {report['backend']}" + (f", {report['gpu']}" if report["gpu"] != "none" else ""),
        "",
        f"{report['run']}{state} cells run, {report['passed']} passed, {report['failed']} failed, on {report['kernels']} kernels, in "
        f"{report['seconds']:.0f} s. Sources `{report['sources']}`.",
        "",
        "The largest error of an output element is a share of its bound (twice the error of an honest low-precision computation, plus",
        "two output roundings); that of a base-2 log-sum-exp is absolute.",
        "",
        "| axis | value | cells | failed | output error / bound | log-sum-exp error |",
        "|---|---|---|---|---|---|",
    ]
    for axis, values in report["axes"].items():
        for value, found in values.items():
            lines.append(
                f"| {axis} | {value} | {found['run']} | {found['failed']} | {found['worst_output']:.2f} | {found['worst_lse']:.1e} |"
            )
    for failure in report["failures"][:_SHOWN_FAILURES]:
        lines += ["", f"Failed: `{failure['cell']}`", "", "```", failure["error"], "```"]
    return "\n".join(lines) + "\n"


def page(reports: Sequence[dict[str, Any]]) -> str:
    """The whole page."""
    return table_part() + RESULTS + "\n\n" + "\n".join(map(results_part, reports))


if __name__ == "__main__":
    PAGE.write_text(page([json.loads(Path(path).read_text(encoding="utf-8")) for path in sys.argv[1:]]), encoding="utf-8")
    print(f"wrote {PAGE}")
