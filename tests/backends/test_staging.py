# SPDX-License-Identifier: Apache-2.0
"""Pinned blocks between plans: one that a copy still reads is not written, and one that is too small is kept for smaller plans."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupyinfer.backends import staging


class Block:
    """As _Block, in ordinary memory, and busy until it is told otherwise."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = np.zeros(num_bytes, np.uint8)
        self.address, self.num_bytes, self.event_handle = int(self.memory.ctypes.data), num_bytes, id(self)
        self.event = SimpleNamespace(done=False)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(staging, "_Block", Block)
    made = object.__new__(staging.StagingPool)
    made.calls = []  # type: ignore[attr-defined]
    made._copy = lambda *args: made.calls.append(("copy", *args))  # type: ignore[attr-defined]
    made._record = lambda *args: made.calls.append(("record", *args))  # type: ignore[attr-defined]
    made._to_device, made._free = 1, deque()
    return made


def filler(number: int, num_bytes: int) -> Any:
    def fill(block: Any) -> None:
        assert block.dtype == np.uint8 and len(block) >= num_bytes
        block[:num_bytes] = number

    return fill


def test_a_block_is_reused_once_its_copy_is_done(pool: Any) -> None:
    event = pool.upload(filler(1, 100), 100, 4096, 7)
    (block,) = pool._free
    assert event is block.event
    assert pool.calls == [("copy", 4096, block.address, 100, 1, 7), ("record", block.event_handle, 7)]
    assert pool.upload(filler(2, 50), 50, 4096, 7) is not event  # still being read
    assert len(pool._free) == 2
    assert (block.memory[:100] == 1).all()
    event.done = True
    assert pool.upload(filler(3, 60), 60, 4096, 7) is event
    assert len(pool._free) == 2
    assert (block.memory[:60] == 3).all() and (block.memory[60:100] == 1).all()


def test_the_last_block_used_comes_first(pool: Any) -> None:
    events = [pool.upload(filler(number, 10), 10, 0, 0) for number in range(3)]
    for event in events:
        event.done = True
    assert [pool.upload(filler(number, 10), 10, 0, 0) for number in range(2)] == [events[2]] * 2
    events[2].done = False
    assert pool.upload(filler(5, 10), 10, 0, 0) is events[1]


def test_larger_plans_get_larger_blocks_and_leave_the_small_ones(pool: Any) -> None:
    small = pool.upload(filler(1, 1), 1, 0, 0)
    small.done = True
    large = pool.upload(filler(2, 1 << 20), 1 << 20, 0, 0)
    assert large is not small
    assert sorted(block.num_bytes for block in pool._free) == [1 << 14, 1 << 20]
    assert pool.upload(filler(3, 9), 9, 0, 0) is small


def test_a_block_comes_back_when_filling_it_fails(pool: Any) -> None:
    def fail(block: Any) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        pool.upload(fail, 10, 0, 0)
    assert (len(pool._free), pool.calls) == (1, [])
