# SPDX-License-Identifier: Apache-2.0
"""Every way to ask for the same attention: wrappers, modules, single calls, array libraries, outputs given or made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cupyinfer
from cupyinfer.errors import ArgumentError, BackendUnavailable
from tests.support.batches import Case, Data
from tests.support.compare import assert_attention_close
from tests.support.memory import Buffer, Memory
from tests.support.runner import WRAPPERS, Call, assert_same_bits, run_case

OPS = ("decode", "paged", "ragged")
BASE = Case((600, 25, 0), (30, 3, 2), "paged", causal=True, dtype="bfloat16", head_dims=(64, 64))


def of_op(op: str, **changes: Any) -> Case:
    case = replace(BASE, op=op, **changes)
    return replace(case, qo_lens=None, causal=False) if op == "decode" else case


def module_of(case: Case, backend: str, **options: Any) -> cupyinfer.attention.modules.AttentionModule:
    common = {"kv_layout": case.layout, "backend": backend, **options}
    if case.op == "decode":
        return cupyinfer.get_batch_decode_module(case.dtype, case.cache_dtype, *case.head_dims, **common)
    return cupyinfer.get_batch_prefill_module(case.dtype, case.cache_dtype, *case.head_dims, paged=case.paged, causal=case.causal, **common)


@pytest.mark.parametrize("op", OPS)
def test_a_module_is_a_wrapper_without_state(op: str, backend: str) -> None:
    case = of_op(op)
    call = Call(case, backend)
    call.plan()
    want = call.run()
    module = module_of(case, backend)
    batch = [argument for at, argument in enumerate(call.plan_args) if at != len(call.plan_args) - (2 if case.paged else 1)]
    size = module.workspace_size(*batch)
    assert size == call.size
    floats, ints = (Buffer(call.memory, num_bytes) for num_bytes in size)
    plan = module.plan(floats.bytes, ints.bytes, *batch)
    assert plan.info == call.wrapper.plan_info
    kv = [tuple(call.caches)] if case.paged else call.caches
    got = module.run(plan, call.q, *kv, return_lse=True)
    assert_same_bits(tuple(map(call.memory.get, got)), want)
    for buffer, name in ((floats, "float workspace"), (ints, "int workspace")):
        buffer.assert_guards_intact(name)
    with pytest.raises(ArgumentError, match="got 3 arguments after q" if case.paged else "got 1 arguments after q"):
        module.run(plan, call.q, *([call.caches[0]] * (3 if case.paged else 1)))
    with pytest.raises(ArgumentError, match=r"^q_data_type: is fixed by this module as 'bfloat16'"):
        module.workspace_size(*batch, q_data_type="float16")


@pytest.mark.decode
def test_two_plans_of_one_module(backend: str) -> None:
    """Plans are values: each runs in its own workspaces, in any order."""
    module = module_of(of_op("decode"), backend)
    calls = [Call(of_op("decode", kv_lens=lens), backend) for lens in ((600, 25, 0), (3,), tuple(range(40)))]
    plans = []
    for call in calls:
        *batch, _, page_size = call.plan_args
        plans.append(module.plan(call.floats.bytes, call.ints.bytes, *batch, page_size))
    for at in (2, 0, 1, 0):
        got = module.run(plans[at], calls[at].q, tuple(calls[at].caches), return_lse=True)
        calls[at].check(tuple(map(calls[at].memory.get, got)))


@pytest.mark.parametrize("getter", [cupyinfer.get_trtllm_gen_decode_module, cupyinfer.get_trtllm_gen_prefill_module])
def test_a_family_that_is_not_shipped(getter: Any) -> None:
    module = getter()
    assert module.workspace_size is None
    for method in (module.plan, module.run):
        with pytest.raises(BackendUnavailable, match=r"trtllm-gen .* does not ship; use fa2"):
            method(1, 2, named=3)
    for wrapper in WRAPPERS.values():
        with pytest.raises(ArgumentError, match="backend: got 'trtllm-gen', expected one of auto, fa2, fa3, host"):
            wrapper(backend="trtllm-gen")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_len", [0, 1, 700])
def test_single_decode(kv_len: int, layout: str, backend: str) -> None:
    data = Data(Case((kv_len,), (1,), "ragged", layout=layout, soft_cap=5.0, sinks=True, heads=(8, 2)))
    q, k, v = _single_arrays(data, backend)
    memory = Memory(backend)
    call = {"kv_layout": layout, "logits_soft_cap": 5.0, "sinks": data.sinks}
    got = cupyinfer.single_decode_with_kv_cache(q[0], k, v, return_lse=True, **call)
    assert got[0].shape == (8, 128) and got[1].shape == (8,)
    o, lse = (memory.get(array)[None] for array in got)
    assert_attention_close(o, lse, *data.expected, (1,))
    alone = cupyinfer.single_decode_with_kv_cache(q[0], k, v, **call)
    np.testing.assert_array_equal(memory.get(alone).view(np.uint16), o[0].view(np.uint16))


@pytest.mark.parametrize("mask", [{}, {"causal": True}, "two-dimensional", "flat"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_single_prefill(mask: Any, layout: str, backend: str) -> None:
    case = Case((300,), (90,), "ragged", layout=layout, causal=mask == {"causal": True}, mask="bool" if isinstance(mask, str) else "")
    data = Data(case)
    q, k, v = _single_arrays(data, backend)
    if isinstance(mask, str):
        assert data.masks is not None
        mask = {"custom_mask": data.masks[0] if mask == "two-dimensional" else data.masks[0].reshape(-1)}
    o, lse = map(Memory(backend).get, cupyinfer.single_prefill_with_kv_cache(q, k, v, layout, return_lse=True, **mask))
    assert_attention_close(o, lse, *data.expected, (90,))
    with pytest.raises(ArgumentError, match=r"custom_mask: got shape \(90, 299\), expected \(90, 300\)"):
        cupyinfer.single_prefill_with_kv_cache(q, k, v, layout, custom_mask=np.ones((90, 299), bool))


def _single_arrays(data: Data, backend: str) -> list[Any]:
    """Arrays of one request without the rows that belong to nobody."""
    (kv_len,), heads_first = data.case.kv_lens, data.case.layout == "HND"
    caches = [cache[:, :kv_len] if heads_first else cache[:kv_len] for cache in data.caches]
    return [Memory(backend).put(np.ascontiguousarray(array)) for array in (data.q, *caches)]


def test_single_calls_check_their_arrays(backend: str) -> None:
    q, k, v = _single_arrays(Data(Case((9,), (3,), "ragged")), backend)
    with pytest.raises(ArgumentError, match=r"q: got shape \(3, 8, 128\), expected \(num_qo_heads, head_dim\)"):
        cupyinfer.single_decode_with_kv_cache(q, k, v)
    with pytest.raises(ArgumentError, match=r"q: got shape \(8, 128\), expected \(qo_len, num_qo_heads, head_dim\)"):
        cupyinfer.single_prefill_with_kv_cache(q[0], k, v)
    for single, query in ((cupyinfer.single_decode_with_kv_cache, q[0]), (cupyinfer.single_prefill_with_kv_cache, q)):
        with pytest.raises(ArgumentError, match=r"k: got shape .*three dimensions"):
            single(query, k[None], v)
        with pytest.raises(ArgumentError, match="v: got shape"):
            single(query, k, v[:-1])
        with pytest.raises(ArgumentError, match="kv_layout: got 'hnd'"):
            single(query, k, v, "hnd")


@pytest.mark.parametrize("op", OPS)
def test_outputs_are_made_or_taken(op: str, backend: str) -> None:
    call = Call(of_op(op), backend)
    call.plan()
    want = call.run()
    kv = [tuple(call.caches)] if call.case.paged else call.caches
    run, memory = call.wrapper.run, call.memory
    made = run(call.q, *kv)
    assert type(made) is type(call.q) and made.shape == call.q.shape and made.dtype == call.q.dtype
    np.testing.assert_array_equal(memory.get(made).view(np.uint16), want[0].view(np.uint16))
    pair = run(call.q, *kv, return_lse=True)
    assert isinstance(pair, tuple) and type(pair[1]) is type(call.q)
    assert_same_bits(tuple(map(memory.get, pair)), want)
    out, lse = (memory.put(np.zeros_like(array)) for array in want)
    assert run(call.q, *kv, out=out) is out
    given = run(call.q, *kv, out=out, lse=lse, return_lse=True)
    assert given[0] is out and given[1] is lse
    assert_same_bits((memory.get(out), memory.get(lse)), want)
    # A given lse is written even when it is not asked back.
    memory.write(lse, np.zeros_like(want[1]))
    assert run(call.q, *kv, out=out, lse=lse) is out
    assert_same_bits((memory.get(out), memory.get(lse)), want)


@pytest.mark.parametrize("op", OPS)
def test_an_output_with_gaps(op: str, backend: str) -> None:
    """Rows of `out` inside a wider array: the gaps stay as they are."""
    call = Call(of_op(op), backend)
    call.plan()
    want = call.run()
    num_tokens = len(want[0])
    wide = call.memory.put(np.full((num_tokens, 11, 64), 7, want[0].dtype))
    call.run_into(wide[:, 1:9], None)
    got = call.memory.get(wide)
    np.testing.assert_array_equal(got[:, 1:9].view(np.uint16), want[0].view(np.uint16))
    assert (got[:, 0] == 7).all() and (got[:, 9:] == 7).all()


@pytest.mark.parametrize("op", OPS)
def test_a_query_out_of_packed_qkv(op: str, backend: str) -> None:
    """Strides are taken from the array, never from its shape."""
    case = of_op(op, heads=(8, 2))
    call = Call(case, backend)
    call.plan()
    want = call.run()
    packed = np.full((len(call.data.q), 8 + 2 + 2, 64), np.nan, call.data.q.dtype)
    packed[:, :8] = call.data.q
    call.q = call.memory.put(packed)[:, :8]
    assert_same_bits(call.run(), want)


def test_keys_and_values_out_of_packed_qkv(backend: str) -> None:
    case = Case((30, 50), (30, 50), "ragged", heads=(8, 2), dtype="bfloat16", causal=True)
    call = Call(case, backend)
    want = run_case(case, backend)
    data = call.data
    packed = call.memory.put(np.concatenate([data.q, np.concatenate(data.keys), np.concatenate(data.values)], axis=1))
    call.q, call.caches = packed[:, :8], [packed[:, 8:10], packed[:, 10:]]
    call.plan()
    assert_same_bits(call.run(), want)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("op", ["decode", "paged"])
def test_one_array_for_both_caches(op: str, layout: str, backend: str) -> None:
    case = of_op(op, layout=layout)
    call = Call(case, backend)
    call.plan()
    want = call.run()
    both = call.memory.put(np.stack(call.data.caches, axis=1))
    got = call.wrapper.run(call.q, both, return_lse=True)
    assert_same_bits(tuple(map(call.memory.get, got)), want)
    # Pages of a larger pool: every other page of a buffer, as caches of several layers interleaved.
    pool = np.full((both.shape[0], 3, *both.shape[1:]), np.nan, both.dtype)
    pool[:, 1] = np.stack(call.data.caches, axis=1)
    got = call.wrapper.run(call.q, call.memory.put(pool)[:, 1], return_lse=True)
    assert_same_bits(tuple(map(call.memory.get, got)), want)


def test_exchanged_workspaces(backend: str) -> None:
    """Larger buffers of other element types, at other addresses: same offsets, same result."""
    call = Call(of_op("paged"), backend)
    call.plan()
    want, info = call.run(), call.wrapper.plan_info
    floats = call.memory.put(np.full(call.size.float_bytes // 4 + 100, np.nan, np.float32))
    ints = call.memory.put(np.full((10, call.size.int_bytes), -1, np.int64))
    call.wrapper.reset_workspace_buffer(floats, ints)
    call.plan()
    assert call.wrapper.plan_info == info
    assert_same_bits(call.run(), want)


def test_workspace_size_changes_nothing(backend: str) -> None:
    call = Call(of_op("paged"), backend)
    call.plan()
    want, info = call.run(), call.wrapper.plan_info
    other = Call(of_op("paged", kv_lens=(5, 5, 5)), backend)
    assert call.wrapper.workspace_size(*other.plan_args, **other.plan_options) == other.size
    assert call.wrapper.plan_info == info
    assert_same_bits(call.run(), want)


@pytest.mark.parametrize("op", OPS)
def test_jax_arrays_on_the_cpu(op: str) -> None:
    jax = pytest.importorskip("jax")
    call = Call(of_op(op), "host")
    call.plan()
    want = call.run()
    cpu = jax.devices("cpu")[0]
    put = lambda array: jax.device_put(array, cpu)  # noqa: E731 - one word for one thing
    call.plan_args = [put(argument) if isinstance(argument, np.ndarray) else argument for argument in call.plan_args]
    call.plan()
    q, caches = put(call.data.q), [put(cache) for cache in call.data.caches]
    o, lse = call.wrapper.run(q, *([tuple(caches)] if call.case.paged else caches), return_lse=True)
    assert isinstance(o, jax.Array) and isinstance(lse, jax.Array)
    assert_same_bits((np.asarray(o), np.asarray(lse)), want)
    single = cupyinfer.single_prefill_with_kv_cache(put(call.data.q[:3]), put(call.data.keys[1]), put(call.data.values[1]), causal=True)
    assert isinstance(single, jax.Array)


def test_numpy_needs_no_gpu() -> None:
    """The automatic backend for NumPy workspaces is the host."""
    call = Call(of_op("decode"), "host")
    wrapper = cupyinfer.BatchDecodeWithPagedKVCacheWrapper(call.floats.bytes, call.ints.bytes)
    wrapper.plan(*call.plan_args, **call.plan_options)
    got = wrapper.run(call.q, tuple(call.caches), return_lse=True)
    call.check(got)
