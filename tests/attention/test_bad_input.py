# SPDX-License-Identifier: Apache-2.0
"""Every wrong argument is one typed error that names it, before anything changes, and the object stays usable."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyinfer
from cupyinfer.errors import ArgumentError, ArgumentTypeError, CupyInferError, StateError, UnsupportedError, WorkspaceError
from tests.support.batches import Case
from tests.support.memory import Memory
from tests.support.runner import WRAPPERS, Call, assert_same_bits

OPS = ("decode", "paged", "ragged")
BASE = Case((40, 25, 0), (5, 3, 2), "paged", head_dims=(64, 64), indices_on="host")  # 3, 2 and 0 pages


def planned(op: str, backend: str, **changes: Any) -> Call:
    case = replace(BASE, op=op, **changes)
    call = Call(replace(case, qo_lens=None) if op == "decode" else case, backend)
    call.plan()
    return call


def plan_keywords(call: Call) -> dict[str, Any]:
    names = list(inspect.signature(call.wrapper.plan).parameters)
    return {**dict(zip(names, call.plan_args, strict=False)), **call.plan_options}


@dataclass(frozen=True)
class Fault:
    """A wrong argument of plan: its name in decode and in prefill plans, None where there is no such thing."""

    decode: str | None
    paged: str | None
    ragged: str | None
    value: Any
    error: type[Exception]
    match: str
    like: type[Exception] = ValueError

    def __str__(self) -> str:
        return f"{self.decode or self.paged or self.ragged}={self.value}".replace("\n", " ")[:50]


def everywhere(name: str, value: Any, error: type[Exception], match: str, like: type[Exception] = ValueError) -> Fault:
    return Fault(name, name, name, value, error, match, like)


def pages(name: str, value: Any, error: type[Exception], match: str, like: type[Exception] = ValueError) -> Fault:
    names = {"indptr": "paged_kv_indptr", "indices": "paged_kv_indices", "last_page_len": "paged_kv_last_page_len"}
    return Fault(name, names[name], None, value, error, match, like)


def queries(name: str, value: Any, error: type[Exception], match: str, like: type[Exception] = ValueError) -> Fault:
    return Fault(None, name, name, value, error, match, like)


PLAN_FAULTS = [
    # Offsets.
    pages("indptr", [0, 3, 2, 5], ArgumentError, "decreases from 3 to 2 at entry 2"),
    pages("indptr", [1, 3, 5, 5], ArgumentError, "begins with 1"),
    pages("indptr", [-1, 3, 5, 5], ArgumentError, "begins with -1"),
    pages("indptr", [0, 3, 5], ArgumentError, "entries"),
    pages("indptr", [0], ArgumentError, "1 entries|describes 0 requests"),
    pages("indptr", [], ArgumentError, "is empty|has 0 entries"),
    pages("indptr", [[0, 3, 5, 5]], ArgumentError, r"got shape \(1, 4\), expected one dimension"),
    pages("indptr", [0.0, 3.0, 5.0, 5.0], ArgumentTypeError, "got float64, expected int32 or int64", TypeError),
    pages("indptr", [0, 3, 2**31, 2**31], ArgumentError, "largest supported offset"),
    pages("indptr", np.array([False, True, True, True]), ArgumentTypeError, "got bool", TypeError),
    queries("qo_indptr", [0, 5, 4, 10], ArgumentError, "decreases from 5 to 4 at entry 2"),
    queries("qo_indptr", [0, 5, 8, 10, 11], ArgumentError, "entries"),
    queries("qo_indptr", [2, 5, 8, 10], ArgumentError, "begins with 2"),
    queries("qo_indptr", "0580", ArgumentError, "expected one dimension"),
    Fault(None, None, "kv_indptr", [0, 40, 30, 65], ArgumentError, "decreases from 40 to 30"),
    Fault(None, None, "kv_indptr", [0], ArgumentError, "has 1 entries"),
    # Pages.
    pages("last_page_len", [8, 9], ArgumentError, "has 2 entries"),
    pages("last_page_len", [0, 9, 0], ArgumentError, "request 0 has 0, expected 1 to page_size = 16"),
    pages("last_page_len", [8, 17, 0], ArgumentError, "request 1 has 17, expected 1 to page_size = 16"),
    pages("last_page_len", [8, -1, 0], ArgumentError, "request 1 has -1"),
    pages("last_page_len", [8, 9, 17], ArgumentError, "request 2 has 17, expected 0 to page_size = 16"),
    pages("last_page_len", [8.0, 9.0, 0.0], ArgumentTypeError, "got float64", TypeError),
    pages("indices", [4, 3, 2, 1], ArgumentError, "has 4 page ids, the offsets refer to 5"),
    pages("indices", [4, 3, -2, 1, 0], ArgumentError, "page id -2"),
    pages("indices", [4, 3, 2**31, 1, 0], ArgumentError, "page id 2147483648"),
    pages("indices", [4.0, 3.0, 2.0, 1.0, 0.0], ArgumentTypeError, "got float64", TypeError),
    pages("indices", [[4, 3, 2, 1, 0]], ArgumentError, "expected one dimension"),
    Fault("page_size", "page_size", None, 0, ArgumentError, "got 0, must be at least 1"),
    Fault("page_size", "page_size", None, 16.0, ArgumentTypeError, "got 16.0, expected an int", TypeError),
    # Heads and widths.
    everywhere("num_qo_heads", 7, ArgumentError, "got 7, which is not a multiple of num_kv_heads = 2"),
    everywhere("num_qo_heads", 1, ArgumentError, "not a multiple"),
    everywhere("num_qo_heads", 0, ArgumentError, "got 0, must be at least 1"),
    everywhere("num_qo_heads", 130, ArgumentError, "at most 64 query heads share one"),
    everywhere("num_kv_heads", 0, ArgumentError, "got 0, must be at least 1"),
    everywhere("num_kv_heads", True, ArgumentTypeError, "expected an int", TypeError),
    *(
        Fault("head_dim", "head_dim_qk", "head_dim_qk", dim, UnsupportedError, f"head_dim: got {dim} .*64, 96, 128, 192 .*256")
        for dim in (1, 56, 72, 80, 100, 192, 224, 512)
    ),
    everywhere("head_dim_vo", 96, UnsupportedError, r"head_dim: got 64 \(head_dim_vo 96\), supported are 64"),
    # Element types.
    everywhere("q_data_type", "float32", ArgumentTypeError, "got 'float32', expected one of float16, bfloat16", TypeError),
    everywhere("q_data_type", np.int32, ArgumentTypeError, "expected one of", TypeError),
    everywhere("kv_data_type", "bfloat16", ArgumentTypeError, "a 16-bit cache has the queries' type", TypeError),
    everywhere("kv_data_type", "float8_e4m3", ArgumentTypeError, "expected one of .*float8_e4m3fn", TypeError),
    # The rules of the logits.
    everywhere("window_left", -2, ArgumentError, "got -2, must be at least -1"),
    everywhere("window_left", 1.5, ArgumentTypeError, "expected an int", TypeError),
    everywhere("logits_soft_cap", -1.0, ArgumentError, "must not be negative"),
    everywhere("logits_soft_cap", float("nan"), ArgumentError, "must be finite"),
    everywhere("sm_scale", float("inf"), ArgumentError, "must be finite"),
    everywhere("sm_scale", "1", ArgumentTypeError, "expected a number", TypeError),
    everywhere("pos_encoding_mode", "ROPE", ArgumentError, "expected one of NONE, ROPE_LLAMA, ALIBI"),
    everywhere("rope_theta", 0.0, ArgumentError, "must be positive"),
    everywhere("rope_scale", -1.0, ArgumentError, "must be positive"),
    everywhere("fixed_split_size", 0, ArgumentError, "got 0"),
    everywhere("fixed_split_size", 2.0, ArgumentTypeError, "got float", TypeError),
    everywhere("disable_split_kv", 1, ArgumentTypeError, "expected True or False", TypeError),
    everywhere("sinks", np.zeros(7, np.float32), ArgumentError, r"expected .*\(8,\)"),
    everywhere("sinks", np.array(["a"] * 8), ArgumentError, r"expected .*\(8,\)"),
    queries("causal", 1, ArgumentTypeError, "expected True or False", TypeError),
    queries("use_fp16_qk_reduction", True, UnsupportedError, "always summed in float32"),
]


@pytest.mark.parametrize(("op", "fault"), [(op, fault) for fault in PLAN_FAULTS for op in OPS if getattr(fault, op)], ids=str)
def test_a_wrong_argument_of_plan(fault: Fault, op: str, backend: str) -> None:
    name = getattr(fault, op)
    call = planned(op, backend)
    want = call.run()
    keywords = {**plan_keywords(call), name: fault.value}
    for method in (call.wrapper.workspace_size, call.wrapper.plan):
        with pytest.raises(fault.error, match=fault.match) as failure:
            method(**keywords)
        assert isinstance(failure.value, CupyInferError) and isinstance(failure.value, fault.like)
        assert name.removesuffix("_qk") in str(failure.value)
    assert_same_bits(call.run(), want)


@pytest.mark.decode
def test_split_size_and_no_split_rule_each_other_out(backend: str) -> None:
    call = planned("decode", backend)
    with pytest.raises(ArgumentError, match=r"fixed_split_size: got 4 together with disable_split_kv"):
        call.wrapper.plan(**{**plan_keywords(call), "fixed_split_size": 4, "disable_split_kv": True})


def test_an_unknown_option_is_a_type_error(backend: str) -> None:
    call = planned("paged", backend)
    with pytest.raises(TypeError, match="soft_capp"):
        call.wrapper.plan(**plan_keywords(call), soft_capp=1.0)
    with pytest.raises(TypeError, match="logit_cap"):
        call.wrapper.run(call.q, tuple(call.caches), logit_cap=1.0)


def _with_stride_2(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.repeat(array, 2, axis=-1)[..., ::2]


def _shifted(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same values one element past an aligned address."""
    room = np.zeros(array.size + 40, array.dtype)
    at = (-room.ctypes.data % 16) // array.itemsize + 1
    room[at : at + array.size] = array.reshape(-1)
    return room[at : at + array.size].reshape(array.shape)


