# SPDX-License-Identifier: Apache-2.0
"""Plans for CUDA graphs: offsets, grid and sizes of the largest batch, replays after new plans, batches that do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyinfer.errors import ArgumentError
from tests.support.batches import Case, Data
from tests.support.memory import poisoned_array
from tests.support.runner import Call, assert_same_bits, run_case

# What a launch is made of: these may not change between plans that one graph replays.
FIXED = ("num_ctas", "cta_tile_q", "kv_tile", "float_bytes", "int_bytes", "cuda_graph")


def launch_of(info: Any) -> dict[str, int]:
    return {name: getattr(info, name) for name in (*FIXED, *(name for name in vars(info) if name.endswith("_offset")))}


def padded(case: Case, num_requests: int) -> Case:
    """A batch filled up with requests that have neither keys nor, in prefill, queries."""
    missing = num_requests - len(case.kv_lens)
    return replace(case, kv_lens=case.kv_lens + (0,) * missing, qo_lens=None if case.op == "decode" else case.queries + (0,) * missing)


PLAIN = {"heads": (8, 2), "graph": True}
#: Batches in turn, the first of which is the largest.
SEQUENCES: dict[str, tuple[list[Case], dict[str, int]]] = {
    "decode": (
        [Case(lens, **PLAIN) for lens in ((900, 33, 400, 1, 70, 16), (16, 33, 1, 0, 0, 0), (1500, 1, 1, 1, 2, 3))],
        {"max_num_pages": 120},
    ),
    "decode-no-split-page1": (
        [
            Case(lens, heads=(16, 2), page_size=1, dtype="bfloat16", disable_split_kv=True, graph=True)
            for lens in ((60,) * 24, (1000, 37) + (0,) * 22)
        ],
        {},
    ),
    "decode-fixed-split": (
        [Case(lens, fixed_split_size=8, **PLAIN) for lens in ((900, 33, 400), (5, 0, 1024), (128, 129, 127))],
        {"max_kv_len": 1024, "max_num_pages": 90},
    ),
    "decode-host-pages": ([Case(lens, indices_on="host", **PLAIN) for lens in ((900, 33, 400), (5, 0, 1))], {}),
    "paged": (
        [
            Case((600, 600), lens, "paged", heads=(8, 8), causal=True, graph=True)
            for lens in ((63, 65), (64, 64), (1, 127), (127, 1), (0, 5))
        ],
        {},
    ),
    "paged-no-keys": ([Case((5,) * 12 + (0,) * 12, (5,) * 24, "paged", heads=(40, 8), graph=True)], {}),
    "ragged": ([Case(kv, qo, "ragged", causal=True, **PLAIN) for kv, qo in (((600, 90, 7), (70, 20, 7)), ((90, 607, 0), (5, 90, 0)))], {}),
    "paged-sinks": ([Case((600, 9), qo, "paged", sinks=True, **PLAIN) for qo in ((30, 3), (1, 9))], {}),
}


class GraphCall:
    """One graph object, and the calls of a sequence that share it and its buffers.

    Workspaces are sized by the first call and then belong to the object. Arrays that a captured run reads keep their addresses: q, the
    caches and the outputs are as long as the longest of the sequence.
    """

    def __init__(self, name: str, backend: str) -> None:
        cases, capacity = SEQUENCES[name]
        rows = max(sum(case.queries) for case in cases)
        self.calls = [Call(case, backend, **({"max_num_qo_tokens": rows} if case.op != "decode" else {}), **capacity) for case in cases]
        first = self.calls[0]
        self.memory, self.wrapper, self.floats, self.ints, self.size = first.memory, first.wrapper, first.floats, first.ints, first.size
        self.num_rows = rows
        for call in self.calls:
            call.wrapper, call.floats, call.ints = self.wrapper, self.floats, self.ints
        shape = (rows, *first.data.q.shape[1:])
        self.q = self.memory.put(np.zeros(shape, first.data.q.dtype))
        largest = [max((call.data.caches[at] for call in self.calls), key=np.size) for at in (0, 1)]
        self.caches = [self.memory.put(np.zeros_like(cache)) for cache in largest]
        self.out, self.out_buffer = poisoned_array(self.memory, shape_dtype(first), shape)
        self.lse, self.lse_buffer = poisoned_array(self.memory, np.float32, shape[:2])

    def load(self, call: Call) -> None:
        """Put a call's inputs into the fixed arrays."""
        for array, values in zip((self.q, *self.caches), (call.data.q, *call.data.caches), strict=True):
            whole = np.zeros(array.shape, values.dtype)
            whole[tuple(slice(n) for n in values.shape)] = values
            self.memory.write(array, whole)
        self.out_buffer.fill(0xFF)
        self.lse_buffer.fill(0xFF)

    def run(self) -> None:
        case = self.calls[0].case
        kv = [tuple(self.caches)] if case.paged else self.caches
        self.wrapper.run(self.q, *kv, out=self.out, lse=self.lse, return_lse=True)

    def results(self, call: Call) -> tuple[Any, Any]:
        """The rows of the planned batch; rows past it must be untouched."""
        num_tokens = sum(call.case.queries)
        o, lse = self.memory.get(self.out), self.memory.get(self.lse)
        assert np.isnan(o[num_tokens:].astype(np.float32)).all() and np.isnan(lse[num_tokens:]).all()
        for buffer, name in ((self.out_buffer, "out"), (self.lse_buffer, "lse"), (self.floats, "floats"), (self.ints, "ints")):
            buffer.assert_guards_intact(name)
        return o[:num_tokens], lse[:num_tokens]


