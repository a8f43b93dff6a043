# SPDX-License-Identifier: Apache-2.0
"""Plans and runs behind queued work, on other streams, threads and GPUs: right, in order, and without waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from cupyinfer.errors import ArgumentError, BackendUnavailable
from tests.support.batches import Case
from tests.support.memory import poisoned_array
from tests.support.runner import Call, assert_same_bits

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

_SPIN = """
extern "C" __global__ void spin(long long nanoseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < nanoseconds);
}
"""
# Everything in CuPy's runtime that waits for the GPU, or may.
_WAITING = ("deviceSynchronize", "streamSynchronize", "eventSynchronize", "memcpy", "free", "malloc")


@pytest.fixture(scope="module")
def spin() -> Any:
    """A kernel that keeps the current stream busy for so many milliseconds; loaded, so that a launch does not wait."""
    kernel = cupy.RawKernel(_SPIN, "spin")

    def queue(milliseconds: float) -> None:
        kernel((1,), (1,), (np.int64(milliseconds * 1e6),))

    queue(0)
    cupy.cuda.Device().synchronize()
    return queue


def decode_batch(seed: int, num_requests: int = 64) -> Case:
    rng = np.random.default_rng(seed)
    lengths = tuple(int(n) for n in rng.integers(1, 500, num_requests))
    return Case(lengths, heads=(32, 8), dtype="bfloat16", seed=seed, indices_on="host")


def outputs_of(call: Call) -> tuple[Any, Any]:
    return tuple(poisoned_array(call.memory, t, s)[0] for t, s in ((call.data.q.dtype, call.q.shape), (np.float32, call.q.shape[:2])))  # type: ignore[return-value]


def on_host(call: Call, arrays: tuple[Any, Any]) -> tuple[Any, Any]:
    return call.memory.get(arrays[0]), call.memory.get(arrays[1])


def test_two_plans_behind_a_long_kernel(spin: Any) -> None:
    """Plan A, run A, plan B, run B in one pair of workspaces while the stream is busy: no upload overtakes the run before it."""
    calls = [Call(decode_batch(seed), "fa2") for seed in (1, 2)]
    sizes = [max(pair) for pair in zip(*(call.size for call in calls), strict=True)]
    buffers = [cupy.empty(num_bytes, np.uint8) for num_bytes in sizes]
    wrapper = calls[0].wrapper
    wrapper.reset_workspace_buffer(*buffers)
    want = []
    for call in calls:
        call.wrapper = wrapper
        call.plan()
        arrays = outputs_of(call)
        call.run_into(*arrays)
        want.append(on_host(call, arrays))
        call.check(want[-1])
    outputs = [[outputs_of(call) for call in calls] for _ in range(100)]
    cupy.cuda.Device().synchronize()
    begin = time.perf_counter()
    for repeat in outputs:
        spin(5)
        for call, arrays in zip(calls, repeat, strict=True):
            call.plan()
            call.run_into(*arrays)
    queued = time.perf_counter() - begin
    cupy.cuda.Device().synchronize()
    assert queued < 0.4, f"queueing took {queued:.3f} s: something waited for the 5 ms kernels"
    for repeat in outputs:
        for call, arrays, expected in zip(calls, repeat, want, strict=True):
            assert_same_bits(on_host(call, arrays), expected)


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of CuPy runtime calls that wait, or copy to the host, made inside."""
    made: list[str] = []
    runtime = cupy.cuda.runtime
    with monkeypatch.context() as patch:

        def spy(name: str) -> Any:
            original = getattr(runtime, name)

            def call(*args: Any, **options: Any) -> Any:
                made.append(name)
                return original(*args, **options)

            return call

        for name in _WAITING:
            patch.setattr(runtime, name, spy(name))
        copy = runtime.memcpyAsync

        def copy_spy(destination: int, source: int, num_bytes: int, kind: int, stream: int) -> Any:
            if kind == runtime.memcpyDeviceToHost:
                made.append("memcpyAsync to the host")
            return copy(destination, source, num_bytes, kind, stream)

        patch.setattr(runtime, "memcpyAsync", copy_spy)
        get = cupy.ndarray.get

        def get_spy(array: Any, *args: Any, **options: Any) -> Any:
            made.append("ndarray.get")
            return get(array, *args, **options)

        patch.setattr(cupy.ndarray, "get", get_spy)
        yield made


