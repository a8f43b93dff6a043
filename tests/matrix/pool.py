# SPDX-License-Identifier: Apache-2.0
"""Processes that run cells, and outlive cells that crash or hang: such a cell has failed, and the rest goes to a new process."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.matrix.cells import Cell

_CHUNK = 12
_GONE = "gone after a failure it told of"
_Message = dict[str, Any]


@dataclass
class _Worker:
    """A process, the cells it was given and has not finished, when it last answered, and whether with a failure."""

    process: Any
    connection: Connection
    cells: list[Cell] = field(default_factory=list)
    heard: float = 0.0
    told: bool = False


def outcome(cell: Cell, backend: str, arena: Any) -> _Message:
    """Run a cell: its worst errors, or the sentence of its failure."""
    from tests.matrix.check import run_cell

    try:
        worst = run_cell(cell, backend, arena)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return {"failed": f"{type(error).__name__} ({where.name}): {error}"[:1500]}
    return {"output": worst.output, "lse": worst.lse}


_Run = Callable[[Cell, str, Any], _Message]


def _serve(connection: Connection, backend: str, run: _Run) -> None:
    from tests.matrix.arena import Arena

    arena = Arena(backend != "host")
    while (cells := connection.recv()) is not None:
        for cell in cells:
            message = run(cell, backend, arena)
            connection.send(message)
            if "failed" in message and arena.on_gpu:
                # After a fault the context is lost: this synchronisation raises, and a new process takes over.
                arena.synchronize()


def run_cells(
    cells: Sequence[Cell], backend: str, workers: int, timeout: float, time_left: Callable[[], float], run: _Run = outcome
) -> Iterator[tuple[Cell, _Message]]:
    """Run cells in order on several processes, and yield each with its outcome when it is done.

    Args:
        cells: what to run; neighbours go to the same process, so cells of one kernel should be neighbours.
        backend: one of BACKENDS.
        workers: processes.
        timeout: seconds a cell may take.
        time_left: no new cells are begun once this says 0 seconds or less.
        run: runs one cell, in a process of the pool.
    """
    waiting = list(reversed(cells))
    pool: list[_Worker] = []

    def start() -> None:
        ours, theirs = get_context("spawn").Pipe()
        process = get_context("spawn").Process(target=_serve, args=(theirs, backend, run), daemon=True)
        process.start()
        theirs.close()
        pool.append(_Worker(process, ours))

    def feed(worker: _Worker) -> None:
        share = max(1, min(_CHUNK, len(waiting) // (2 * workers)))
        worker.cells = [waiting.pop() for _ in range(min(share, len(waiting)))] if time_left() > 0 else []
        worker.heard = time.monotonic()
        if worker.cells:
            worker.connection.send(worker.cells)

    for _ in range(min(workers, len(waiting))):
        start()
        feed(pool[-1])
    try:
        while any(worker.cells for worker in pool):
            wait([worker.connection for worker in pool if worker.cells], timeout=1.0)
            for worker in [worker for worker in pool if worker.cells]:
                answers, lost = _answers(worker, timeout)
                for answer in answers:
                    yield worker.cells.pop(0), answer
                if lost:
                    pool.remove(worker)
                    if lost != _GONE and worker.cells:
                        yield worker.cells.pop(0), {"failed": lost}
                    waiting += reversed(worker.cells)
                    if waiting:
                        start()
                        feed(pool[-1])
                elif not worker.cells:
                    feed(worker)
    finally:
        for worker in pool:
            worker.process.kill()


def _answers(worker: _Worker, timeout: float) -> tuple[list[_Message], str]:
    """What a worker has to say now, and how it was lost, if it was."""
    answers: list[_Message] = []
    try:
        while len(answers) < len(worker.cells) and worker.connection.poll():
            answers.append(worker.connection.recv())
            worker.heard, worker.told = time.monotonic(), "failed" in answers[-1]
    except (EOFError, ConnectionError):
        worker.process.join()
        # A process that told of a failure last has left because of it; the next cell was not begun.
        return answers, _GONE if worker.told else f"the process died with exit code {worker.process.exitcode}"
    if time.monotonic() - worker.heard > timeout:
        worker.process.kill()
        return answers, f"no answer within {timeout:g} seconds"
    return answers, ""