def shape_dtype(call: Call) -> Any:
    return call.data.q.dtype


@pytest.mark.parametrize("name", SEQUENCES)
def test_every_plan_launches_alike(name: str, backend: str) -> None:
    """Sizes, offsets and grid are those of the capacity; results are right; one object serves all batches in one pair of buffers."""
    graph = GraphCall(name, backend)
    for call in [*graph.calls, *graph.calls[::-1]]:
        call.plan()
        info = call.wrapper.plan_info
        assert (info.float_bytes, info.int_bytes) == tuple(graph.size)
        if call is graph.calls[0]:
            launch = launch_of(info)
        assert launch_of(info) == launch
        graph.load(call)
        graph.run()
        call.check(graph.results(call))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SEQUENCES)
def test_replay_after_new_plans(name: str) -> None:
    """Captured once with the first batch, replayed for every other one after its plan: equal to eager, bit for bit."""
    import cupy

    graph = GraphCall(name, "fa2")
    stream = cupy.cuda.Stream(non_blocking=True)
    first = graph.calls[0]
    with stream:
        first.plan()
        graph.load(first)
        graph.run()
        stream.synchronize()
        stream.begin_capture()
        graph.run()
        captured = stream.end_capture()
        for call in [*graph.calls, *graph.calls[::-1]]:
            graph.ints.fill(0xFF)
            graph.floats.fill(0xFF)
            call.plan()
            graph.load(call)
            graph.run()
            stream.synchronize()
            eager = graph.results(call)
            call.check(eager)
            for _ in range(3):
                graph.load(call)
                stream.synchronize()
                captured.launch(stream)
                stream.synchronize()
                assert_same_bits(graph.results(call), eager)


@pytest.mark.gpu
def test_a_run_of_many_layers_in_one_graph() -> None:
    """One plan, several runs captured one after the other: each leaves the counters as the next needs them."""
    import cupy

    call = Call(Case((5000, 33, 0), heads=(8, 2), graph=True), "fa2")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call.plan()
        want = call.run()
        outputs = [poisoned_array(call.memory, np.float16, call.q.shape)[0] for _ in range(8)]
        lses = [poisoned_array(call.memory, np.float32, call.q.shape[:2])[0] for _ in range(8)]
        stream.synchronize()
        stream.begin_capture()
        for out, lse in zip(outputs, lses, strict=True):
            call.run_into(out, lse)
        captured = stream.end_capture()
        for _ in range(5):
            captured.launch(stream)
        stream.synchronize()
    for out, lse in zip(outputs, lses, strict=True):
        assert_same_bits((call.memory.get(out), call.memory.get(lse)), want)


