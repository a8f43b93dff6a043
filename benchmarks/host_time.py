# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.host_time``: host microseconds of sizing, planning and running, beside their targets and FlashInfer's.

Sizing for a named GPU, and the stages of a plan up to its records, are NumPy and the same everywhere. `plan` and `run` are timed on
the GPU where there is one, and otherwise `plan` on the host backend. They are timed twice: *in a loop* as a serving engine calls them
(`serving_loop.py`), and *in turns*, where every call finds the processor's caches and predictors filled by all others.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import cupyinfer
from benchmarks.cases import Case
from benchmarks.results import commit, versions
from benchmarks.serving_loop import BLOCK, Served, serve, served_flashinfer, served_ours
from cupyinfer.attention.decode import decode_request
from cupyinfer.attention.prefill import paged_prefill_request
from cupyinfer.attention.request import AttentionRequest
from cupyinfer.schedule.planner import PlanDraft
from cupyinfer.schedule.profile import named_profile
from cupyinfer.workspace import AlignedAllocator

#: The batches: lengths, and requests.
BATCHES = (("equal", 256), ("mixed", 256), ("mixed", 1024))
#: Most microseconds of a plan by requests, and of a run.
PLAN_TARGETS = {256: 60.0, 1024: 150.0}
RUN_TARGET = 15.0
_QO_HEADS, _KV_HEADS, _HEAD_DIM, _PAGE_SIZE = 32, 8, 128, 16
_CHUNK = 64


@dataclass(frozen=True)
class HostRow:
    """Host microseconds of one call.

    Attributes:
        kind: "decode" or "prefill".
        batch: "equal" (2048 keys each) or "mixed" (128 to 2048 keys); prefill of 64 or of 1 to 128 new tokens.
        requests: requests in the batch.
        call: what was timed, and how; stages of a plan include the ones before them.
        us: median; `us_min` and `us_max` bound the rounds.
        target: most that the median may be, or None.
    """

    kind: str
    batch: str
    requests: int
    call: str
    us: float
    us_min: float
    us_max: float
    target: float | None = None


def make_case(kind: str, batch: str, requests: int) -> Case:
    """A batch of that many requests; prefill is chunked, so it has keys before its queries."""
    rng = np.random.default_rng(requests)
    kv_lens = [2048] * requests if batch == "equal" else rng.integers(128, 2049, size=requests).tolist()
    qo_lens = [1] * requests
    if kind == "prefill":
        qo_lens = [_CHUNK] * requests if batch == "equal" else rng.integers(1, 2 * _CHUNK + 1, size=requests).tolist()
    name = f"host, {kind} {batch} {requests}"
    return Case(name, kind, _QO_HEADS, _KV_HEADS, _HEAD_DIM, tuple(qo_lens), tuple(kv_lens), _PAGE_SIZE, kind == "prefill")


def measure_calls(
    calls: dict[str, Callable[[], object]], rounds: int, settle: Callable[[], object]
) -> dict[str, tuple[float, float, float]]:
    """Median, least and most microseconds of every call, in rounds of all of them, each on an idle stream."""
    microseconds: dict[str, list[float]] = {name: [] for name in calls}
    for at in range(rounds + 3):
        for name, call in calls.items():
            settle()
            start = time.perf_counter_ns()
            call()
            elapsed = (time.perf_counter_ns() - start) / 1e3
            if at >= 3:
                microseconds[name].append(elapsed)
    settle()
    return {name: (float(np.median(times)), min(times), max(times)) for name, times in microseconds.items()}


