# SPDX-License-Identifier: Apache-2.0
"""The end of a replay: what was done, how much workspace it took and would have taken, how fast and how exact it was."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from cupyinfer.cli.output import Report, count, format_bytes, format_table
from cupyinfer.cli.replay.session import ReplayConfig
from cupyinfer.cli.replay.stats import KindStats, ReplayStats
from cupyinfer.cli.replay.trace import FittedTrace
from cupyinfer.cli.reserve import RESERVE
from cupyinfer.dtypes import itemsize
from cupyinfer.schedule.bounds import WorkspaceLimits, workspace_bound
from cupyinfer.schedule.profile import DeviceProfile
from cupyinfer.workspace import WorkspaceSize

_MAX_LISTED = 10


def replay_report(
    trace: Path, fitted: FittedTrace, config: ReplayConfig, profile: DeviceProfile, backend: str, stats: ReplayStats
) -> Report:
    """Everything a replay found; exit code 1 if any of it is wrong."""
    bounds = {kind: _bound(kind, config, profile, backend) for kind in stats.kinds}
    for kind, measured in stats.kinds.items():
        if measured.peak_float_bytes > bounds[kind].float_bytes or measured.peak_int_bytes > bounds[kind].int_bytes:
            stats.faults.append(f"{kind}: the largest step exceeds the bound for the limits")
    plan_p50, plan_p99 = np.percentile(stats.plan_seconds, (50, 99)) * 1e3
    data = {
        "trace": str(trace),
        "backend": backend,
        "device": asdict(profile),
        "model": asdict(config.shape),
        "limits": asdict(config.limits),
        "length_scale": fitted.scale,
        "requests": stats.num_requests,
        "clipped_requests": fitted.num_clipped,
        "preemptions": stats.num_preempted,
        "steps": stats.num_steps,
        "checked_steps": stats.num_checked_steps,
        "wall_seconds": round(stats.wall_seconds, 3),
        "plan_ms": {"p50": round(plan_p50, 4), "p99": round(plan_p99, 4)},
        **{kind: _kind_data(kind, measured, bounds[kind], config) for kind, measured in stats.kinds.items()},
        "fixed_reserve": RESERVE._asdict(),
        "accuracy": {
            "rows": stats.accuracy.num_rows,
            "worst_error": _finite(stats.accuracy.worst_error),
            "worst_error_over_tolerance": _finite(stats.accuracy.worst_ratio),
            "worst_lse_error_over_tolerance": _finite(stats.accuracy.worst_lse_ratio),
            "mismatches": len(stats.accuracy.mismatches),
            "first_mismatches": stats.accuracy.mismatches[:_MAX_LISTED],
        },
        "workspace_faults": len(stats.faults),
        "first_workspace_faults": stats.faults[:_MAX_LISTED],
    }
    return Report(
        data, _text(trace, fitted, config, profile, backend, stats, data, bounds), int(bool(stats.accuracy.mismatches or stats.faults))
    )


def _finite(value: float) -> float | None:
    """JSON has no infinity, the error of a result that is no number."""
    return value if math.isfinite(value) else None


def _bound(kind: str, config: ReplayConfig, profile: DeviceProfile, backend: str) -> WorkspaceSize:
    limits, shape = config.limits, config.shape
    bounded = WorkspaceLimits(
        kind,
        limits.max_batch if kind == "decode" else min(limits.max_batch, limits.chunk),
        shape.num_qo_heads,
        shape.num_kv_heads,
        shape.head_dim,
        max_num_qo_tokens=None if kind == "decode" else limits.chunk,
        # The host backend's page tables are host arrays, which the int workspace holds.
        max_num_pages=limits.num_pages if backend == "host" else None,
        page_size=shape.page_size,
        kv_data_type=shape.dtype,
    )
    return workspace_bound(bounded, profile)


def _kind_data(kind: str, measured: KindStats, bound: WorkspaceSize, config: ReplayConfig) -> dict[str, Any]:
    key_bytes = 2 * config.shape.num_kv_heads * config.shape.head_dim * itemsize(config.shape.dtype)
    seconds = measured.attention_seconds
    return {
        "batches": measured.num_batches,
        "tokens": measured.num_tokens,
        "peak": {"float_bytes": measured.peak_float_bytes, "int_bytes": measured.peak_int_bytes},
        "bound": bound._asdict(),
        "attention_seconds": round(seconds, 6),
        "kv_gigabytes_per_second": round(measured.num_keys * key_bytes / seconds / 1e9, 3) if seconds else None,
    }


def _text(
    trace: Path,
    fitted: FittedTrace,
    config: ReplayConfig,
    profile: DeviceProfile,
    backend: str,
    stats: ReplayStats,
    data: dict[str, Any],
    bounds: dict[str, WorkspaceSize],
) -> str:
    prefill, decode = stats.kinds["prefill"], stats.kinds["decode"]
    limits, accuracy = config.limits, stats.accuracy
    where = "NumPy (host backend)" if backend == "host" else f"{profile.name} ({backend} backend, {profile.num_sms} SMs, {profile.arch})"
    notes = []
    if fitted.scale != 1:
        notes.append(f"all lengths times {fitted.scale:.3g}")
    if fitted.num_clipped:
        notes.append(f"{count(fitted.num_clipped, 'request')} clipped to fit")
    rows = [(kind, measured.peak_float_bytes, measured.peak_int_bytes) for kind, measured in stats.kinds.items()]
    rows = [(f"{kind}, largest step", floats, ints) for kind, floats, ints in rows]
    rows += [(f"{kind}, bound for these limits", *bound) for kind, bound in bounds.items()]
    rows.append(("fixed reserve, per wrapper", *RESERVE))
    peak = WorkspaceSize(max(prefill.peak_float_bytes, decode.peak_float_bytes), max(prefill.peak_int_bytes, decode.peak_int_bytes))
    exact = "each of exactly the size asked for" if not stats.faults else f"{count(len(stats.faults), 'fault')} found"
    verdict = f"{count(len(accuracy.mismatches), 'mismatch', 'mismatches')}"
    bandwidth = {kind: f"{data[kind]['kv_gigabytes_per_second'] or 0:,.4g} GB/s" for kind in stats.kinds}
    lines = [
        f"Replayed {count(stats.num_requests, 'request')} of {trace.name} on {where} in {stats.wall_seconds:.1f} s",
        *(f"  note          {note}" for note in notes),
        f"  model         {config.shape}",
        f"  limits        {limits.max_batch} requests at once, {limits.chunk:,} prompt tokens a step, {limits.num_pages:,} pages",
        f"  work          {count(stats.num_steps, 'step')}, {prefill.num_tokens:,} prompt tokens, {decode.num_tokens:,} decoded tokens, "
        f"{count(stats.num_preempted, 'preemption')}",
        f"  workspaces    {count(len(stats.plan_seconds), 'plan')}, {exact}; guard bytes checked after every run",
        "",
        format_table(("workspace bytes", "float", "int"), rows),
        "",
        f"  memory        {format_bytes(peak.total_bytes)} hold every step; a fixed reserve holds {format_bytes(RESERVE.total_bytes)}, "
        f"{RESERVE.total_bytes / max(1, peak.total_bytes):,.0f} times as much",
        f"  plan time     p50 {data['plan_ms']['p50']:.3f} ms, p99 {data['plan_ms']['p99']:.3f} ms",
        f"  attention     prefill {prefill.attention_seconds:.3f} s, decode {decode.attention_seconds:.3f} s",
        f"  KV bandwidth  prefill {bandwidth['prefill']}, decode {bandwidth['decode']}",
        f"  accuracy      {count(accuracy.num_rows, 'row')} of {count(stats.num_checked_steps, 'step')} against float64: worst error "
        f"{accuracy.worst_error:.3g}, {accuracy.worst_ratio:.2f} of its tolerance; {verdict}",
    ]
    for title, found in (("mismatch", accuracy.mismatches), ("workspace fault", stats.faults)):
        lines += [f"  {title}: {line}" for line in found[:_MAX_LISTED]]
        lines += [f"  and {len(found) - _MAX_LISTED:,} more" for _ in range(len(found) > _MAX_LISTED)]
    return "\n".join(lines)