@pytest.mark.gpu
def test_nothing_compiles_under_capture(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan compiles and loads the kernel; the first run may be the captured one."""
    import cupy

    from cupyinfer.jit import cache, module

    monkeypatch.setattr(module, "_loaded", {})
    call = Call(Case((300, 33), heads=(6, 2), graph=True), "fa2")
    stream = cupy.cuda.Stream(non_blocking=True)
    out, _ = poisoned_array(call.memory, np.float16, call.q.shape)
    lse, _ = poisoned_array(call.memory, np.float32, call.q.shape[:2])
    with stream:
        call.plan()
        assert len(module._loaded) == 1 and any(fresh_cache.iterdir())
        stream.synchronize()
        monkeypatch.setattr(module, "load_cubin", None)
        monkeypatch.setattr(cache.CubinCache, "get", None)
        stream.begin_capture()
        call.run_into(out, lse)
        captured = stream.end_capture()
        captured.launch(stream)
        stream.synchronize()
    call.check((call.memory.get(out), call.memory.get(lse)))


@pytest.mark.decode
def test_batches_past_the_capacity(backend: str) -> None:
    """Eight requests and 64 pages: a ninth request or a 65th page is refused before anything is written."""
    first = Case((16,) * 8, heads=(8, 2), graph=True)
    call = Call(first, backend, max_batch_size=8, max_num_pages=64)
    call.plan()
    want, contents = call.run(), call.ints.contents()
    faults = {
        "batch: has 9 requests, this object's CUDA graph holds at most 8": Case((16,) * 9, heads=(8, 2)),
        "batch: refers to 65 pages, this object's CUDA graph holds at most 64": Case((1024, 1), heads=(8, 2)),
    }
    for message, case in faults.items():
        other = Call(case, backend)
        for method in (call.wrapper.workspace_size, call.wrapper.plan):
            with pytest.raises(ArgumentError, match=message):
                method(*other.plan_args, **other.plan_options)
        np.testing.assert_array_equal(call.ints.contents(), contents)
        assert_same_bits(call.run(), want)
    mixed = Call(Case((16, 33, 1, 100, 64, 17, 0, 0), heads=(8, 2), graph=True), backend)
    mixed.wrapper, mixed.floats, mixed.ints = call.wrapper, call.floats, call.ints
    mixed.plan()
    result = mixed.run()
    mixed.check(result)
    assert not result[0][6:].astype(np.float32).any() and np.isneginf(result[1][6:]).all()


def test_prefill_batches_past_the_capacity(backend: str) -> None:
    call = Call(Case((40, 50), (30, 34), "paged", graph=True), backend)
    call.plan()
    want = call.run()
    other = Call(Case((40, 50), (30, 35), "paged"), backend)
    with pytest.raises(ArgumentError, match="batch: has 65 query tokens, this object's CUDA graph holds at most 64"):
        call.wrapper.plan(*other.plan_args, **other.plan_options)
    longer = Call(Case((40, 1000), (30, 1), "paged", fixed_split_size=4, graph=True), backend, max_kv_len=1000)
    longer.plan()
    too_long = Call(Case((40, 1001), (30, 1), "paged", fixed_split_size=4), backend)
    with pytest.raises(ArgumentError, match="batch: has a request of 1001 keys, this object's CUDA graph holds at most 1000"):
        longer.wrapper.plan(*too_long.plan_args, **too_long.plan_options)
    assert_same_bits(call.run(), want)


@pytest.mark.decode
def test_options_of_a_graph_are_those_of_its_first_plan(backend: str) -> None:
    call = Call(Case((40, 50), graph=True), backend)
    call.plan()
    want = call.run()
    with pytest.raises(ArgumentError, match="a CUDA graph keeps the options of its first plan"):
        call.wrapper.plan(*call.plan_args, **{**call.plan_options, "window_left": 5})
    assert_same_bits(call.run(), want)
    assert call.wrapper.is_cuda_graph_enabled


@pytest.mark.decode
def test_a_padded_batch_is_the_batch(backend: str) -> None:
    case = Case((16, 33, 700), heads=(8, 2), graph=True, disable_split_kv=True)
    want = run_case(case, backend)
    data = Data(padded(case, 8))
    data.q[:3], data.keys[:3], data.values[:3] = Data(case).q, Data(case).keys, Data(case).values
    data._fill_pages(np.random.default_rng(0), np.nan)
    call = Call(data.case, backend, data)
    call.plan()
    o, lse = call.run()
    call.check((o, lse))
    assert_same_bits((o[:3], lse[:3]), want)
