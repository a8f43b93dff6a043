# SPDX-License-Identifier: Apache-2.0
"""What other libraries must know once work on their arrays is on our stream: do not reuse the memory, do not run ahead."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

from cupyinfer.interop.array_view import ArrayView
from cupyinfer.interop.dlpack import ManagedTensor
from cupyinfer.interop.stream import cupy_stream, is_capturing, use_device

_lock = threading.Lock()
_in_use: dict[int, deque[tuple[Any, tuple[object, ...]]]] = {}


def release_after_work(views: Iterable[ArrayView]) -> None:
    """Tell the libraries behind the views about the work just put on CuPy's current stream of their GPU.

    PyTorch's current stream is made to wait for that work, so later operations on `out=` or on the inputs come after it.
    The memory of every array that came through DLPack is kept until the work is done, even if the caller drops the
    array at once: otherwise its library's own pool could hand the memory out while a kernel still reads it.
    What the last call holds goes at the next call; until then JAX copies where it would have reused a donated array,
    which `attention_call` inside `jax.jit` avoids.
    CuPy, NumPy and other CPU arrays need nothing. Under capture nothing is done: a graph's arrays are the caller's to keep.
    """
    foreign = [view for view in views if type(view.owner) is ManagedTensor and view.device.kind == "cuda"]
    if not foreign:
        return
    import cupy

    index = foreign[0].device.index
    if is_capturing(index):
        return
    with use_device(index):
        event = cupy.cuda.Event(disable_timing=True)
        event.record(cupy.cuda.get_current_stream(index))
        if any(view.producer == "torch" for view in foreign):
            handle = int(sys.modules["torch"].cuda.current_stream(index).cuda_stream)
            cupy_stream(handle).wait_event(event)
    _keep(index, event, tuple(view.owner for view in foreign))


def _keep(index: int, event: Any, owners: tuple[object, ...]) -> None:
    """Hold `owners` until `event` has happened, and let go of those whose event has."""
    done: list[tuple[object, ...]] = []
    with _lock:
        waiting = _in_use.setdefault(index, deque())
        waiting.append((event, owners))
        while waiting and waiting[0][0].done:
            done.append(waiting.popleft()[1])
    # Deleters run foreign code, so they run here, outside of the lock.
    done.clear()