def _odd_rows(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same values in rows that are not a multiple of 16 bytes apart."""
    wide = np.zeros((*array.shape[:-1], array.shape[-1] + 1), array.dtype)
    wide[..., :-1] = array
    return wide[..., :-1]


_Change = Callable[[Any], Any]
#: Argument, what is done to the right array, error, words of the message.
ARRAY_FAULTS: list[tuple[str, _Change, type[Exception], str]] = [
    ("q", lambda a: a.astype(np.float32), ArgumentTypeError, "q: got float32, the plan is for float16"),
    ("q", lambda a: a.astype(ml_dtypes.bfloat16), ArgumentTypeError, "q: got bfloat16, the plan is for float16"),
    ("q", lambda a: a.reshape(len(a), -1), ArgumentError, r"q: got shape .*expected \(num_tokens, num_qo_heads = 8, head_dim = 64\)"),
    ("q", lambda a: a[:, :4], ArgumentError, "q: got shape .*num_qo_heads = 8"),
    ("q", lambda a: a[..., :32], ArgumentError, "q: got shape .*head_dim = 64"),
    ("q", lambda a: a[:-1], StateError, r"q: has \d+ query tokens, the planned batch has \d+"),
    ("q", lambda a: np.concatenate([a, a]), StateError, r"q: has \d+ query tokens, the planned batch has \d+"),
    ("q", _with_stride_2, ArgumentError, "q: head dimension has stride 2, its elements must be neighbours"),
    ("q", lambda a: a[..., ::-1], ArgumentError, "q: head dimension has stride -1"),
    ("q", lambda a: a[::-1], ArgumentError, "q: strides .*non-negative multiple of 16 bytes"),
    ("q", _odd_rows, ArgumentError, "q: strides .*non-negative multiple of 16 bytes"),
    ("q", _shifted, ArgumentError, "q: begins 2 bytes past a multiple of 16"),
    ("q", lambda a: a.tolist(), ArgumentTypeError, "q: "),
    ("q", lambda a: None, ArgumentTypeError, "q: "),
    ("k", lambda a: a.astype(np.float32), ArgumentTypeError, "k: got float32, the plan is for float16"),
    ("k", lambda a: a.view(np.int16), ArgumentTypeError, "k: got int16, the plan is for float16"),
    ("k", lambda a: a[..., :32], ArgumentError, "k: got shape"),
    ("k", lambda a: a[None], ArgumentError, "k: got shape"),
    ("k", lambda a: a[..., :1, :], ArgumentError, "k: got shape"),
    ("k", _with_stride_2, ArgumentError, "k: head dimension has stride 2"),
    ("k", _shifted, ArgumentError, "k: begins 2 bytes past"),
    ("k", _odd_rows, ArgumentError, "k: strides"),
    ("k", lambda a: None, ArgumentTypeError, "k: "),
    ("v", lambda a: a.astype(ml_dtypes.bfloat16), ArgumentTypeError, "v: got bfloat16, the plan is for float16"),
    ("v", lambda a: a[..., :32], ArgumentError, "v: got shape"),
    ("v", lambda a: np.concatenate([a, a]), ArgumentError, "v: got shape .*k has .*last dimension only"),
    ("v", _shifted, ArgumentError, "v: begins 2 bytes past"),
    ("out", lambda a: a.astype(np.float32), ArgumentTypeError, "out: got float32, expected float16 like q"),
    ("out", lambda a: a[:-1], ArgumentError, "out: got shape .*expected"),
    ("out", lambda a: a.reshape(-1), ArgumentError, "out: got shape"),
    ("out", _with_stride_2, ArgumentError, "out: head dimension has stride 2"),
    ("out", _shifted, ArgumentError, "out: begins 2 bytes past"),
    ("out", lambda a: np.lib.stride_tricks.as_strided(a, a.shape, (0, *a.strides[1:])), ArgumentError, "out: strides .*overlap"),
    ("lse", lambda a: a.astype(np.float64), ArgumentTypeError, "lse: got float64, expected float32"),
    ("lse", lambda a: a[:, :3], ArgumentError, "lse: got shape"),
    ("lse", _with_stride_2, ArgumentError, "lse: got strides .*contiguous"),
]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("argument", "change", "error", "match"), ARRAY_FAULTS)
def test_a_wrong_array_of_run(argument: str, change: _Change, error: type[Exception], match: str, op: str, backend: str) -> None:
    call = planned(op, backend)
    want = call.run()
    data, memory = call.data, Exact(backend)
    out = np.zeros(data.q.shape, data.q.dtype)
    arrays: dict[str, Any] = dict(zip("qkv", (data.q, *data.caches), strict=True))
    arrays |= {"out": out, "lse": np.zeros(out.shape[:2], np.float32)}
    arrays[argument] = change(arrays[argument])
    given = {name: memory.put(array) if isinstance(array, np.ndarray) else array for name, array in arrays.items()}
    kv = [(given["k"], given["v"])] if call.case.paged else [given["k"], given["v"]]
    with pytest.raises(error, match=as_named_by(call, match)) as failure:
        call.wrapper.run(given["q"], *kv, out=given["out"], lse=given["lse"], return_lse=True)
    assert isinstance(failure.value, CupyInferError)
    assert_same_bits(call.run(), want)


def as_named_by(call: Call, words: str) -> str:
    """What a message about k or v begins with where the argument is paged_kv_cache."""
    if not call.case.paged:
        return f"^{words}"
    words = re.sub(r"^([kv])", lambda found: rf"paged_kv_cache \({found[1].upper()}\)", words)
    return "^" + words.replace("k has", r"paged_kv_cache \(K\) has")


class Exact(Memory):
    """Puts arrays on the device with the strides and the alignment of the host array."""

    def put(self, array: Any) -> Any:
        if not self.on_gpu:
            return array
        import cupy

        begin, end = np.lib.array_utils.byte_bounds(array)
        offset = begin % 16
        room = cupy.zeros(end - begin + 16, np.uint8)
        raw = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * (end - begin)).from_address(begin)).copy()  # type: ignore[attr-defined]
        room[offset : offset + len(raw)].set(raw)
        first = offset + array.ctypes.data - begin
        return cupy.ndarray(array.shape, array.dtype, room.data + first, array.strides)


@pytest.mark.parametrize("op", OPS)
def test_run_before_plan(op: str, backend: str) -> None:
    call = planned(op, backend)
    want = call.run()
    call.wrapper.reset_workspace_buffer(call.floats.bytes, call.ints.bytes)
    for action in (call.run, lambda: call.wrapper.plan_info):
        with pytest.raises(StateError, match="run: nothing is planned; call plan first"):
            action()
    call.plan()
    assert_same_bits(call.run(), want)


def test_keys_of_another_batch(backend: str) -> None:
    ragged, paged = planned("ragged", backend), planned("paged", backend)
    short = [cache[:64] for cache in ragged.caches]
    with pytest.raises(StateError, match="k: has 64 keys, the planned batch has 65"):
        ragged.wrapper.run(ragged.q, *short)
    last = int(paged.data.indices.max())
    with pytest.raises(ArgumentError, match=rf"^paged_kv_cache \(K\): has {last} pages, the page table refers to page {last}"):
        paged.wrapper.run(paged.q, tuple(cache[:last] for cache in paged.caches))


@pytest.mark.parametrize("op", OPS)
def test_a_cache_of_the_other_layout(op: str, backend: str) -> None:
    call, other = planned(op, backend), planned(op, backend, layout="HND")
    kv = [tuple(other.caches)] if call.case.paged else other.caches
    with pytest.raises(ArgumentError, match=as_named_by(call, "k: got shape")):
        call.wrapper.run(call.q, *kv)


def test_a_cache_that_is_no_cache(backend: str) -> None:
    call = planned("paged", backend)
    k, v = call.caches
    for wrong in ((k, v, v), [k]):
        with pytest.raises(ArgumentTypeError, match=r"paged_kv_cache: got \d arrays, expected a pair"):
            call.wrapper.run(call.q, wrong)
    with pytest.raises(ArgumentError, match=r"paged_kv_cache: one array has shape .*expected \[num_pages, 2, \.\.\.\]"):
        call.wrapper.run(call.q, k)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_wrong_scales(name: str, backend: str) -> None:
    call = planned("paged", backend)
    want, put = call.run(), call.memory.put
    faults: list[tuple[Any, type[Exception], str]] = [
        (put(np.ones(3, np.float32)), ArgumentError, r"got shape \(3,\), expected contiguous \(2,\), one per KV head"),
        (put(np.ones(2, np.float64)), ArgumentTypeError, "got float64, expected a float or a float32 array"),
        (put(np.ones(4, np.float32))[::2], ArgumentError, "expected contiguous"),
        (float("nan"), ArgumentError, "must be finite"),
        ("0.5", ArgumentTypeError, "expected a number"),
    ]
    for value, error, match in faults:
        call.run_options = {name: value}
        with pytest.raises(error, match=f"^{name}: .*{match}"):
            call.run()
    call.run_options = {}
    assert_same_bits(call.run(), want)


def test_a_read_only_output() -> None:
    call = planned("paged", "host")  # GPU arrays have no such flag
    out, lse = np.zeros(call.q.shape, np.float16), np.zeros(call.q.shape[:2], np.float32)
    for array, name in ((out, "out"), (lse, "lse")):
        array.flags.writeable = False
        with pytest.raises(ArgumentError, match=f"^{name}: "):
            call.run_into(out, lse)
        array.flags.writeable = True


def test_wrong_workspaces(backend: str) -> None:
    call = planned("paged", backend)
    want = call.run()
    memory, good = call.memory, call.memory.put(np.zeros(4096, np.uint8))
    wrong: list[tuple[Any, str]] = [
        (good[4:], "begins 4 bytes past a multiple of 16, it needs 16-byte alignment"),
        (good[::2], "a workspace is contiguous"),
        (memory.put(np.zeros((64, 64), np.uint8))[:, :32], "a workspace is contiguous"),
    ]
    if backend == "host":
        frozen = np.zeros(4096, np.uint8)
        frozen.flags.writeable = False
        wrong.append((frozen, ""))
    for buffer, match in wrong:
        for name in ("float_workspace_buffer", "int_workspace_buffer"):
            buffers = {"float_workspace_buffer": good, "int_workspace_buffer": good, name: buffer}
            with pytest.raises(WorkspaceError if match else ArgumentError, match=f"^{name}: .*{match}"):
                call.wrapper.reset_workspace_buffer(**buffers)
            with pytest.raises(CupyInferError, match=f"^{name}: "):
                WRAPPERS["paged"](**buffers, backend=backend)
            assert_same_bits(call.run(), want)
    with pytest.raises(ArgumentTypeError, match=r"^float_workspace_buffer: "):
        call.wrapper.reset_workspace_buffer(4096, good)


def test_missing_workspaces(backend: str) -> None:
    call = planned("paged", backend)
    for floats, ints, name in ((None, call.ints.bytes, "float"), (call.floats.bytes, None, "int")):
        needed = getattr(call.size, f"{name}_bytes")
        call.wrapper.reset_workspace_buffer(floats, ints)
        if needed:
            with pytest.raises(WorkspaceError, match=f"^{name}_workspace_buffer: was not given, this plan needs {needed} bytes"):
                call.plan()
        else:
            call.plan()
            call.check(call.run())


@pytest.mark.gpu
def test_arrays_of_two_places_are_refused() -> None:
    for op in OPS:
        host, gpu = planned(op, "host"), planned(op, "fa2")
        gpu_kv, host_kv = ([tuple(call.caches)] if call.case.paged else call.caches for call in (gpu, host))
        with pytest.raises(ArgumentError, match="q: lies on cpu, the plan is for cuda:0"):
            gpu.wrapper.run(host.q, *gpu_kv)
        with pytest.raises(ArgumentError, match=as_named_by(gpu, "k: lies on cpu, the plan is for cuda:0")):
            gpu.wrapper.run(gpu.q, *host_kv)
        with pytest.raises(ArgumentError, match="q: lies on cuda:0, the plan is for cpu"):
            host.wrapper.run(gpu.q, *host_kv)
        with pytest.raises(ArgumentError, match="out: lies on cpu, the plan is for cuda:0"):
            gpu.wrapper.run(gpu.q, *gpu_kv, out=host.q)
    with pytest.raises(ArgumentError, match="int_workspace_buffer: lies on cuda:0, float_workspace_buffer on cpu"):
        cupyinfer.BatchDecodeWithPagedKVCacheWrapper(host.floats.bytes, gpu.ints.bytes)
    with pytest.raises(WorkspaceError, match="lie on cpu, backend 'fa2' needs them on cuda"):
        cupyinfer.BatchDecodeWithPagedKVCacheWrapper(host.floats.bytes, host.ints.bytes, backend="fa2")
    with pytest.raises(WorkspaceError, match="lie on cuda:0, backend 'host' needs them on cpu"):
        cupyinfer.BatchDecodeWithPagedKVCacheWrapper(gpu.floats.bytes, gpu.ints.bytes, backend="host")
