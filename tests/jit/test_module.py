# SPDX-License-Identifier: Apache-2.0
"""Loading and launching, on a GPU where there is one."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyinfer.errors import ArgumentError, BackendUnavailable
from cupyinfer.jit import module
from cupyinfer.jit.cache import CacheCounters, CubinCache
from cupyinfer.jit.compiler import CompileReport, compile_cubin
from cupyinfer.jit.module import LoadedKernel, load_cubin, load_kernel, params_pointer
from cupyinfer.jit.source import KernelSource
from cupyinfer.jit.variant import AttentionVariant
from cupyinfer.schedule.profile import DeviceProfile, arch_for_capability, profile_for_arch

DECODE = AttentionVariant("bfloat16", "bfloat16", 128, 128, 16, paged=True)
PARAMS = np.dtype([("out", np.uint64), ("n", np.int32), ("unused", np.int32)], align=True)
# The last word of shared memory that the launch asked for carries the value.
LARGE_SMEM = 64 * 1024
THROUGH_SMEM = KernelSource(
    "through_smem",
    """
struct Params { float* out; int n; int unused; };
extern __shared__ float smem[];
extern "C" __global__ void through_smem(const __grid_constant__ Params p) {
  if (threadIdx.x == 0) smem[64 * 256 - 1] = p.n;
  __syncthreads();
  p.out[blockIdx.x * blockDim.x + threadIdx.x] = smem[64 * 256 - 1] + threadIdx.x;
}
""",
    "through_smem",
    LARGE_SMEM,
)


def test_a_launch_hands_over_exactly_what_it_got() -> None:
    calls: list[tuple[Any, ...]] = []
    kernel = LoadedKernel("fake", lambda *arguments: calls.append(arguments), 0, 512, CompileReport(1, 0, 0, 0, ()))
    params, stream = object(), object()
    kernel.launch((132, 1, 1), (256, 1, 1), 512, params, stream)
    kernel.launch((1,), (32,), 0, params)
    assert calls == [((132, 1, 1), (256, 1, 1), (params,), 512, stream), ((1,), (32,), (params,), 0, None)]


def test_exactly_one_parameter_record() -> None:
    with pytest.raises(ArgumentError, match=r"record: got shape \(2,\)"):
        params_pointer(np.zeros(2, PARAMS))


def test_without_a_gpu_nothing_is_compiled(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr(cupy.cuda, "is_available", lambda: False)
    cache = CubinCache(fresh_cache)
    with pytest.raises(BackendUnavailable, match="device 0 is not there: CuPy sees 0 CUDA devices"):
        load_kernel(DECODE, profile_for_arch("sm_90a"), 0, cache)
    assert cache.counters == CacheCounters()


def test_without_cupy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'cupyinfer\[cuda12\]'"):
        load_kernel(DECODE, profile_for_arch("sm_90a"), 0)


def gpu_profile() -> DeviceProfile:
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    return profile_for_arch(arch_for_capability(properties["major"], properties["minor"]))


@pytest.mark.gpu
def test_a_parameter_record_is_read_at_every_launch() -> None:
    import cupy

    kernel = load_cubin(THROUGH_SMEM, compile_cubin(THROUGH_SMEM, gpu_profile().arch), 0)
    record = np.zeros((), PARAMS)
    params = params_pointer(record)
    out = [cupy.full(256, -1, np.float32) for _ in range(2)]
    for i, n in enumerate((5, 7000)):
        record["out"], record["n"] = out[i].data.ptr, n
        kernel.launch((2, 1, 1), (128, 1, 1), LARGE_SMEM, params, cupy.cuda.get_current_stream())
    for i, n in enumerate((5, 7000)):
        np.testing.assert_array_equal(out[i].get(), n + np.tile(np.arange(128, dtype=np.float32), 2))
    assert kernel.ctas_per_sm(128, LARGE_SMEM) >= 1


@pytest.mark.gpu
def test_a_prepared_launch_works_in_a_thread_that_is_new_to_cuda() -> None:
    import cupy

    kernel = load_cubin(THROUGH_SMEM, compile_cubin(THROUGH_SMEM, gpu_profile().arch), 0)
    record = np.zeros((), PARAMS)
    launch = kernel.prepared(128, LARGE_SMEM, record.ctypes.data)
    out = [cupy.full(256, -1, np.float32) for _ in range(2)]
    stream = cupy.cuda.get_current_stream()
    for i, n in enumerate((5, 7000)):
        record["out"], record["n"] = out[i].data.ptr, n
        thread = threading.Thread(target=launch, args=(2, stream.ptr))
        thread.start()
        thread.join()
    for i, n in enumerate((5, 7000)):
        np.testing.assert_array_equal(out[i].get(), n + np.tile(np.arange(128, dtype=np.float32), 2))


@pytest.mark.gpu
def test_more_shared_memory_than_the_gpu_has_is_refused() -> None:
    source = KernelSource("greedy", THROUGH_SMEM.text, "through_smem", 1 << 20)
    with pytest.raises(BackendUnavailable, match="device 0 refuses greedy with 1048576 bytes"):
        load_cubin(source, compile_cubin(source, gpu_profile().arch), 0)


@pytest.mark.gpu
def test_a_kernel_is_loaded_once(installed_tree: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_loaded", {})
    cache = CubinCache(fresh_cache)
    first = load_kernel(DECODE, gpu_profile(), 0, cache)
    assert load_kernel(DECODE, gpu_profile(), 0, cache) is first
    assert cache.counters == CacheCounters(hits=0, misses=1, compiles=1)
