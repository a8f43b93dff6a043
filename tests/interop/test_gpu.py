# SPDX-License-Identifier: Apache-2.0
"""GPU arrays of CuPy, JAX and PyTorch: no copy, order between streams, memory kept while it is read, the right device."""

from __future__ import annotations

import functools
import gc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyinfer.interop import (
    as_view,
    cuda_device,
    cupy_array,
    current_stream_ptr,
    empty_output,
    hand_back,
    is_capturing,
    release_after_work,
    use_device,
)
from cupyinfer.interop.jax import attention_call
from cupyinfer.interop.stream import cupy_stream
from tests.interop.fake_producer import FLOAT, FakeProducer

pytestmark = pytest.mark.gpu

SIZE = 1 << 20
# About 20 ms on a GPU of 2 GHz: work that ignores the order between streams is done long before.
SPIN_CYCLES = 40_000_000
_SPIN_SOURCE = """
extern "C" __global__ void spin(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


@functools.cache
def spin_kernel() -> Any:
    import cupy

    return cupy.RawKernel(_SPIN_SOURCE, "spin")


def spin(stream: Any, cycles: int = SPIN_CYCLES) -> None:
    """Keep `stream` busy."""
    spin_kernel()((1,), (1,), (np.int64(cycles),), stream=stream)


@pytest.fixture
def cp() -> Any:
    """CuPy, with every kernel of these tests loaded: loading one later could wait for the GPU and hide a missing order."""
    import cupy

    spin(cupy.cuda.get_current_stream(), 1)
    for dtype in (np.float32, np.uint8):
        array = cupy.zeros(SIZE, dtype)
        array.fill(1)
        cupy.copyto(cupy.empty_like(array), array)
        cupy.multiply(array, dtype(2), out=array)
    cupy.cuda.runtime.deviceSynchronize()
    return cupy


@pytest.fixture
def torch_cuda() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch without CUDA")
    return torch


@pytest.fixture
def jax_cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX without CUDA")
    return jax


class StreamProducer:
    """A library with a stream of its own: its pending work is on `stream`, and it honours the DLPack stream argument."""

    def __init__(self, array: Any, stream: Any) -> None:
        self.array, self.stream = array, stream
        self.requests: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **request: Any) -> Any:
        self.requests.append(request)
        with self.stream:
            return self.array.__dlpack__(**request)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "uint8", "bool", "int32", "int64"])
def test_cupy_is_read_directly(cp: Any, name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    base = cp.zeros((4, 6, 8 * dtype.itemsize), np.uint8).view(dtype)
    part = base[1:, ::2].transpose(1, 0, 2)
    view = as_view(part, "k")
    assert (view.ptr, view.shape, view.strides, view.dtype) == (base.data.ptr + 48 * dtype.itemsize, (3, 3, 8), (16, 48, 1), name)
    assert view.device == cuda_device(base.device.id) and view.owner is part and view.writable
    assert cupy_array(view) is part
    assert as_view(cp.empty((0, 4), np.float16), "q").shape == (0, 4)


def test_a_producer_behind_a_long_kernel_is_waited_for(cp: Any) -> None:
    theirs, ours = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
    k, seen = cp.zeros(SIZE, np.float32), cp.empty(SIZE, np.float32)
    cp.cuda.runtime.deviceSynchronize()
    producer = StreamProducer(k, theirs)
    with theirs:
        spin(theirs)
        k.fill(7)
    with ours:
        view = as_view(producer, "k")
        cp.copyto(seen, cupy_array(view))
    assert not theirs.done
    ours.synchronize()
    assert producer.requests == [{"stream": ours.ptr, "max_version": (1, 1), "copy": False}]
    assert view.ptr == k.data.ptr
    assert bool((seen == 7).all())


def test_the_legacy_stream_is_named_one(cp: Any) -> None:
    producer = StreamProducer(cp.zeros(4, np.float32), cp.cuda.Stream(non_blocking=True))
    with cp.cuda.Stream.null:
        as_view(producer, "k")
    assert producer.requests[0]["stream"] == 1


def test_nothing_outside_a_capture_is_waited_for_in_it(cp: Any) -> None:
    class Consumer(StreamProducer):
        def __array_namespace__(self) -> Any:
            return self

        def from_dlpack(self, array: Any) -> Any:
            return array.__dlpack__(stream=self.stream.ptr)

    theirs, ours = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
    k, seen = cp.full(SIZE, np.float32(3)), cp.zeros(SIZE, np.float32)
    cp.cuda.runtime.deviceSynchronize()
    producer = Consumer(k, theirs)
    index = k.device.id
    with ours:
        assert not is_capturing(index)
        ours.begin_capture()
        assert is_capturing(index)
        view = as_view(producer, "k")
        cp.multiply(cupy_array(view), np.float32(2), out=seen)
        release_after_work([view])
        capsule = hand_back(seen, producer)
        graph = ours.end_capture()
        assert not is_capturing(index)
        graph.launch(ours)
        ours.synchronize()
    assert producer.requests[0]["stream"] == -1
    assert "dltensor" in repr(capsule)
    assert bool((seen == 6).all())


def test_foreign_memory_is_kept_until_the_work_is_done(cp: Any) -> None:
    first, second = (FakeProducer(np.zeros(4, np.float32), FLOAT, device=(2, 0)) for _ in range(2))
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        views = [as_view(first, "q")]
        spin(stream)
        release_after_work(views)
        views.clear()
        gc.collect()
        assert first.num_deletes == 0
        stream.synchronize()
        release_after_work([as_view(second, "q")])
        assert first.num_deletes == 1
        stream.synchronize()


def test_the_current_device_is_left_alone(cp: Any) -> None:
    before = cp.cuda.runtime.getDevice()
    with use_device(before):
        assert cp.cuda.runtime.getDevice() == before
    assert cp.cuda.runtime.getDevice() == before
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        assert current_stream_ptr(before) == stream.ptr
    assert current_stream_ptr(before) == cp.cuda.get_current_stream(before).ptr


def test_arrays_of_another_device(cp: Any) -> None:
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    with cp.cuda.Device(1):
        k = cp.full(SIZE, np.float32(5))
        theirs = cp.cuda.Stream(non_blocking=True)
        cp.cuda.runtime.deviceSynchronize()
    with cp.cuda.Device(0):
        view = as_view(StreamProducer(k, theirs), "k")
        assert view.device == cuda_device(1) and as_view(k, "k").device == cuda_device(1)
        with pytest.raises(ZeroDivisionError), use_device(1):
            assert cp.cuda.runtime.getDevice() == 1
            out = empty_output((SIZE,), "float32", view.device)
            cp.copyto(out, cupy_array(view))
            assert out.device.id == 1 and bool((out == 5).all())
            raise ZeroDivisionError
        release_after_work([view])
        assert cp.cuda.runtime.getDevice() == 0


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32"])
def test_jax_in_without_a_copy(cp: Any, jax_cuda: Any, name: str) -> None:
    host = np.arange(24).reshape(2, 3, 4).astype(getattr(ml_dtypes, name, name))
    array = jax_cuda.numpy.asarray(host)
    view = as_view(array, "k")
    assert (view.ptr, view.shape, view.strides, view.dtype) == (array.unsafe_buffer_pointer(), (2, 3, 4), (12, 4, 1), name)
    assert view.device.kind == "cuda" and not view.writable
    assert cupy_array(view).get().tobytes() == host.tobytes()


def test_jax_work_in_flight_is_waited_for(cp: Any, jax_cuda: Any) -> None:
    jnp = jax_cuda.numpy
    slow = jax_cuda.jit(lambda x: jax_cuda.lax.fori_loop(0, 200, lambda _, y: (y @ x) / 2048.0, x)[0])
    x = jnp.ones((2048, 2048), jnp.float32)
    expected = np.asarray(slow(x))
    seen = cp.empty(2048, np.float32)
    ours = cp.cuda.Stream(non_blocking=True)
    with ours:
        k = slow(x)
        view = as_view(k, "k")
        del k
        cp.copyto(seen, cupy_array(view))
        release_after_work([view])
        ours.synchronize()
    assert seen.get().tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_jax_out_is_ordered_and_shares_memory(cp: Any, jax_cuda: Any, name: str) -> None:
    like = jax_cuda.numpy.zeros(2)
    device = as_view(like, "q").device
    ours = cp.cuda.Stream(non_blocking=True)
    with ours:
        result = empty_output((SIZE,), name, device)
        words = result.view(np.uint8)
        words.fill(0)
        spin(ours)
        words.fill(1)
        array = hand_back(result, like)
        ones = np.asarray(array)
    assert array.unsafe_buffer_pointer() == result.data.ptr
    assert array.dtype == jax_cuda.numpy.dtype(getattr(ml_dtypes, name, name))
    assert set(ones.view(np.uint8)) == {1}


@pytest.mark.parametrize("command_buffer", [False, True])
def test_attention_call_runs_on_the_stream_of_xla(cp: Any, jax_cuda: Any, command_buffer: bool) -> None:
    streams: list[int] = []

    class Wrapper:
        def run(self, q: Any, k: Any, v: Any, *, out: Any, lse: Any, return_lse: bool) -> None:
            assert isinstance(q, cp.ndarray) and return_lse
            streams.append(cp.cuda.get_current_stream().ptr)
            spin(cp.cuda.get_current_stream())
            cp.multiply(q, np.float32(2), out=out)
            cp.multiply(q[..., 0], np.float32(2), out=lse)

    jnp = jax_cuda.numpy

    @jax_cuda.jit
    def layer(q: Any) -> Any:
        q = q + 1.0
        out, lse = attention_call(Wrapper(), q, q, q, return_lse=True, command_buffer=command_buffer)
        return out + 1.0, lse + 1.0

    # The strided kernel of the wrapper must be loaded before a command buffer records it.
    warm = cp.zeros((4, 2, 8), np.float32)
    cp.multiply(warm[..., 0], np.float32(2), out=cp.empty((4, 2), np.float32))
    before = cp.cuda.get_current_stream().ptr
    for value in (1.0, 2.0, 3.0):
        q = jnp.full((64, 2, 8), value, jnp.float32)
        out, lse = layer(q)
        assert np.all(np.asarray(out) == 2 * (value + 1) + 1)
        assert np.all(np.asarray(lse) == 2 * (value + 1) + 1)
    assert streams and 0 not in streams
    assert cp.cuda.get_current_stream().ptr == before


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32"])
def test_torch_in_without_a_copy(cp: Any, torch_cuda: Any, name: str) -> None:
    tensor = torch_cuda.arange(24, device="cuda").reshape(4, 6).to(getattr(torch_cuda, name))
    part = tensor[1:].T
    view = as_view(part, "k")
    assert (view.ptr, view.shape, view.strides, view.dtype) == (part.data_ptr(), (6, 3), (1, 6), name)
    assert view.device == cuda_device(tensor.device.index) and view.writable
    expected = part.contiguous().view(torch_cuda.uint8).cpu().numpy().tobytes()
    assert cp.ascontiguousarray(cupy_array(view)).get().tobytes() == expected


def test_torch_work_in_flight_is_waited_for(cp: Any, torch_cuda: Any) -> None:
    k = torch_cuda.zeros(SIZE, device="cuda")
    k.fill_(1)
    theirs, ours = torch_cuda.cuda.Stream(), cp.cuda.Stream(non_blocking=True)
    seen = cp.empty(SIZE, np.float32)
    torch_cuda.cuda.synchronize()
    with torch_cuda.cuda.stream(theirs), ours:
        spin(cupy_stream(theirs.cuda_stream))
        k.fill_(7)
        cp.copyto(seen, cupy_array(as_view(k, "k")))
        assert not theirs.query()
        ours.synchronize()
    assert bool((seen == 7).all())


def test_torch_waits_for_our_work_before_it_writes_again(cp: Any, torch_cuda: Any) -> None:
    q = torch_cuda.full((SIZE,), 4.0, device="cuda")
    q.fill_(4)
    theirs, ours = torch_cuda.cuda.Stream(), cp.cuda.Stream(non_blocking=True)
    seen = cp.empty(SIZE, np.float32)
    torch_cuda.cuda.synchronize()
    with torch_cuda.cuda.stream(theirs), ours:
        view = as_view(q, "q")
        spin(ours)
        cp.copyto(seen, cupy_array(view))
        release_after_work([view])
        q.fill_(0)
        ours.synchronize()
    torch_cuda.cuda.synchronize()
    assert bool((seen == 4).all())


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_torch_out_is_ordered_and_shares_memory(cp: Any, torch_cuda: Any, name: str) -> None:
    like = torch_cuda.zeros(2, device="cuda")
    theirs, ours = torch_cuda.cuda.Stream(), cp.cuda.Stream(non_blocking=True)
    device = as_view(like, "q").device
    torch_cuda.cuda.synchronize()
    with torch_cuda.cuda.stream(theirs), ours:
        result = empty_output((SIZE,), name, device)
        words = result.view(np.uint8)
        words.fill(0)
        spin(ours)
        words.fill(1)
        tensor = hand_back(result, like)
        seen = tensor.view(torch_cuda.uint8).clone()
        theirs.synchronize()
    assert tensor.data_ptr() == result.data.ptr and tensor.dtype == getattr(torch_cuda, name)
    assert bool((seen == 1).all())
