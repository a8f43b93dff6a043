# SPDX-License-Identifier: Apache-2.0
"""The picture of a run: share of the ceiling per case, ours against the peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.results import Results, Row

_INK, _FAINT, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
_OURS = "#c2410c"
#: One marker and colour per peer, the same in every picture.
_PEERS = {
    "flashinfer cuda": ("s", "#6b7280"),
    "flashinfer tc": ("D", "#2563eb"),
    "flashinfer xqa": ("^", "#0d9488"),
    "flashinfer fa2 ragged": ("s", "#6b7280"),
    "flashinfer fa2 paged": ("s", "#b0b7c3"),
    "flashinfer fa3 ragged": ("D", "#2563eb"),
    "flashinfer fa3 paged": ("D", "#93b4f5"),
    "cudnn": ("^", "#0d9488"),
    "flash-attention 2": ("v", "#a16207"),
    "flash-attention 3": ("P", "#7c3aed"),
}
_PANELS = {
    "decode": "Decode: KV bytes per second, share of a read-only stream of the same bytes",
    "prefill": "Prefill: operations per second, share of a large bf16 matrix product",
}


def _style(row: Row) -> dict[str, Any]:
    if row.ours:
        paged = not row.variant.endswith("ragged")
        return {"marker": "o", "s": 75, "facecolor": _OURS if paged else "white", "edgecolor": _OURS, "linewidth": 1.6, "zorder": 3}
    marker, colour = _PEERS.get(row.variant, ("x", _FAINT))
    return {"marker": marker, "s": 30, "facecolor": colour, "edgecolor": "white", "linewidth": 0.6, "zorder": 4}


def _panel(axes: Any, results: Results, kind: str) -> None:
    cases = results.case_names(kind)
    labels = []
    seen: set[str] = set()
    for y, case in enumerate(cases):
        rows = [row for row in results.of_case(case) if row.share is not None]
        labels.append(results.of_case(case)[0].label)
        best = max((row.share for row in rows if not row.ours and row.share is not None), default=None)
        mine = max((row.share for row in rows if row.ours and row.share is not None), default=None)
        if best is not None and mine is not None:
            axes.plot([100 * best, 100 * mine], [y, y], color=_OURS if mine >= best else _FAINT, linewidth=2.2, alpha=0.45, zorder=2)
        for row in rows:
            axes.scatter(100 * (row.share or 0), y, label=None if row.variant in seen else row.variant, clip_on=False, **_style(row))
            seen.add(row.variant)
    axes.axvline(100, color=_INK, linewidth=1, zorder=1)
    axes.set_yticks(range(len(cases)), labels, fontsize=8.5, color=_INK)
    axes.set_ylim(len(cases) - 0.4, -0.6)
    axes.set_xlim(0, 105)
    axes.set_xticks(range(0, 101, 20), [f"{tick}%" for tick in range(0, 101, 20)], fontsize=8.5, color=_FAINT)
    axes.grid(axis="both", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    handles, names = axes.get_legend_handles_labels()
    axes.set_title(_PANELS[kind], loc="left", fontsize=10.5, color=_INK, pad=12 + 14 * -(-len(names) // 4))
    order = sorted(range(len(names)), key=lambda i: (not names[i].startswith("cupyinfer"), i))
    legend = axes.legend(
        [handles[i] for i in order],
        [names[i] for i in order],
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=4,
        frameon=False,
        fontsize=8,
        handletextpad=0.2,
        columnspacing=1.1,
        borderaxespad=0.1,
    )
    legend.set_in_layout(False)


def draw(results: Results, path: Path) -> None:
    """Draw one panel per kind of case that the run holds.

    Raises:
        ValueError: no row has a figure.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = [kind for kind in _PANELS if any(row.kind == kind and row.share is not None for row in results.rows)]
    if not kinds:
        raise ValueError("nothing to draw: no row of these results has a figure")
    counts = [len(results.case_names(kind)) for kind in kinds]
    heights = [0.25 * count + 1.3 for count in counts]
    figure, panels = pyplot.subplots(len(kinds), 1, figsize=(10, sum(heights)), height_ratios=heights, squeeze=False, layout="constrained")
    for axes, kind in zip(panels[:, 0], kinds, strict=True):
        _panel(axes, results, kind)
    gpu = results.environment.get("gpu", {})
    commit = str(results.environment.get("commit") or "")[:12]
    figure.supxlabel(" · ".join(part for part in (gpu.get("name", ""), commit) if part), fontsize=8, color=_FAINT, x=0.99, ha="right")
    figure.savefig(path, dpi=150, facecolor="white")
    pyplot.close(figure)