def plan_arguments(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `plan` for a paged cache, all on the host."""
    pages = np.array(case.pages_per_request)
    indptr = _offsets(pages)
    last = (np.array(case.kv_lens) - (pages - 1) * case.page_size).astype(np.int32)
    table = indptr, np.random.default_rng(0).permutation(int(indptr[-1])).astype(np.int32), last
    heads = case.num_qo_heads, case.num_kv_heads, case.head_dim, case.page_size
    if case.kind == "decode":
        return (*table, *heads), {"q_data_type": "bfloat16"}
    return (_offsets(np.array(case.qo_lens)), *table, *heads), {"q_data_type": "bfloat16", "causal": case.causal}


def _offsets(lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def _wrapper(kind: str, **options: Any) -> Any:
    names = {"decode": cupyinfer.BatchDecodeWithPagedKVCacheWrapper, "prefill": cupyinfer.BatchPrefillWithPagedKVCacheWrapper}
    return names[kind](kv_layout="NHD", **options)


def stage_calls(case: Case, profile_name: str) -> dict[str, Callable[[], object]]:
    """The stages of planning that need no GPU; each includes the ones before it."""
    profile, (args, options) = named_profile(profile_name), plan_arguments(case)
    make_request = decode_request if case.kind == "decode" else paged_prefill_request

    def request() -> AttentionRequest:
        return make_request(*args, **options)

    def draft() -> PlanDraft:
        return request().draft(profile)

    records = np.empty(draft().size.int_bytes, np.uint8)

    def written() -> None:
        plan = draft()
        plan.write_records(plan.place(AlignedAllocator(), AlignedAllocator()), records)

    return {"stage: arguments": request, "stage: schedule": draft, "stage: records": written}


def wrapper_calls(case: Case, profile_name: str, gpu: bool) -> dict[str, Callable[[], object]]:
    """workspace_size for the named GPU, plan, and on a GPU run, in workspaces of the exact size."""
    args, options = plan_arguments(case)
    sizer = _wrapper(case.kind, profile=profile_name)
    calls: dict[str, Callable[[], object]] = {"workspace_size": lambda: sizer.workspace_size(*args, **options)}
    if gpu:
        from benchmarks.data import CaseData
        from benchmarks.ours import Decode, Prefill
        from benchmarks.peers import FlashInferDecode, FlashInferPrefill

        data = CaseData(case)
        ours, peer = (
            (Decode(), FlashInferDecode("FlashInfer", True))
            if case.kind == "decode"
            else (Prefill("cupyinfer", True), FlashInferPrefill("FlashInfer", "fa2", True))
        )
        for adapter, of in ((ours, ""), *(((peer, "FlashInfer "),) if peer.missing is None else ())):
            prepared = adapter.prepare(data)
            assert prepared.plan is not None
            calls |= {of + "plan": prepared.plan, of + "run": prepared.launch}
        return calls
    wrapper = _wrapper(case.kind, backend="host")
    size = wrapper.workspace_size(*args, **options)
    wrapper.reset_workspace_buffer(_aligned(size.float_bytes), _aligned(size.int_bytes))
    return {**calls, "plan": lambda: wrapper.plan(*args, **options)}


def _aligned(count: int) -> Any:
    """A NumPy byte buffer that starts on a multiple of 16."""
    raw = np.empty(max(16, count) + 15, dtype=np.uint8)
    start = -raw.ctypes.data % 16
    return raw[start : start + max(16, count)]


def served(case: Case, gpu: bool) -> list[Served]:
    """Who takes part in the serving loop of `BLOCK` steps that begins with this case."""
    cases = [replace(case, kv_lens=tuple(length + at for length in case.kv_lens)) for at in range(BLOCK)]
    steps = [plan_arguments(one) for one in cases]
    if not gpu:
        return [served_ours(_wrapper(case.kind, backend="host"), steps, _aligned, None)]
    import cupy

    from benchmarks.data import CaseData

    data = CaseData(cases[-1])
    out, wrapper, kv = cupy.empty_like(data.q), _wrapper(case.kind, backend="auto"), data.paged_kv
    # Where nothing lies in workspaces yet, a wrapper sizes for the current GPU.
    ours = served_ours(wrapper, steps, lambda count: cupy.empty(max(16, count), cupy.uint8), lambda: wrapper.run(data.q, kv, out=out))
    peer = served_flashinfer(case.kind, data, steps)
    return [ours] if peer is None else [ours, peer]


def loop_rows(case: Case, batch: str, gpu: bool, rounds: int, settle: Callable[[], object]) -> list[HostRow]:
    """Time the serving loop."""
    rows = []
    for call, taken in serve(served(case, gpu), max(2, rounds // BLOCK), settle).items():
        target = {"plan": PLAN_TARGETS.get(case.batch_size), "first run": RUN_TARGET, "later runs": RUN_TARGET}.get(call)
        median = float(np.median(taken))
        rows.append(HostRow(case.kind, batch, case.batch_size, f"in a loop: {call}", median, min(taken), max(taken), target))
    return rows


def has_gpu() -> bool:
    """Whether CuPy sees a device."""
    try:
        import cupy

        return bool(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # no CuPy, no driver or no device all mean the same here
        return False


def measure(profile: str, rounds: int, kinds: Sequence[str], batches: Iterable[tuple[str, int]] = BATCHES) -> list[HostRow]:
    """Time every call on every batch."""
    gpu = has_gpu()

    def settle() -> None:
        if gpu:
            import cupy

            cupy.cuda.runtime.deviceSynchronize()

    rows = []
    for kind in kinds:
        for batch, requests in batches:
            case = make_case(kind, batch, requests)
            rows += loop_rows(case, batch, gpu, rounds, settle)
            calls = {**wrapper_calls(case, profile, gpu), **stage_calls(case, profile)}
            times = measure_calls(calls, rounds, settle)
            targets = {"plan": PLAN_TARGETS.get(requests), "run": RUN_TARGET, "workspace_size": times["plan"][0]}
            rows += [HostRow(kind, batch, requests, f"in turns: {call}", *times[call], targets.get(call)) for call in calls]
    return rows


def table(rows: Sequence[HostRow]) -> str:
    """Markdown: a line per call, a column per batch, medians in microseconds with the target behind a bar where there is one."""
    columns = list(dict.fromkeys((row.kind, row.batch, row.requests) for row in rows))
    lines = ["| us, median | " + " | ".join(f"{kind}, {requests} {batch}" for kind, batch, requests in columns) + " |"]
    lines.append("| --- |" + " ---: |" * len(columns))
    for call in dict.fromkeys(row.call for row in rows):
        found = {(row.kind, row.batch, row.requests): row for row in rows if row.call == call}
        cells = [_cell(found.get(column)) for column in columns]
        lines.append(f"| {call} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: HostRow | None) -> str:
    if row is None:
        return ""
    return f"{row.us:.1f}" if row.target is None else f"{row.us:.1f} (at most {row.target:.0f})"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", default="h200", help="GPU that is sized and scheduled for (default: h200)")
    parser.add_argument("--rounds", type=int, default=300, help="timed rounds of all calls (default: 300)")
    parser.add_argument("--kinds", nargs="+", choices=("decode", "prefill"), default=["decode", "prefill"], help="default: both")
    parser.add_argument("--out", type=Path, help="JSON to write")
    args = parser.parse_args(argv)
    rows = measure(args.profile, args.rounds, args.kinds)
    if args.out:
        environment = {"versions": versions(), "commit": commit(), "gpu": has_gpu()}
        args.out.write_text(
            json.dumps({"environment": environment, "rows": [asdict(row) for row in rows]}, indent=1) + "\n", encoding="utf-8"
        )
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