@pytest.mark.parametrize("indices_on", ["host", "device"])
@pytest.mark.parametrize("op", ["decode", "paged", "ragged"])
def test_plan_waits_for_nothing(op: str, indices_on: str, spin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With offsets on the host, plan neither waits nor reads the device back, while 50 ms of work are queued."""
    num = 64
    case = Case((4096,) * num, None if op == "decode" else (3,) * num, op, heads=(4, 1), head_dims=(64, 64), indices_on=indices_on)
    call = Call(case, "fa2")
    arrays = outputs_of(call)
    call.plan()
    call.run_into(*arrays)
    want = on_host(call, arrays)
    seconds = []
    with watched(monkeypatch) as made:
        for _ in range(5):
            spin(50)
            begin = time.perf_counter()
            call.plan()
            call.run_into(*arrays)
            seconds.append(time.perf_counter() - begin)
            assert not cupy.cuda.get_current_stream().done, "the queued kernel is over, so nothing was measured"
            cupy.cuda.get_current_stream().synchronize()
    assert made == []
    assert sorted(seconds)[2] < 0.005, seconds
    assert_same_bits(on_host(call, arrays), want)


def test_device_offsets_are_read_after_the_work_that_makes_them(spin: Any) -> None:
    """Offsets written behind queued work on the current stream: plan waits for them, which is what they cost."""
    call = Call(Case((20, 300, 7)), "fa2")
    host = [call.plan_args[0], call.plan_args[2]]
    with cupy.cuda.Stream(non_blocking=True):
        sources, targets = [cupy.asarray(array) for array in host], [cupy.zeros(len(array), np.int32) for array in host]
        call.plan_args[0], call.plan_args[2] = targets
        spin(20)
        for source, target in zip(sources, targets, strict=True):
            target.data.copy_from_device_async(source.data, source.nbytes)
        call.plan()
        call.check(call.run())


def test_plan_on_one_stream_run_on_another(spin: Any) -> None:
    """The run waits for the upload, which waits for the work queued before it."""
    call = Call(decode_batch(3), "fa2")
    call.plan()
    arrays = outputs_of(call)
    call.run_into(*arrays)
    want = on_host(call, arrays)
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    for _ in range(10):
        call.ints.fill(0)
        call.memory.write(arrays[0], np.zeros_like(want[0]))
        cupy.cuda.Device().synchronize()
        with first:
            spin(10)
            call.plan()
        with second:
            call.run_into(*arrays)
        assert_same_bits(on_host(call, arrays), want)


def test_threads_with_objects_and_streams_of_their_own() -> None:
    """Four threads plan and run at once; staging memory and loaded kernels are shared behind the scenes."""
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with cupy.cuda.Stream(non_blocking=True):
                call = Call(decode_batch(seed, 10), "fa2")
                call.plan()
                want = call.run()
                call.check(want)
                for _ in range(20):
                    call.plan()
                    assert_same_bits(call.run(), want)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.fixture
def two_gpus() -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two CUDA GPUs")


@pytest.mark.parametrize(("home", "current"), [(1, 0), (0, 1)])
def test_arrays_on_a_gpu_that_is_not_current(home: int, current: int, two_gpus: None) -> None:
    for case in (Case((33, 700)), Case((33, 700), (3, 90), "ragged", causal=True)):
        with cupy.cuda.Device(home):
            call = Call(case, "fa2")
            arrays = outputs_of(call)
        with cupy.cuda.Device(current):
            call.plan()
            call.run_into(*arrays)
            kv = [tuple(call.caches)] if case.paged else call.caches
            made = call.wrapper.run(call.q, *kv)
            assert made.device.id == home
            assert cupy.cuda.runtime.getDevice() == current
        with cupy.cuda.Device(home):
            result = on_host(call, arrays)
            call.check(result)
            assert_same_bits((call.memory.get(made),), result[:1])


def test_arrays_of_two_gpus_are_refused(two_gpus: None) -> None:
    calls = []
    for device in (0, 1):
        with cupy.cuda.Device(device):
            calls.append(Call(Case((16,)), "fa2"))
            calls[-1].plan()
    here, there = calls
    with pytest.raises(ArgumentError, match="q: lies on cuda:1, the plan is for cuda:0"):
        here.wrapper.run(there.q, tuple(here.caches))
    with pytest.raises(ArgumentError, match=r"paged_kv_cache \(K\): lies on cuda:1, the plan is for cuda:0"):
        here.wrapper.run(here.q, tuple(there.caches))
    with pytest.raises(ArgumentError, match="indices: lies on cuda:1, the workspaces on cuda:0"):
        here.wrapper.plan(*there.plan_args, **there.plan_options)
    with pytest.raises(ArgumentError, match="int_workspace_buffer: lies on cuda:1, float_workspace_buffer on cuda:0"):
        here.wrapper.reset_workspace_buffer(here.floats.bytes, there.ints.bytes)


def test_a_profile_of_another_arch_is_sized_but_not_planned() -> None:
    """Any GPU can be sized for; kernels of another arch cannot run here."""
    own = cupy.cuda.Device().compute_capability
    name = "l4" if own != "89" else "a100"
    call = Call(Case((300,)), "fa2", profile=name)
    with pytest.raises(BackendUnavailable, match=f"^profile: {name} has kernels of"):
        call.plan()
