# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.host_time``: host microseconds of sizing, planning and running, by number of requests.

Sizing for a named GPU, and its schedule alone, stage by stage, are NumPy and the same everywhere. `plan` and `run` are timed on
the GPU where there is one, and otherwise `plan` on the host backend.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import cupyinfer
from benchmarks.cases import Case
from benchmarks.results import commit, versions
from cupyinfer.dtypes import itemsize
from cupyinfer.schedule.geometry import decode_geometry
from cupyinfer.schedule.profile import named_profile
from cupyinfer.schedule.schedule import SplitPolicy, make_schedule
from cupyinfer.schedule.tiles import tile_config
from cupyinfer.schedule.tiling import KeySpan, choose_tile_q, make_tiles

REQUESTS = (1, 64, 256, 1024)
_QO_HEADS, _KV_HEADS, _HEAD_DIM, _PAGE_SIZE = 32, 8, 128, 16


@dataclass(frozen=True)
class HostRow:
    """Host microseconds of one call.

    Attributes:
        call: what was timed.
        batch: "equal" (2048 keys each) or "mixed" (128 to 2048 keys).
        requests: requests in the batch.
        us: median; `us_min` and `us_max` bound the repeats.
    """

    call: str
    batch: str
    requests: int
    us: float
    us_min: float
    us_max: float


def make_case(batch: str, requests: int) -> Case:
    """A decode batch of that many requests."""
    kv_lens = [2048] * requests if batch == "equal" else np.random.default_rng(requests).integers(128, 2049, size=requests).tolist()
    return Case(f"host, {batch} {requests}", "decode", _QO_HEADS, _KV_HEADS, _HEAD_DIM, (1,) * requests, tuple(kv_lens), _PAGE_SIZE)


def _time(call: Callable[[], object], repeats: int, settle: Callable[[], object]) -> tuple[float, float, float]:
    for _ in range(3):
        call()
    microseconds = []
    for _ in range(repeats):
        settle()
        start = time.perf_counter_ns()
        call()
        microseconds.append((time.perf_counter_ns() - start) / 1e3)
    settle()
    return float(np.median(microseconds)), min(microseconds), max(microseconds)


def _host_arrays(case: Case) -> tuple[Any, Any, Any]:
    """page_indptr, page_indices, last_page_len."""
    pages = np.array(case.pages_per_request)
    indptr = np.concatenate(([0], np.cumsum(pages))).astype(np.int32)
    last = (np.array(case.kv_lens) - (pages - 1) * case.page_size).astype(np.int32)
    return indptr, np.random.default_rng(0).permutation(int(indptr[-1])).astype(np.int32), last


def schedule_calls(case: Case, profile_name: str) -> dict[str, Callable[[], object]]:
    """The stages of planning for a named GPU; each includes the ones before it."""
    profile = named_profile(profile_name)
    indptr, _, last = _host_arrays(case)
    group = case.num_qo_heads // case.num_kv_heads
    tile_q = choose_tile_q(decode_geometry(indptr, last, case.page_size), group, case.head_dim, False)
    config = tile_config(tile_q, case.head_dim, case.head_dim, itemsize(case.kv_dtype), profile.smem_per_sm, profile.smem_per_cta)

    def geometry() -> Any:
        return decode_geometry(indptr, last, case.page_size)

    def tiles() -> Any:
        return make_tiles(geometry(), group, tile_q, config.kv_tile, KeySpan())

    def schedule() -> Any:
        return make_schedule(tiles(), config, profile.num_sms, case.num_kv_heads, SplitPolicy())

    return {f"{name}, {profile.name}": call for name, call in (("geometry", geometry), ("tiles", tiles), ("schedule", schedule))}


def wrapper_calls(case: Case, profile_name: str, gpu: bool) -> dict[str, Callable[[], object]]:
    """workspace_size for the named GPU, plan, and on a GPU run, of the decode wrapper in workspaces of the exact size."""
    args = (*_host_arrays(case), case.num_qo_heads, case.num_kv_heads, case.head_dim, case.page_size)
    sizer = cupyinfer.BatchDecodeWithPagedKVCacheWrapper(kv_layout="NHD", profile=profile_name)
    calls: dict[str, Callable[[], object]] = {
        f"workspace_size, {profile_name}": lambda: sizer.workspace_size(*args, q_data_type="bfloat16")
    }
    if gpu:
        from benchmarks.data import CaseData
        from benchmarks.ours import Decode

        prepared = Decode().prepare(CaseData(case))
        assert prepared.plan is not None
        return {**calls, "plan": prepared.plan, "run": prepared.launch}
    wrapper = cupyinfer.BatchDecodeWithPagedKVCacheWrapper(kv_layout="NHD", backend="host")
    size = wrapper.workspace_size(*args, q_data_type="bfloat16")
    wrapper.reset_workspace_buffer(_aligned(size.float_bytes), _aligned(size.int_bytes))
    return {**calls, "plan, host backend": lambda: wrapper.plan(*args, q_data_type="bfloat16")}


def _aligned(count: int) -> Any:
    """A NumPy byte buffer that starts on a multiple of 16."""
    raw = np.empty(max(16, count) + 15, dtype=np.uint8)
    start = -raw.ctypes.data % 16
    return raw[start : start + max(16, count)]


def has_gpu() -> bool:
    """Whether CuPy sees a device."""
    try:
        import cupy

        return bool(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # no CuPy, no driver or no device all mean the same here
        return False


def measure(profile: str, repeats: int, requests: Sequence[int] = REQUESTS) -> list[HostRow]:
    """Time every call on every batch."""
    gpu = has_gpu()

    def settle() -> None:
        if gpu:
            import cupy

            cupy.cuda.get_current_stream().synchronize()

    rows = []
    for batch in ("equal", "mixed"):
        for count in requests:
            case = make_case(batch, count)
            for name, call in {**schedule_calls(case, profile), **wrapper_calls(case, profile, gpu)}.items():
                rows.append(HostRow(name, batch, count, *_time(call, repeats, settle)))
    return rows


def table(rows: Sequence[HostRow]) -> str:
    """Markdown: a line per call and batch, a column per number of requests, medians in microseconds."""
    counts = sorted({row.requests for row in rows})
    lines = ["| call | batch | " + " | ".join(f"{count} requests" for count in counts) + " |", "| --- | --- |" + " ---: |" * len(counts)]
    for call, batch in dict.fromkeys((row.call, row.batch) for row in rows):
        us = {row.requests: row.us for row in rows if (row.call, row.batch) == (call, batch)}
        lines.append(f"| {call} | {batch} | " + " | ".join(f"{us[count]:.1f}" if count in us else "" for count in counts) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", default="h200", help="GPU the schedule alone is timed for (default: h200)")
    parser.add_argument("--repeats", type=int, default=200, help="timed calls (default: 200)")
    parser.add_argument("--requests", type=int, nargs="+", default=list(REQUESTS), help="batch sizes (default: 1 64 256 1024)")
    parser.add_argument("--out", type=Path, help="JSON to write")
    args = parser.parse_args(argv)
    rows = measure(args.profile, args.repeats, args.requests)
    if args.out:
        environment = {"versions": versions(), "commit": commit(), "gpu": has_gpu()}
        args.out.write_text(
            json.dumps({"environment": environment, "rows": [asdict(row) for row in rows]}, indent=1) + "\n", encoding="utf-8"
        )
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
