# SPDX-License-Identifier: Apache-2.0
"""One cell, run the way a careful caller would: sized exactly, planned, run twice, replayed in a CUDA graph, compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cupyinfer.backends.device import read_profile
from cupyinfer.dtypes import numpy_dtype
from cupyinfer.schedule.profile import DeviceProfile
from tests.matrix.arena import Arena, Array, Room
from tests.matrix.cells import Cell
from tests.support.batches import Data
from tests.support.compare import assert_attention_close, output_bound
from tests.support.runner import WRAPPERS, assert_same_bits, plan_arguments

_VALUES = ("sinks", "alibi_slopes", "custom_mask", "packed_custom_mask")
#: Copies of a cell's batch for one SM: its CTA then goes round every ring of segments that a kernel has.
_CROWD = 3


class Worst(NamedTuple):
    """How far a cell's results are from the oracle.

    Attributes:
        output: largest error of an output element as a share of its bound.
        lse: largest error of a log-sum-exp.
    """

    output: float
    lse: float


class Planned:
    """A wrapper with a plan in workspaces of exactly the size it asked for.

    Attributes:
        floats, ints: the workspaces.
    """

    def __init__(
        self, cell: Cell, backend: str, arena: Arena, args: list[Any], options: dict[str, Any], graph: bool, profile: DeviceProfile | None
    ) -> None:
        self.wrapper = WRAPPERS[cell.op](kv_layout=cell.layout, use_cuda_graph=graph, backend=backend, profile=profile)
        self.size = self.wrapper.workspace_size(*args, **options)
        kind = "graph's " if graph else ""
        self.floats = arena.reserve(f"{kind}float workspace", self.size.float_bytes)
        self.ints = arena.reserve(f"{kind}int workspace", self.size.int_bytes)
        self._batch = args, options

    def plan(self, tiles: tuple[int, ...]) -> None:
        """Plan, and fail unless it takes what was sized and a tile that the table says."""
        args, options = self._batch
        self.wrapper.reset_workspace_buffer(self.floats.bytes, self.ints.bytes)
        self.wrapper.plan(*args, **options)
        info = self.wrapper.plan_info
        assert (info.float_bytes, info.int_bytes) == tuple(self.size), f"sized {tuple(self.size)}, planned {info}"
        assert info.cta_tile_q in tiles, f"the plan has tiles of {info.cta_tile_q} rows, the table says {tiles}"


class CellRun:
    """A cell's inputs on the device, its plans and outputs."""

    def __init__(self, cell: Cell, backend: str, arena: Arena, graph: bool = True, crowded: bool = False) -> None:
        self.cell, self.arena = cell, arena
        case, profile = cell.case(), None
        if crowded:
            case = replace(case, kv_lens=case.kv_lens * _CROWD, qo_lens=case.qo_lens and case.qo_lens * _CROWD)
            profile = replace(read_profile(0), num_sms=1)
        self.data = Data(case)
        arena.reset()
        with arena.queue():
            args, options = _plan_arguments(cell, self.data, arena)
            self._q = arena.put(self.data.q)
            caches = [arena.put(cache) for cache in self.data.caches]
            self._kv = [tuple(caches)] if cell.op != "ragged" else caches
            self._scales = _scales(self.data, arena)
            arena.send()
            kinds = (False, True) if graph else (False,)
            self.plans = [Planned(cell, backend, arena, args, options, in_graph, profile) for in_graph in kinds]
            self._shape = (*self.data.q.shape[:2], case.head_dims[1])
            self._type = numpy_dtype(case.dtype)
            self._out = arena.reserve("out", int(np.prod(self._shape)) * 2)
            self._lse = arena.reserve("lse", int(np.prod(self._shape[:2])) * 4) if cell.lse == "yes" else None
            arena.send()

    def queue_run(self, planned: Planned) -> None:
        """Queue one run into the outputs."""
        out = self.arena.view(self._out, self._type, self._shape)
        lse = None if self._lse is None else self.arena.view(self._lse, np.float32, self._shape[:2])
        planned.wrapper.run(self._q, *self._kv, out=out, lse=lse, return_lse=lse is not None, **self._scales)

    def results(self, planned: Planned, run: Callable[[], None], garbage: int) -> tuple[Array, ...]:
        """Outputs of a run that finds `garbage` in the outputs and in the float workspace."""
        rooms: list[Room] = [self._out, planned.floats, *([self._lse] if self._lse else [])]
        for room in rooms:
            self.arena.fill(room, garbage)
        run()
        found = self.arena.get(self._out, self._type, self._shape)
        return (found,) if self._lse is None else (found, self.arena.get(self._lse, np.float32, self._shape[:2]))

    def compare(self, result: tuple[Array, ...], how: str) -> Worst:
        """Fail unless a result is close to the oracle; how close it is."""
        oracle, reference = self.data.expected
        lse = result[1] if len(result) > 1 else None
        assert_attention_close(result[0], lse, oracle, reference, self.data.case.queries, how)
        bound = output_bound(oracle[0], reference[0], result[0].dtype)[..., None]
        error = np.abs(result[0].astype(np.float64) - oracle[0])
        finite = np.isfinite(oracle[1])
        lse_error = np.abs(lse[finite] - oracle[1][finite]).max(initial=0.0) if lse is not None else 0.0
        return Worst(float((error / np.where(bound > 0, bound, 1.0)).max(initial=0.0)), float(lse_error))


