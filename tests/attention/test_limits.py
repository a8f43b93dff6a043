# SPDX-License-Identifier: Apache-2.0
"""Sizes at the edges: what is needed and no more, forms of index arrays, empty states, and batches beyond 32 and 16 bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cupyinfer
from cupyinfer import PROFILES, WorkspaceError, WorkspaceLimits, workspace_bound
from cupyinfer.backends.arrays import row_strides
from cupyinfer.errors import ArgumentError, UnsupportedError
from cupyinfer.interop import CPU_DEVICE, ArrayView
from tests.support.batches import Case, Data
from tests.support.runner import WRAPPERS, Call, assert_same_bits, run_case


def size_of(case: Case, profile: Any, **construct: Any) -> cupyinfer.WorkspaceSize:
    """What a case with its page table on the host needs on a GPU that need not be there."""
    num_pages = [-(-n // case.page_size) for n in case.kv_lens]
    indptr, last_page_len = np.cumsum([0, *num_pages]), [(n - 1) % case.page_size + 1 for n in case.kv_lens]
    batch = [indptr, np.arange(indptr[-1]), last_page_len, *case.heads, case.head_dims[0], case.page_size]
    options: dict[str, Any] = {"q_data_type": case.dtype, "disable_split_kv": case.disable_split_kv}
    if case.op == "paged":
        batch.insert(0, np.cumsum([0, *case.queries]))
        options["causal"] = case.causal
    wrapper = WRAPPERS[case.op](use_cuda_graph=case.graph, profile=profile, **construct)
    return wrapper.workspace_size(*batch, **options)


def test_graph_decode_scratch_follows_what_may_be_split() -> None:
    """512 requests with two KV heads: scratch of the rows that one wave of CTAs can share, whatever the group."""
    common = {"dtype": "bfloat16", "head_dims": (256, 256), "graph": True}
    sizes = [size_of(Case((3072,) * 512, heads=(32, kv), **common), "h200").float_bytes for kv in (32, 16, 8, 4, 2)]
    assert max(sizes) <= 34_000_000
    rows_of_two_parts_per_cta = 2 * 132 * 16 * (256 + 1) * 4
    assert max(sizes) <= rows_of_two_parts_per_cta
    assert size_of(Case((3072,) * 512, heads=(32, 2), disable_split_kv=True, **common), "h200").float_bytes == 0


@pytest.mark.parametrize("num_sms", [56, 84, 108, 132, 142, 148, 160])
def test_the_need_of_any_gpu_is_known_anywhere(num_sms: int) -> None:
    profile = replace(PROFILES["h200"], name="other", num_sms=num_sms)
    case = Case((16384,), (512,), "paged", heads=(32, 8), dtype="bfloat16", causal=True)
    size = size_of(case, profile)
    assert size == size_of(case, profile)
    bound = workspace_bound(WorkspaceLimits("prefill", 1, 32, 8, 128, max_num_qo_tokens=512, max_num_pages=1024), profile)
    assert size.float_bytes <= bound.float_bytes and size.int_bytes <= bound.int_bytes
    assert bound.float_bytes <= 2 * num_sms * 2 * 128 * (128 + 1) * 4


def test_one_request_of_many_keys(backend: str) -> None:
    """Exact sizes suffice and a byte less does not, where every SM works on the same request."""
    long = 16384 if backend != "host" else 3000
    run_case(Case((long,), (512 if backend != "host" else 80,), "paged", heads=(8, 2), dtype="bfloat16", causal=True), backend)


def test_partial_results_are_float32_and_all_of_them_are_used(backend: str) -> None:
    """Reserved bytes are rows * (head_dim_vo + 1) * 4, and a run writes the last of them."""
    call = Call(Case((3000,) * 3, (64,) * 3, "paged", heads=(4, 1), causal=True, fixed_split_size=32), backend)
    call.plan()
    rows = call.wrapper.plan_info.num_partial_rows
    assert call.size.float_bytes == rows * 128 * 4 + rows * 4
    call.floats.fill(0xC3)
    call.check(call.run())
    contents = call.floats.contents().view(np.uint32)
    untouched = contents == 0xC3C3C3C3
    assert not untouched[rows * 128 - 128 : rows * 128].any() and not untouched[-1]
    assert not untouched.any()


@pytest.mark.parametrize("op", ["decode", "paged", "ragged"])
def test_an_unaligned_workspace_is_refused(op: str, backend: str) -> None:
    case = Case((1, 17, 2000), None if op == "decode" else (1, 3, 9), op)
    call = Call(case, backend)
    room = call.memory.put(np.zeros(call.size.float_bytes + 16, np.uint8))
    for shift in (1, 4, 8):
        with pytest.raises(WorkspaceError, match=rf"float_workspace_buffer: begins {shift} bytes past a multiple of 16"):
            call.wrapper.reset_workspace_buffer(room[shift:], call.ints.bytes)


@pytest.mark.parametrize("width", [np.int64, np.int32, np.uint32, np.int16])
@pytest.mark.parametrize("op", ["decode", "paged", "ragged"])
def test_index_arrays_of_any_width(op: str, width: Any, backend: str) -> None:
    case = Case((40, 25, 0), None if op == "decode" else (4, 2, 1), op, page_size=4, head_dims=(64, 64))
    want = run_case(case, backend)
    call = Call(case, backend)
    host = Call(replace(case, indices_on="host"), backend)
    for make in (lambda a: a.astype(width), lambda a: call.memory.put(a.astype(width)), lambda a: a.astype(width).tolist()):
        call.plan_args = [make(argument) if isinstance(argument, np.ndarray) else argument for argument in host.plan_args]
        call.wrapper.reset_workspace_buffer(host.floats.bytes, host.ints.bytes)
        call.plan()
        assert_same_bits(call.run(), want)


@pytest.mark.decode
@pytest.mark.parametrize("step", [2, -1])
def test_strided_index_arrays(step: int, backend: str) -> None:
    """Views with gaps or backwards, on the host and on the device, are read as they are."""
    case = Case((40, 25), page_size=4, head_dims=(64, 64), indices_on="host")
    want = run_case(case, backend)
    call = Call(case, backend)

    def strided(array: Any) -> Any:
        room = np.full(len(array) * abs(step), 77, np.int32)
        room[::step] = array
        return room

    positions = [at for at, argument in enumerate(call.plan_args) if isinstance(argument, np.ndarray)]
    for put in (lambda room: room, call.memory.put):
        args = list(call.plan_args)
        for at in positions:
            args[at] = put(strided(call.plan_args[at]))[::step]
        call.wrapper.plan(*args, **call.plan_options)
        assert_same_bits(call.run(), want)


@pytest.mark.decode
@pytest.mark.parametrize("last_page_len", [0, 1, 16])
def test_any_last_page_length_without_pages(last_page_len: int, backend: str) -> None:
    call = Call(Case((0, 5)), backend)
    call.plan_args[2] = np.array([last_page_len, 5], np.int32)
    call.plan()
    o, lse = call.run()
    call.check((o, lse))
    assert not o[0].astype(np.float32).any() and np.isneginf(lse[0]).all()


@pytest.mark.decode
def test_a_page_past_the_cache_is_refused(backend: str) -> None:
    call = Call(Case((4,), indices_on="host"), backend)
    call.plan_args[1] = np.array([999], np.int32)
    call.plan()
    with pytest.raises(ArgumentError, match=r"^paged_kv_cache \(K\): has 4 pages, the page table refers to page 999"):
        call.run()


def test_offsets_of_different_lengths(backend: str) -> None:
    call = Call(Case((1,) * 4, (1,) * 4, "paged"), backend)
    for at, short in ((1, [0]), (1, [0, 1, 2]), (0, [0, 1])):
        args = list(call.plan_args)
        args[at] = np.array(short, np.int32)
        with pytest.raises(ArgumentError, match=r"paged_kv_indptr: has \d entries, qo_indptr has \d; both need batch_size \+ 1"):
            call.wrapper.plan(*args, **call.plan_options)


@pytest.mark.parametrize("op", ["decode", "paged", "ragged"])
def test_an_empty_batch_launches_nothing(op: str, backend: str) -> None:
    call = Call(Case((), None if op == "decode" else (), op), backend)
    assert call.size == (0, 0)
    wrapper = WRAPPERS[op](backend=backend)
    wrapper.plan(*call.plan_args, **call.plan_options)
    kv = [tuple(call.caches)] if call.case.paged else call.caches
    o, lse = wrapper.run(call.q, *kv, return_lse=True)
    assert o.shape == (0, 8, 128) and lse.shape == (0, 8)


@pytest.mark.parametrize("head_dim", [8, 56, 72, 80, 100, 224, 512])
@pytest.mark.parametrize("op", ["decode", "paged", "ragged"])
def test_head_dims_without_a_kernel_are_refused(op: str, head_dim: int, backend: str) -> None:
    """By sizing and by planning, with what there is instead; nothing is compiled or launched, and an earlier plan stays."""
    call = Call(Case((40, 5), None if op == "decode" else (4, 2), op, head_dims=(64, 64)), backend)
    call.plan()
    want = call.run()
    at = next(at for at, argument in enumerate(call.plan_args) if isinstance(argument, int) and argument == 64)
    args = [*call.plan_args[:at], head_dim, *call.plan_args[at + 1 :]]
    options = {**call.plan_options, "head_dim_vo": head_dim}
    for ask in (call.wrapper.workspace_size, call.wrapper.plan):
        with pytest.raises(UnsupportedError, match=rf"head_dim: got {head_dim} .*, supported are 64, 96, 128, 192 .*, 256$"):
            ask(*args, **options)
    assert_same_bits(call.run(), want)


@pytest.mark.decode
def test_65536_requests(backend: str) -> None:
    """More rows than a grid has in its second dimension: each gets its own value row."""
    num = 65536 if backend != "host" else 2000
    call = Call(Case((), heads=(1, 1), head_dims=(64, 64), page_size=1), backend)
    rng = np.random.default_rng(0)
    values = rng.standard_normal((num, 1, 1, 64)).astype(np.float16)
    table = rng.permutation(num).astype(np.int32)
    call.plan_args[:3] = [np.arange(num + 1), call.memory.put(table), np.ones(num, np.int32)]
    size = call.wrapper.workspace_size(*call.plan_args, **call.plan_options)
    assert size.float_bytes == 0
    call.wrapper.reset_workspace_buffer(None, call.memory.put(np.full(size.int_bytes, 0xFF, np.uint8)))
    call.plan()
    call.q, call.caches = call.memory.put(values[:, 0]), [call.memory.put(values)] * 2
    o, _ = call.run()
    np.testing.assert_array_equal(o.view(np.uint16), values[table, 0].view(np.uint16))


@pytest.mark.decode
def test_many_requests_of_many_heads(backend: str) -> None:
    """2050 requests with 32 heads each: more (request, head) pairs than 16 bits count."""
    num = 2050 if backend != "host" else 65
    run_case(Case((3,) * num, heads=(32, 32), head_dims=(64, 64), page_size=1), backend)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["decode", "paged"])
def test_a_cache_beyond_32_bits(op: str) -> None:
    """8.6 GB of keys, seen through the page table of a request on its last two pages."""
    import cupy

    num_pages, page_size = 262400, 16
    if cupy.cuda.runtime.memGetInfo()[0] < 10 * 2**30:
        pytest.skip("needs 10 GiB of free GPU memory")
    case = Case((32,), None if op == "decode" else (5,), op, heads=(8, 8), dtype="bfloat16", causal=op == "paged")
    data = Data(case)
    data.values = data.keys
    call = Call(case, "fa2", data)
    cache = cupy.empty((num_pages, page_size, 8, 128), call.q.dtype)
    assert cache.size > 2**32
    rows = data.keys[0].reshape(2, page_size, 8, 128)
    cache[num_pages - 1].set(rows[0])
    cache[num_pages - 2].set(rows[1])
    for indices in (cupy.asarray(np.array([num_pages - 1, num_pages - 2], np.int32)), np.array([num_pages - 1, num_pages - 2])):
        call.plan_args[1 if op == "decode" else 2] = indices
        size = call.wrapper.workspace_size(*call.plan_args, **call.plan_options)
        call.wrapper.reset_workspace_buffer(*(cupy.empty(num_bytes, np.uint8) for num_bytes in size))
        call.plan()
        call.caches = [cache, cache]
        call.check(call.run())
    del cache, call
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.gpu
def test_ragged_keys_beyond_32_bits() -> None:
    """A ragged buffer of more than 2^31 elements, with the batch at its end."""
    import cupy

    num_rows = 2**31 // (8 * 128) + 40
    if cupy.cuda.runtime.memGetInfo()[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of free GPU memory")
    tail = Case((40,), (9,), "ragged", heads=(8, 8), causal=True)
    data = Data(tail)
    data.values = data.keys
    buffer = cupy.empty((num_rows, 8, 128), np.float16)
    buffer.data.memset(0, buffer.nbytes)
    buffer[num_rows - 40 :].set(data.keys[0])
    call = Call(tail, "fa2", data)
    # A first request of no queries owns every row but the last forty.
    call.plan_args[:2] = [np.array([0, 0, 9]), np.array([0, num_rows - 40, num_rows])]
    size = call.wrapper.workspace_size(*call.plan_args, **call.plan_options)
    call.wrapper.reset_workspace_buffer(*(cupy.empty(num_bytes, np.uint8) for num_bytes in size))
    call.plan()
    call.caches = [buffer, buffer]
    call.check(call.run())
    del buffer, call
    cupy.get_default_memory_pool().free_all_blocks()


def test_steps_between_rows_that_kernels_cannot_count() -> None:
    """Kernels count steps in 16 bytes with 32 bits; longer ones are refused, whatever the type."""
    for itemsize, dtype in ((1, "float8_e4m3fn"), (2, "float16")):
        fits = ArrayView(0, (2, 16, 2, 64), (2**36 // itemsize - 16, 128, 64, 1), dtype, CPU_DEVICE, None, False, "numpy")
        assert row_strides(fits, "k", itemsize) == fits.strides[:-1]
        too_far = ArrayView(0, (2, 16, 2, 64), (2**36 // itemsize, 128, 64, 1), dtype, CPU_DEVICE, None, False, "numpy")
        with pytest.raises(ArgumentError, match=r"^k: strides .* below 64 GiB$"):
            row_strides(too_far, "k", itemsize)
