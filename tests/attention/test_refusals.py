# SPDX-License-Identifier: Apache-2.0
"""What a stranger may try: wrong constructions, memory that is used twice, numbers without bounds, GPU backends where there is no GPU."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from cupyinfer import (
    ArgumentError,
    ArgumentTypeError,
    BackendUnavailable,
    BatchDecodeWithPagedKVCacheWrapper,
    WorkspaceError,
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
)
from cupyinfer.backends.device import has_gpu
from tests.support.batches import Case
from tests.support.runner import WRAPPERS, Call, assert_same_bits

BATCH: dict[str, Any] = {
    "indptr": [0, 9],
    "indices": range(9),
    "last_page_len": [3],
    "num_qo_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 64,
    "page_size": 16,
}


@pytest.mark.parametrize(("float_part", "int_part"), [((0, 4096), (0, 4096)), ((0, 2048), (1024, 4096)), ((1024, 4096), (0, 2048))])
def test_workspaces_that_share_memory_are_refused(float_part: tuple[int, int], int_part: tuple[int, int]) -> None:
    memory = np.zeros(4096 + 16, np.uint8)
    memory = memory[-memory.ctypes.data % 16 :][:4096]
    with pytest.raises(WorkspaceError, match=r"^int_workspace_buffer: shares memory with float_workspace_buffer"):
        BatchDecodeWithPagedKVCacheWrapper(memory[slice(*float_part)], memory[slice(*int_part)], backend="host")


def test_neighbouring_workspaces_are_fine() -> None:
    memory = np.zeros(65536 + 16, np.uint8)
    memory = memory[-memory.ctypes.data % 16 :][:65536]
    wrapper = BatchDecodeWithPagedKVCacheWrapper(memory[:49152], memory[49152:], backend="host")
    wrapper.plan(**BATCH)
    assert wrapper.plan_info.num_requests == 1


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("page_size", 2**62),
        ("window_left", 2**70),
        ("sm_scale", 10**400),
        ("logits_soft_cap", 10**400),
        ("head_dim", 2**40),
        ("num_qo_heads", 2**33),
    ],
)
def test_numbers_without_bounds_are_refused(argument: str, value: int) -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(backend="host")
    with pytest.raises(ArgumentError, match=f"^{argument}: got "):
        wrapper.workspace_size(**{**BATCH, argument: value})


@pytest.mark.skipif(has_gpu(), reason="is about machines without a GPU")
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_gpu_backends_without_a_gpu(backend: str) -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(backend=backend)
    with pytest.raises(BackendUnavailable, match=r"^no CUDA GPU is visible through CuPy"):
        wrapper.workspace_size(**BATCH)
    with pytest.raises(BackendUnavailable, match=r"^no CUDA GPU is visible through CuPy"):
        wrapper.plan(**BATCH)
    if backend == "fa2":
        named = BatchDecodeWithPagedKVCacheWrapper(backend=backend, profile="h100")
        assert named.workspace_size(**BATCH).int_bytes > 0


OPS = ("decode", "paged", "ragged")


def planned(op: str, backend: str) -> Call:
    """A call in which every output could lie in one of the inputs: widths of K, V, queries and outputs are the same."""
    queries = None if op == "decode" else (2, 1)
    call = Call(Case((300, 40), queries, op, heads=(2, 2), head_dims=(64, 64), fixed_split_size=8, indices_on="host"), backend)
    call.wrapper.reset_workspace_buffer(call.floats.bytes, call.memory.put(np.zeros(call.size.int_bytes + 4096, np.uint8)))
    call.plan()
    return call


def as_type(array: Any, dtype: Any, shape: tuple[int, ...], offset: int = 0) -> Any:
    """The memory from some byte of an array on, as another array."""
    kind = type(array)
    flat = array.reshape(-1).view(np.uint8)
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    part = flat[offset : offset + num_bytes].view(dtype).reshape(shape)
    assert isinstance(part, kind)
    return part


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("output", ["out", "lse"])
def test_outputs_that_share_memory_with_what_a_run_reads_are_refused(op: str, output: str, backend: str) -> None:
    call = planned(op, backend)
    shape, dtype = (call.q.shape, np.float16) if output == "out" else (call.q.shape[:2], np.float32)
    names = (
        {"q": "q", "k": r"paged_kv_cache \(K\)", "v": r"paged_kv_cache \(V\)"} if op != "ragged" else dict(zip("qkv", "qkv", strict=True))
    )
    places = dict(zip(names.values(), (call.q, *call.caches), strict=True))
    places |= {"float_workspace_buffer": call.floats.bytes, "int_workspace_buffer": call.wrapper._workspaces.int_bytes}
    kv = [tuple(call.caches)] if call.case.paged else call.caches
    want = call.run()
    before = {name: call.memory.get(place) for name, place in places.items()}
    for name, place in places.items():
        for offset in (0, 128) if place.nbytes > int(np.prod(shape)) * np.dtype(dtype).itemsize + 128 else (0,):
            with pytest.raises(ArgumentError, match=rf"^{output}: shares memory with {name}; a run would write over"):
                call.wrapper.run(call.q, *kv, **{output: as_type(place, dtype, shape, offset)}, return_lse=True)
        np.testing.assert_array_equal(call.memory.get(place).view(np.uint8), before[name].view(np.uint8))
    assert_same_bits(call.run(), want)


@pytest.mark.parametrize("op", OPS)
def test_outputs_that_share_memory_with_each_other_are_refused(op: str, backend: str) -> None:
    call = planned(op, backend)
    kv = [tuple(call.caches)] if call.case.paged else call.caches
    both = call.memory.put(np.zeros(call.q.shape, np.float16))
    with pytest.raises(ArgumentError, match=r"^lse: shares memory with out; a run would write over what it reads or writes"):
        call.wrapper.run(call.q, *kv, out=both, lse=as_type(both, np.float32, call.q.shape[:2]), return_lse=True)


def test_rows_between_the_rows_of_another_array_are_no_overlap(backend: str) -> None:
    """Queries, keys, values and outputs as columns of one array: its parts lie in each other's reach and share no byte."""
    call = planned("ragged", backend)
    num_tokens = max(len(call.data.q), *(len(cache) for cache in call.data.caches))
    packed = call.memory.put(np.zeros((num_tokens, 4, 2, 64), np.float16))
    out, q, k, v = (packed[:, at] for at in range(4))
    q, out = q[: len(call.data.q)], out[: len(call.data.q)]
    for part, source in ((q, call.q), (k, call.caches[0]), (v, call.caches[1])):
        part[: len(source)] = source
    want = call.run()
    call.wrapper.run(q, k, v, out=out)
    assert_same_bits((call.memory.get(out),), want[:1])
    with pytest.raises(ArgumentError, match=r"^out: shares memory with q;"):
        call.wrapper.run(q, k, v, out=q)
    with pytest.raises(ArgumentError, match=r"^out: shares memory with k;"):
        call.wrapper.run(q, k, v, out=k[: len(q)])


