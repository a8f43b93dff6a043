# SPDX-License-Identifier: Apache-2.0
"""Adapters of the attention kernels cupyinfer is measured against; each is optional, and says so when its package is missing."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cupy
import ml_dtypes

from benchmarks.cases import Case
from benchmarks.data import CaseData
from benchmarks.variant import Adapter, Prepared

FLASHINFER_FLOAT_BYTES = 256 * 2**20
_XQA_SEMAPHORE_BYTES = 8 * 2**20
_XQA_PAGE_SIZES = (16, 32, 64, 128)
_FLASHINFER_FA3_HEAD_DIMS = (64, 128, 256)
#: Calls in one compiled JAX program: its stream is its own, so one call is a difference of two host-timed programs.
_JAX_CHAIN = 9


@functools.cache
def import_problem(*modules: str) -> str | None:
    """Why any of `modules` does not import here, or None. JAX is told not to reserve the GPU's memory first."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # a peer may fail to load in any way its binary likes; that must not end the run
            return f"{module}: {type(error).__name__}: {error}"
    return None


def to_torch(array: Any, dtype: str = "bfloat16") -> Any:
    """A PyTorch tensor over the memory of a CuPy array; fp8 arrives as uint8 and gets its type here."""
    import torch

    if dtype == "bfloat16":
        return torch.from_dlpack(array.view(cupy.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array).view(getattr(torch, dtype))


def from_torch(tensor: Any) -> Any:
    """A CuPy bfloat16 array over the memory of a PyTorch tensor."""
    import torch

    return cupy.from_dlpack(tensor.detach().contiguous().view(torch.int16)).view(ml_dtypes.bfloat16)


class _TorchRun:
    """A PyTorch call and its last result."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.result: Any = None

    def __call__(self) -> None:
        self.result = self._call()


def _flashinfer_sizes(wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | None, int | None]:
    """What the wrapper says it needs for this batch; versions before 0.7 cannot tell."""
    with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
        float_bytes, int_bytes = wrapper.workspace_size(*args, **kwargs)
        return int(float_bytes), int(int_bytes)
    return None, None


def _plan_and_prepare(name: str, wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Prepared:
    def plan() -> None:
        wrapper.plan(*args, **kwargs)

    plan()
    launch = _TorchRun(run)
    return Prepared(name, launch, lambda: from_torch(launch.result), plan, *_flashinfer_sizes(wrapper, args, kwargs))


def flashinfer_types(case: Case) -> dict[str, Any]:
    import torch

    return {"q_data_type": torch.bfloat16, "kv_data_type": getattr(torch, case.kv_dtype)}


@dataclass(frozen=True)
class FlashInferDecode:
    """FlashInfer's batch decode: its CUDA-core kernel, or its prefill kernel on tensor cores."""

    name: str
    tensor_cores: bool

    @property
    def missing(self) -> str | None:
        return import_problem("torch", "flashinfer")

    def supports(self, case: Case) -> bool:
        # The CUDA-core kernel is built for these group sizes alone.
        return case.kind == "decode" and (self.tensor_cores or case.num_qo_heads // case.num_kv_heads in (1, 2, 3, 4, 6, 8, 16))

    def prepare(self, data: CaseData) -> Prepared:
        import flashinfer
        import torch

        case = data.case
        buffer = torch.empty(FLASHINFER_FLOAT_BYTES, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(buffer, "NHD", use_tensor_cores=self.tensor_cores, backend="fa2")
        host = (torch.from_numpy(x) for x in (data.page_indptr, data.page_indices, data.last_page_len))
        args = (*host, case.num_qo_heads, case.num_kv_heads, case.head_dim, case.page_size)
        q, kv = to_torch(data.q), tuple(to_torch(x, case.kv_dtype) for x in data.paged_kv)
        out = torch.empty_like(q)
        return _plan_and_prepare(self.name, wrapper, args, flashinfer_types(case), lambda: wrapper.run(q, kv, out=out))


@dataclass(frozen=True)
class FlashInferXqa:
    """FlashInfer's XQA decode, which plans nothing and takes a rectangular page table."""

    name: str = "flashinfer xqa"

    @property
    def missing(self) -> str | None:
        return import_problem("torch", "flashinfer.xqa")

    def supports(self, case: Case) -> bool:
        return case.kind == "decode" and case.page_size in _XQA_PAGE_SIZES

    def prepare(self, data: CaseData) -> Prepared:
        import torch
        from flashinfer.xqa import xqa

        case = data.case
        q, (k, v) = to_torch(data.q).unsqueeze(1), (to_torch(x, case.kv_dtype) for x in data.paged_kv)
        table = torch.zeros(case.batch_size, max(case.pages_per_request), dtype=torch.int32)
        for request, pages in enumerate(case.pages_per_request):
            begin = int(data.page_indptr[request])
            table[request, :pages] = torch.from_numpy(data.page_indices[begin : begin + pages])
        table = table.cuda()
        kv_lens = torch.tensor(case.kv_lens, dtype=torch.int32, device="cuda").view(torch.uint32).unsqueeze(1)
        scratch = torch.zeros(FLASHINFER_FLOAT_BYTES, dtype=torch.uint8, device="cuda")
        semaphores = torch.zeros(_XQA_SEMAPHORE_BYTES // 4, dtype=torch.int32, device="cuda").view(torch.uint32)
        out = torch.empty_like(q)

        def run() -> Any:
            xqa(q, k, v, table, kv_lens, out, scratch, semaphores, case.num_kv_heads, case.page_size)
            return out

        launch = _TorchRun(run)
        return Prepared(self.name, launch, lambda: from_torch(launch.result.squeeze(1)))


@dataclass(frozen=True)
class FlashInferPrefill:
    """FlashInfer's batch prefill, `backend` "fa2" or "fa3", on paged or ragged keys."""

    name: str
    backend: str
    paged: bool

    @property
    def missing(self) -> str | None:
        return import_problem("torch", "flashinfer")

    def supports(self, case: Case) -> bool:
        hopper = cupy.cuda.Device().compute_capability == "90"
        fits = self.backend != "fa3" or (hopper and case.head_dim in _FLASHINFER_FA3_HEAD_DIMS)
        return case.kind == "prefill" and case.kv_dtype == "bfloat16" and fits

    def prepare(self, data: CaseData) -> Prepared:
        import flashinfer
        import torch

        case = data.case
        buffer = torch.empty(FLASHINFER_FLOAT_BYTES, dtype=torch.uint8, device="cuda")
        q = to_torch(data.q)
        out = torch.empty_like(q)
        heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim)
        kwargs = {"causal": case.causal, **flashinfer_types(case)}
        if self.paged:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(buffer, "NHD", backend=self.backend)
            host = (torch.from_numpy(x) for x in (data.qo_indptr, data.page_indptr, data.page_indices, data.last_page_len))
            kv = tuple(to_torch(x) for x in data.paged_kv)
            return _plan_and_prepare(self.name, wrapper, (*host, *heads, case.page_size), kwargs, lambda: wrapper.run(q, kv, out=out))
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(buffer, "NHD", backend=self.backend)
        host = (torch.from_numpy(x) for x in (data.qo_indptr, data.kv_indptr))
        k, v = (to_torch(x) for x in data.ragged_kv)
        return _plan_and_prepare(self.name, wrapper, (*host, *heads), kwargs, lambda: wrapper.run(q, k, v, out=out))


def _dense(data: CaseData) -> tuple[Any, Any, Any]:
    """q, k, v of an equal-length batch as [batch, length, heads, head_dim], without a copy."""
    case = data.case
    k, v = data.ragged_kv
    q = data.q.reshape(case.batch_size, case.qo_lens[0], case.num_qo_heads, case.head_dim)
    return q, *(x.reshape(case.batch_size, case.kv_lens[0], case.num_kv_heads, case.head_dim) for x in (k, v))


@dataclass(frozen=True)
class TorchSdpa:
    """PyTorch's scaled_dot_product_attention held to one of its backends, on dense batches."""

    name: str
    backend: str

    @property
    def missing(self) -> str | None:
        return import_problem("torch")

    def supports(self, case: Case) -> bool:
        # Its causal mask is aligned to the first key, so a chunk over a context would be another computation.
        aligned = not case.causal or case.qo_lens == case.kv_lens
        return case.kind == "prefill" and case.equal_lengths and aligned and case.kv_dtype == "bfloat16"

    def prepare(self, data: CaseData) -> Prepared:
        from torch.nn import attention, functional

        case = data.case
        backend = getattr(attention.SDPBackend, self.backend)
        q, k, v = (to_torch(x).transpose(1, 2) for x in _dense(data))

        def run() -> Any:
            with attention.sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=True)

        launch = _TorchRun(run)
        return Prepared(self.name, launch, lambda: from_torch(launch.result.transpose(1, 2).reshape(data.q.shape)))


@dataclass(frozen=True)
class FlashAttention3:
    """FlashAttention-3 through JAX, on dense batches. Timed as a difference of two programs of 1 and 9 calls, L2 warm."""

    name: str = "flash-attention 3"

    @property
    def missing(self) -> str | None:
        return import_problem("jax", "flash_attn3_jax")

    def supports(self, case: Case) -> bool:
        hopper = cupy.cuda.Device().compute_capability == "90"
        return hopper and case.kind == "prefill" and case.equal_lengths and case.kv_dtype == "bfloat16"

    def prepare(self, data: CaseData) -> Prepared:
        import jax
        from flash_attn3_jax import flash_mha

        case = data.case
        cupy.cuda.get_current_stream().synchronize()
        arrays = [jax.dlpack.from_dlpack(x) for x in _dense(data)]

        def chain(calls: int, q: Any, k: Any, v: Any) -> list[Any]:
            outs = []
            for _ in range(calls):
                outs.append(flash_mha(q, k, v, is_causal=case.causal))
                # Ties the next call to this one, so that equal calls are not merged into one.
                q, _ = jax.lax.optimization_barrier((q, outs[-1]))
            return outs

        programs = {calls: jax.jit(functools.partial(chain, calls)) for calls in (1, _JAX_CHAIN)}

        def host_us(calls: int) -> float:
            cupy.cuda.get_current_stream().synchronize()
            start = time.perf_counter_ns()
            jax.block_until_ready(programs[calls](*arrays))
            return (time.perf_counter_ns() - start) / 1e3

        def self_timed() -> float:
            return (host_us(_JAX_CHAIN) - host_us(1)) / (_JAX_CHAIN - 1)

        def output() -> Any:
            result = jax.block_until_ready(programs[1](*arrays))[0]
            return cupy.from_dlpack(result).reshape(data.q.shape)

        def launch() -> None:
            for program in programs.values():
                jax.block_until_ready(program(*arrays))

        return Prepared(self.name, launch, output, self_timed=self_timed)


PEERS: tuple[Adapter, ...] = (
    FlashInferDecode("flashinfer cuda", tensor_cores=False),
    FlashInferDecode("flashinfer tc", tensor_cores=True),
    FlashInferXqa(),
    FlashInferPrefill("flashinfer fa2 ragged", "fa2", paged=False),
    FlashInferPrefill("flashinfer fa2 paged", "fa2", paged=True),
    FlashInferPrefill("flashinfer fa3 ragged", "fa3", paged=False),
    FlashInferPrefill("flashinfer fa3 paged", "fa3", paged=True),
    TorchSdpa("cudnn", "CUDNN_ATTENTION"),
    TorchSdpa("flash-attention 2", "FLASH_ATTENTION"),
    FlashAttention3(),
)
