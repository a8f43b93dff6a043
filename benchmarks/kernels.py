# SPDX-License-Identifier: Apache-2.0
"""The two CUDA kernels the benchmarks need of their own: read N bytes once, and fill a buffer with random data."""

from __future__ import annotations

import functools
from typing import Any

import cupy
import ml_dtypes
import numpy as np

#: Threads per CTA of the stream kernel, and 16-byte loads each thread keeps in flight.
STREAM_THREADS = 512
STREAM_UNROLL = (4, 8)

_SOURCE = r"""
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ uint4 load_once(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

__device__ __forceinline__ u32 fold(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }

// Each CTA walks blocks of THREADS * UNROLL vectors in grid stride; the loads of a whole block do not wait for one
// another. The asm is volatile, so none is dropped although the folded value is stored only when it hits one word in 2^32.
template <int UNROLL>
__device__ __forceinline__ void stream(const uint4* __restrict__ data, u64 count, u32* sink) {
  const u64 block = (u64)THREADS * UNROLL;
  u32 folded = 0;
  for (u64 base = blockIdx.x * block; base < count; base += gridDim.x * block) {
    const uint4* p = data + base + threadIdx.x;
    if (base + block <= count) {
      uint4 v[UNROLL];
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) v[i] = load_once(p + i * THREADS);
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) folded ^= fold(v[i]);
    } else {
      for (u64 at = base + threadIdx.x; at < count; at += THREADS) folded ^= fold(load_once(data + at));
    }
  }
  if (folded == 0x9e3779b9u) *sink = folded;
}

extern "C" __global__ void __launch_bounds__(THREADS) stream4(const uint4* data, u64 count, u32* sink) { stream<4>(data, count, sink); }
extern "C" __global__ void __launch_bounds__(THREADS) stream8(const uint4* data, u64 count, u32* sink) { stream<8>(data, count, sink); }

__device__ __forceinline__ u64 mix(u64 x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// A sum of four uniforms, scaled to unit variance: close to normal, and without a long tail.
extern "C" __global__ void fill_bfloat16(unsigned short* out, u64 count, u64 seed) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) {
    const u64 h = mix(i ^ mix(seed));
    float sum = 0.f;
    for (int part = 0; part < 4; ++part) sum += (float)((h >> (16 * part)) & 0xffff) * (1.f / 65536.f) - 0.5f;
    const u32 bits = __float_as_uint(sum * 1.7320508f);
    out[i] = (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
}

// e4m3 values of either sign between 2^-4 and 2: all mantissas, no NaN.
extern "C" __global__ void fill_float8_e4m3fn(unsigned char* out, u64 count, u64 seed) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) {
    const u64 h = mix(i ^ mix(seed));
    out[i] = (unsigned char)(((h & 1) << 7) | ((3 + (h >> 8) % 5) << 3) | ((h >> 32) & 7));
  }
}
"""


@functools.cache
def function(name: str) -> Any:
    """One kernel of this file by name."""
    return cupy.RawModule(code=_SOURCE, options=("--std=c++17", f"-DTHREADS={STREAM_THREADS}")).get_function(name)


def launch_stream(data: Any, num_bytes: int, sink: Any, num_ctas: int, unroll: int) -> None:
    """Read the first `num_bytes` (a multiple of 16) of `data` once, on the current stream."""
    function(f"stream{unroll}")((num_ctas,), (STREAM_THREADS,), (data, np.uint64(num_bytes // 16), sink))


def random_array(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    """A CuPy array of random data: bfloat16, or uint8 that holds float8_e4m3fn (CuPy has no such dtype)."""
    count = int(np.prod(shape, dtype=np.int64))
    storage = np.uint16 if dtype == "bfloat16" else np.uint8
    out = cupy.empty(shape, dtype=storage)
    ctas = min(4096, max(1, -(-count // 256)))
    function(f"fill_{dtype}")((ctas,), (256,), (out, np.uint64(count), np.uint64(seed)))
    return out.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else out