@pytest.mark.decode
def test_outputs_outside_of_what_a_plan_uses_are_fine(backend: str) -> None:
    """A workspace larger than the plan needs may hold the output behind the plan's part, and an empty batch writes nothing."""
    call = planned("decode", backend)
    want = call.run()
    begin = -(-call.size.float_bytes // 256) * 256
    larger = call.memory.put(np.zeros(begin + call.q.nbytes, np.uint8))
    call.wrapper.reset_workspace_buffer(larger, call.ints.bytes)
    call.plan()
    out = as_type(larger, np.float16, call.q.shape, begin)
    call.wrapper.run(call.q, tuple(call.caches), out=out)
    assert_same_bits((call.memory.get(out),), want[:1])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("value", ["no", 1, 0.0, None])
def test_flags_are_true_or_false(value: Any, op: str, backend: str) -> None:
    """A string such as "no" would be true."""
    words = re.escape(f"got {value!r}, expected True or False")
    with pytest.raises(ArgumentTypeError, match=f"^use_cuda_graph: {words}$"):
        WRAPPERS[op](use_cuda_graph=value, backend=backend)
    call = planned(op, backend)
    kv = [tuple(call.caches)] if call.case.paged else call.caches
    with pytest.raises(ArgumentTypeError, match=f"^return_lse: {words}$"):
        call.wrapper.run(call.q, *kv, return_lse=value)
    assert len(call.wrapper.run(call.q, *kv, return_lse=np.True_)) == 2
    put = call.memory.put
    q, k, v = put(call.data.q), put(call.data.keys[0]), put(call.data.values[0])
    for single, query in ((single_decode_with_kv_cache, q[0]), (single_prefill_with_kv_cache, q)):
        with pytest.raises(ArgumentTypeError, match=f"^return_lse: {words}$"):
            single(query, k, v, return_lse=value)


def test_wrong_construction(backend: str) -> None:
    for wrapper in WRAPPERS.values():
        with pytest.raises(ArgumentError, match="kv_layout: got 'NDH', expected 'NHD' or 'HND'"):
            wrapper(kv_layout="NDH", backend=backend)
        with pytest.raises(ArgumentError, match="backend: got 'fa9', expected one of auto, fa2, fa3, host"):
            wrapper(backend="fa9")
        with pytest.raises(ArgumentError, match=r"profile: got 'h900', known are .*h200"):
            wrapper(profile="h900", backend=backend)
        with pytest.raises(ArgumentTypeError, match="profile: got int"):
            wrapper(profile=90, backend=backend)
