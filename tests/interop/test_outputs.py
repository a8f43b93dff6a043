# SPDX-License-Identifier: Apache-2.0
"""Results in the array type of the queries: the same memory, the same bits, for every element type."""

from __future__ import annotations

import gc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyinfer.interop import CPU_DEVICE, as_view, empty_output, hand_back, numpy_array
from cupyinfer.interop.dlpack_producer import DLPackProducer
from tests.interop.fake_producer import FLOAT, FakeProducer

RESULT_TYPES = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")


def filled(name: str) -> np.ndarray[Any, Any]:
    result = empty_output((3, 4, 8), name, CPU_DEVICE)
    result[...] = np.linspace(-3, 3, 96).reshape(3, 4, 8).astype(result.dtype)
    return result


@pytest.mark.parametrize("name", RESULT_TYPES)
def test_numpy_results_are_plain_aligned_arrays(name: str) -> None:
    result = filled(name)
    assert result.dtype == np.dtype(getattr(ml_dtypes, name, name))
    assert result.flags.c_contiguous and result.ctypes.data % 64 == 0
    assert hand_back(result, np.zeros(2, np.float16)) is result
    assert empty_output((0, 4), name, CPU_DEVICE).shape == (0, 4)


@pytest.mark.parametrize("name", RESULT_TYPES)
def test_jax_results_share_memory(name: str) -> None:
    jnp = pytest.importorskip("jax.numpy")
    result = filled(name)
    expected, address = result.tobytes(), result.ctypes.data
    array = hand_back(result, jnp.zeros(2))
    del result
    gc.collect()
    assert isinstance(array, type(jnp.zeros(2))) and array.dtype == jnp.dtype(getattr(ml_dtypes, name, name))
    assert array.unsafe_buffer_pointer() == address
    assert np.asarray(array).tobytes() == expected
    assert hand_back(empty_output((0, 4), name, CPU_DEVICE), array).shape == (0, 4)


@pytest.mark.parametrize("name", RESULT_TYPES)
def test_torch_results_share_memory(name: str) -> None:
    torch = pytest.importorskip("torch")
    result = filled(name)
    tensor = hand_back(result, torch.zeros(2))
    assert tensor.dtype == getattr(torch, name) and tensor.data_ptr() == result.ctypes.data
    assert tensor.view(torch.uint8).numpy().tobytes() == result.tobytes()
    tensor[1, 2, 3] = 0.5
    assert float(result[1, 2, 3]) == 0.5


def test_other_libraries_get_their_own_array_type_through_their_namespace() -> None:
    class Namespace:
        @staticmethod
        def from_dlpack(array: Any) -> Any:
            return ("taken in", numpy_array(as_view(array, "x")))

    class Foreign(FakeProducer):
        def __array_namespace__(self) -> Any:
            return Namespace

    result = filled("bfloat16")
    tag, seen = hand_back(result, Foreign(np.zeros(2, np.float32), FLOAT))
    assert tag == "taken in" and seen.dtype == ml_dtypes.bfloat16 and seen.ctypes.data == result.ctypes.data
    assert hand_back(result, FakeProducer(np.zeros(2, np.float32), FLOAT)) is result


@pytest.mark.parametrize("request_", [{}, {"max_version": (1, 0)}], ids=["unversioned", "versioned"])
def test_relabelled_capsules_keep_their_memory_alive_and_give_it_back(request_: dict[str, Any]) -> None:
    class Counted(np.ndarray):
        alive = 0

        def __del__(self) -> None:
            Counted.alive -= 1

    memory = np.arange(8, dtype=np.uint16).view(Counted)
    Counted.alive = 1
    capsule = DLPackProducer(memory, "bfloat16").__dlpack__(**request_)
    del memory
    gc.collect()
    assert Counted.alive == 1
    del capsule
    gc.collect()
    assert Counted.alive == 0


def test_relabelling_keeps_the_width() -> None:
    with pytest.raises(BufferError, match="float8_e5m2 is not 16 bits wide"):
        DLPackProducer(np.zeros(4, np.uint16), "float8_e5m2").__dlpack__()
