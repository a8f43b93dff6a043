# SPDX-License-Identifier: Apache-2.0
"""Host time as a serving loop sees it: every step all requests are a token longer, is planned anew, and runs once per layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Runs of a step, of which the first one meets a new plan.
LAYERS = 4
#: Steps of a variant on end, before it is another's turn.
BLOCK = 32

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Served:
    """One implementation in the loop.

    Attributes:
        name: what its rows begin with, empty for cupyinfer.
        plan: takes the arguments of one step.
        run: one layer, or None where only planning is timed.
        arguments: of every step.
    """

    name: str
    plan: Callable[[_Arguments], object]
    run: Callable[[], object] | None
    arguments: Sequence[_Arguments]


def serve(variants: Sequence[Served], rounds: int, settle: Callable[[], object]) -> dict[str, list[float]]:
    """Microseconds of every call by its name, variants taking turns in blocks of consecutive steps.

    A step begins on an idle stream, as one does that waited for the last tokens. Its index arrays were written a moment ago, as an
    engine writes them, which is not timed.
    """
    microseconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for variant in variants:
            written = [np.empty_like(one) if isinstance(one, np.ndarray) else None for one in variant.arguments[-1][0]]
            for at, step in enumerate(variant.arguments):
                arguments = _write(step, written)
                settle()
                taken = _step(variant, arguments)
                if at >= 3:  # a block begins with whatever the last one left in the caches
                    for name, nanoseconds in taken.items():
                        microseconds.setdefault(variant.name + name, []).append(nanoseconds / 1e3)
    settle()
    return microseconds


def _write(step: _Arguments, written: Sequence[Any]) -> _Arguments:
    """A step's arguments with its arrays in memory that is used again and again."""
    placed = []
    for one, memory in zip(step[0], written, strict=True):
        if memory is None:
            placed.append(one)
        else:
            memory[: len(one)] = one
            placed.append(memory[: len(one)])
    return tuple(placed), step[1]


def _step(variant: Served, arguments: _Arguments) -> dict[str, int]:
    clock = time.perf_counter_ns
    start = clock()
    variant.plan(arguments)
    planned = clock()
    taken = {"plan": planned - start}
    if variant.run is not None:
        variant.run()
        first = clock()
        taken["first run"] = first - planned
        for _ in range(LAYERS - 1):
            variant.run()
        taken["later runs"] = (clock() - first) // (LAYERS - 1)
    return taken


def served_ours(wrapper: Any, steps: Sequence[_Arguments], buffer: Callable[[int], Any], run: Callable[[], object] | None) -> Served:
    """Cupyinfer, with workspaces that suffice for every step."""
    sizes = [wrapper.workspace_size(*args, **options) for args, options in steps]
    wrapper.reset_workspace_buffer(buffer(max(size.float_bytes for size in sizes)), buffer(max(size.int_bytes for size in sizes)))
    return Served("", lambda step: wrapper.plan(*step[0], **step[1]), run, steps)


def served_flashinfer(kind: str, data: Any, steps: Sequence[_Arguments]) -> Served | None:
    """FlashInfer on its tensor cores, with the same arguments as PyTorch tensors; None where it cannot be imported."""
    from benchmarks.peers import FLASHINFER_FLOAT_BYTES, flashinfer_types, import_problem, to_torch

    if import_problem("torch", "flashinfer") is not None:
        return None
    import flashinfer
    import torch

    buffer = torch.empty(FLASHINFER_FLOAT_BYTES, dtype=torch.uint8, device="cuda")
    if kind == "decode":
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(buffer, "NHD", use_tensor_cores=True, backend="fa2")
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(buffer, "NHD", backend="fa2")
    q, kv = to_torch(data.q), tuple(to_torch(x) for x in data.paged_kv)
    out, types = torch.empty_like(q), flashinfer_types(data.case)

    def plan(step: _Arguments) -> None:
        arrays = (torch.from_numpy(one) if isinstance(one, np.ndarray) else one for one in step[0])
        wrapper.plan(*arrays, **{**step[1], **types})

    return Served("FlashInfer ", plan, lambda: wrapper.run(q, kv, out=out), steps)