def run_cell(cell: Cell, backend: str, arena: Arena, graph: bool = True, crowded: bool = False) -> Worst:
    """Run a cell and check everything that can be checked of it.

    Checked: a plan takes the bytes that were sized and the kernel the table says; an eager run and a replayed CUDA graph are close to
    the oracle; second runs are equal bit for bit whatever outputs and float workspace held before; with a fixed split or none the graph
    equals the eager run too; nothing outside of outputs and workspaces has changed at the end.

    Args:
        cell: what to run.
        backend: on which backend.
        arena: memory for it.
        graph: also replay it in a CUDA graph.
        crowded: plan the batch three times over and for a GPU of one SM, so that few CTAs do many segments each.

    Raises:
        AssertionError: one of these does not hold.
    """
    call = CellRun(cell, backend, arena, graph, crowded)
    tiles = cell.tiles(backend)
    with arena.queue():
        eager = call.plans[0]
        eager.plan(tiles)
        first = call.results(eager, lambda: call.queue_run(eager), 0xFF)
        worst = call.compare(first, "eager run")
        assert_same_bits(call.results(eager, lambda: call.queue_run(eager), 0x7F), first)
        if graph:
            planned = call.plans[1]
            planned.plan(tiles)
            arena.synchronize()
            replay = arena.capture(lambda: call.queue_run(planned))
            replayed = call.results(planned, replay, 0x7F)
            other = call.compare(replayed, "replayed graph")
            worst = Worst(max(worst.output, other.output), max(worst.lse, other.lse))
            assert_same_bits(call.results(planned, replay, 0x00), replayed)
            assert_same_bits(call.results(planned, lambda: call.queue_run(planned), 0xFF), replayed)
            if cell.split != "auto":
                assert_same_bits(replayed, first)
        arena.assert_rest_intact()
    return worst


def _plan_arguments(cell: Cell, data: Data, arena: Arena) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of plan with index arrays of the cell's width and place."""
    names = ("qo_indptr", "kv_indptr", *(("indices", "last_page_len") if cell.op != "ragged" else ()))
    for name in names if cell.index.endswith("int64") else ():
        setattr(data, name, getattr(data, name).astype(np.int64))
    args, options = plan_arguments(data, arena)  # type: ignore[arg-type]
    if cell.index == "device-int64":
        host = [getattr(data, name) for name in names]
        args = [arena.put(value) if any(value is array for array in host) else value for value in args]
    if cell.index.startswith("device"):
        options.update({name: arena.put(options[name]) for name in _VALUES if options.get(name) is not None})
    return args, options


def _scales(data: Data, arena: Arena) -> dict[str, Any]:
    if not data.case.scales:
        return {}
    scales = {"k_scale": data.k_scale, "v_scale": data.v_scale}
    return {name: arena.put(scale) if isinstance(scale, np.ndarray) else scale for name, scale in scales.items()}
