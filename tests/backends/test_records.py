# SPDX-License-Identifier: Apache-2.0
"""The one parameter record of a kernel: every launch finds its own plan, arrays and factors in it, whoever launched before."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyinfer.backends import fa2
from cupyinfer.backends.arrays import RunArrays, RunScales
from cupyinfer.backends.fa2 import Fa2Kernel, Fa2Launcher, PlanAddresses
from cupyinfer.backends.params import ATTENTION_PARAMS
from cupyinfer.interop import ArrayView, cuda_device
from cupyinfer.jit.variant import AttentionVariant
from cupyinfer.schedule.profile import named_profile

PLAIN = RunScales(0.5, 1.0, 1.0)
FIRST, SECOND = tuple(range(1, 11)), tuple(range(11, 21))
STREAM = 7


class Loaded:
    """A kernel whose launches note what the driver would have copied."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, int, Any]] = []

    def prepared(self, num_threads: int, smem_bytes: int, record: int) -> Callable[[int, int], None]:
        def launch(num_ctas: int, stream: int) -> None:
            content = ctypes.string_at(record, ATTENTION_PARAMS.itemsize)
            self.launches.append((num_ctas, stream, np.frombuffer(content, ATTENTION_PARAMS)[0]))

        return launch


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Loaded:
    made = Loaded()
    monkeypatch.setattr(fa2, "load_kernel", lambda *_: made)
    monkeypatch.setattr(fa2, "staging_pool", lambda _: None)
    monkeypatch.setattr(fa2, "current_stream_ptr", lambda _: STREAM)
    return made


def kernel() -> Fa2Kernel:
    variant = AttentionVariant("float16", "float16", 64, 64, 16, True, False)
    return Fa2Kernel(variant, named_profile("h200"), 0, {"num_qo_heads": 8, "causal": True}, PLAIN)


def _steps(number: int) -> tuple[int, int, int, int]:
    return number, 10 * number, 100 * number, number + 1


def planned(of: Fa2Kernel, number: int, num_ctas: int = 5, **values: int) -> Fa2Launcher:
    addresses = PlanAddresses(*(1000 * number + at for at in range(6)))
    return Fa2Launcher(of, addresses, _steps(number), values, num_ctas, None)


def view(ptr: int) -> ArrayView:
    return ArrayView(ptr, (1,), (1,), "float32", cuda_device(0), None, True, "cupy")


def arrays(at: int, strides: tuple[int, ...] = FIRST, lse: bool = True) -> RunArrays:
    return RunArrays(view(at), view(at + 1), view(at + 2), view(at + 3), view(at + 4) if lse else None, strides, False)


def field(record: Any, *names: str) -> tuple[Any, ...]:
    return tuple(record[name].item() for name in names)


def plan_in(record: Any) -> tuple[Any, ...]:
    return field(record, *PlanAddresses._fields, "max_tiles", "unit_step", "num_entries", "entries_per_tile")


def expected_plan(number: int) -> tuple[int, ...]:
    return (*(1000 * number + at for at in range(6)), *_steps(number))


def test_plans_of_one_kernel_take_turns(loaded: Loaded) -> None:
    of = kernel()
    one, other = planned(of, 1, 5, alibi_slopes=77, mask=78), planned(of, 2, 6, sinks=79)
    for launcher in (one, other, one, one):
        launcher.launch(arrays(100), PLAIN)
    values = {1: (77, 0, 78), 2: (0, 79, 0)}
    for (num_ctas, stream, record), number in zip(loaded.launches, (1, 2, 1, 1), strict=True):
        assert (num_ctas, stream) == (4 + number, STREAM)
        assert plan_in(record) == expected_plan(number)
        assert field(record, "alibi_slopes", "sinks", "mask") == values[number]
        assert field(record, "q", "k", "v", "o", "lse", "num_qo_heads", "causal") == (100, 101, 102, 103, 104, 8, 1)


def test_runs_of_several_plans_have_their_own_arrays_strides_and_factors(loaded: Loaded) -> None:
    of = kernel()
    one, other = planned(of, 1), planned(of, 2)
    one.launch(arrays(100), RunScales(0.5, 2.0, 3.0))
    other.launch(arrays(200, SECOND, lse=False), PLAIN)
    one.launch_at((1, 2, 3, 4, 0), ((1,),) * 4, FIRST, PLAIN)
    other.launch(arrays(300, SECOND), RunScales(0.5, view(41), view(42), view(43)))
    one.launch(arrays(100), PLAIN)
    strides = [record.tolist()[17:27] for _, _, record in loaded.launches]
    assert strides == [FIRST, SECOND, FIRST, SECOND, FIRST]
    assert [field(record, "q", "lse") for _, _, record in loaded.launches] == [(100, 104), (200, 0), (1, 0), (300, 304), (100, 104)]
    factors = [field(record, "sm_scale", "v_scale_tensor", "q_scale", "k_scale", "v_scale") for _, _, record in loaded.launches]
    plain = (0.5, 1.0, 0, 0, 0)
    assert factors == [(1.0, 3.0, 0, 0, 0), plain, plain, (0.5, 1.0, 43, 41, 42), plain]


def test_a_launch_that_fails_half_way_leaves_nothing_to_the_next(loaded: Loaded) -> None:
    of = kernel()
    one, other = planned(of, 1), planned(of, 2, alibi_slopes=-1)  # no address: writing it fails
    one.launch(arrays(100), PLAIN)
    with pytest.raises(struct.error):
        other.launch(arrays(200), PLAIN)
    with pytest.raises(struct.error):
        one.launch(arrays(300), RunScales(0.5, view(-1), 1.0, view(41)))
    one.launch(arrays(100), PLAIN)
    assert len(loaded.launches) == 2
    first, second = (record for _, _, record in loaded.launches)
    assert first.tobytes() == second.tobytes()


def test_a_plan_without_work_launches_nothing(loaded: Loaded) -> None:
    planned(kernel(), 1, 0).launch(arrays(100), PLAIN)
    assert loaded.launches == []
