# SPDX-License-Identifier: Apache-2.0
"""Modules with a user variant: what they compute, what they refuse, and how parameters reach a kernel."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyinfer
from cupyinfer.attention.user_arguments import user_values
from cupyinfer.attention.user_modules import UserAttentionModule
from cupyinfer.errors import ArgumentError, ArgumentTypeError, BackendUnavailable, StateError
from cupyinfer.interop import CPU_DEVICE
from tests.support.batches import Case, Data, published_slopes
from tests.support.compare import assert_attention_close
from tests.support.memory import Buffer
from tests.support.runner import Call, assert_same_bits
from tests.support.user_variants import EVERYTHING, documented_variants

Array = np.ndarray[Any, Any]
OPS = ("decode", "paged", "ragged")
EXAMPLES = documented_variants()
PROFILE = "h100"
#: Longest request of the cases here: the length of a row of tensors per key.
ROW_LENGTH = 640


def case_of(op: str, **options: Any) -> Case:
    """A request without keys, one with more queries than keys, and one whose keys are shared by several CTAs."""
    if op == "decode":
        return Case((600, 0, 7, 130), None, op, **options)
    return Case((600, 0, 7, 130), (20, 2, 11, 33), op, **{"causal": True, **options})


def module_of(variant: cupyinfer.UserVariant, case: Case, **fixed: Any) -> UserAttentionModule:
    common = {"kv_layout": case.layout, "window_left": case.window_left, "logits_soft_cap": case.soft_cap, **fixed}
    types = (variant, case.dtype, case.cache_dtype, *case.head_dims)
    if case.op == "decode":
        return cupyinfer.get_batch_decode_jit_module(*types, **common)
    return cupyinfer.get_batch_prefill_jit_module(*types, paged=case.paged, causal=case.causal, **common)


def batch_of(call: Call) -> list[Any]:
    """The arguments of a module's plan: a wrapper's without the width, which the module fixes."""
    at_width = len(call.plan_args) - (2 if call.case.paged else 1)
    return [argument for at, argument in enumerate(call.plan_args) if at != at_width]


def run_variant(variant: cupyinfer.UserVariant, case: Case, parameters: dict[str, Any], **fixed: Any) -> tuple[Array, Array]:
    """Size, plan in guarded workspaces and run twice with equal bits."""
    call = Call(case, "fa2")
    module = module_of(variant, case, sm_scale=case.sm_scale, pos_encoding_mode=case.pos_encoding, **fixed)
    batch = batch_of(call)
    size = module.workspace_size(*batch)
    floats, ints = (Buffer(call.memory, num_bytes) for num_bytes in size)
    plan = module.plan(floats.bytes, ints.bytes, *batch)
    given = {name: call.memory.put(value) if isinstance(value, np.ndarray) else value for name, value in parameters.items()}
    kv = [tuple(call.caches)] if case.paged else call.caches
    first, second = (
        tuple(map(call.memory.get, module.run(plan, call.q, *kv, return_lse=True, **given, **call.run_options))) for _ in range(2)
    )
    assert_same_bits(first, second)
    for buffer, name in ((floats, "float workspace"), (ints, "int workspace")):
        buffer.assert_guards_intact(name)
    return first[0], first[1]


# One reference for every hook, in float64 or, for the honest error of low precision, in float32 with 16-bit operands.
# Hooks get arrays [qo_len, kv_len] or [rows, dims] of one request and head.
LogitHook = Callable[[Array, int, int, Array, Array], Array]
MaskHook = Callable[[int, int, Array, Array], Array]


def changed_attention(
    data: Data,
    real: type,
    query: Callable[[Array], Array] = lambda q: q,
    logit: LogitHook = lambda s, *_: s,
    mask: MaskHook = lambda *_: np.ones((1, 1), bool),
    output: Callable[[Array, Array, Array, int], Array] = lambda o, *_: o,
) -> tuple[Array, Array]:
    """Attention of a case under hooks: ``logit(s, request, head, position, key)``, ``output(o, q_index, q_token, qo_len)``."""
    case = data.case
    low = real is np.float32
    operand = data.keys[0].dtype if data.keys[0].dtype.itemsize == 2 else np.dtype(np.float16)

    def rounded(x: Array) -> Array:
        return x.astype(operand).astype(real) if low else x

    o = np.zeros((*data.q.shape[:2], case.head_dims[1]), data.q.dtype if low else real)
    lse = np.full(data.q.shape[:2], -np.inf, real)
    begin = 0
    for request, qo_len in enumerate(case.queries):
        keys, values = data.keys[request], data.values[request]
        kv_len, num_kv_heads = keys.shape[:2]
        token = np.arange(qo_len)
        position, key = (kv_len - qo_len + token)[:, None], np.arange(kv_len)[None]
        seen = (key <= position) | (not case.causal)
        seen = seen & ((key >= position - case.window_left) | (case.window_left < 0))
        for head in range(case.heads[0]):
            kv_head = head // (case.heads[0] // num_kv_heads)
            q = rounded(query(data.q[begin : begin + qo_len, head].astype(real)))
            s = q @ keys[:, kv_head].astype(real).T * real(1 / math.sqrt(case.head_dims[0]))
            s = logit(s, request, head, position, key)
            if case.soft_cap:
                s = real(case.soft_cap) * np.tanh(s / real(case.soft_cap))
            s = np.where(seen & mask(request, kv_head, position, key), s, real(-np.inf))
            largest = s.max(axis=1, initial=-np.inf)
            weights = np.exp(s - np.where(np.isneginf(largest), 0, largest)[:, None]).astype(real)
            total = weights.sum(axis=1)
            mean = rounded(weights) @ values[:, kv_head].astype(real) / np.where(total > 0, total, 1)[:, None]
            o[begin : begin + qo_len, head] = output(mean, np.arange(begin, begin + qo_len)[:, None], token[:, None], qo_len)
            with np.errstate(divide="ignore"):
                lse[begin : begin + qo_len, head] = (largest + np.log(total)) / np.log(2)
        begin += qo_len
    return o, lse


def check(case: Case, got: tuple[Array, Array], **hooks: Any) -> None:
    data = Data(case)
    oracle, reference = (changed_attention(data, real, **hooks) for real in (np.float64, np.float32))
    assert_attention_close(*got, oracle, reference, case.queries, str(case))


def everything_parameters(case: Case) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    num_requests = len(case.kv_lens)
    return {
        "slope": 0.02,
        "width": 3,
        "row_length": ROW_LENGTH,
        "tiles": rng.uniform(0.5, 2, ROW_LENGTH).astype(np.float16),
        "params": rng.uniform(0.5, 1.5, case.head_dims[0]).astype(ml_dtypes.bfloat16),
        "scale": rng.normal(0, 1, case.heads[0]).astype(np.float32),
        "ids": np.full(num_requests, 3, np.int32),
        "wide": np.full(num_requests, -(2**40), np.int64) * (np.arange(num_requests) == 3) + 1,
        "narrow": np.full(case.heads[1], -1, np.int8),
        "bytes": np.full(case.heads[1], 200, np.uint8),
        "flags": rng.random((num_requests, ROW_LENGTH)) < 0.5,
    }


def everything_hooks(p: dict[str, Any]) -> dict[str, Any]:
    def mask(request: int, kv_head: int, position: Array, key: Array) -> Array:
        shown = p["flags"][request, key] | (key % p["ids"][request] != 0)
        return np.asarray(shown & (p["wide"][request] + p["bytes"][kv_head] > 0))

    def output(o: Array, q_index: Array, q_token: Array, qo_len: int) -> Array:
        factor = p["tiles"][(q_index * p["width"] + np.arange(o.shape[1])) % ROW_LENGTH]
        return np.asarray(o * factor.astype(o.dtype) + 2 * q_token // qo_len)

    return {
        "query": lambda q: q * p["params"].astype(q.dtype),
        "logit": lambda s, request, head, position, key: (
            s - (s.dtype.type(p["slope"]) * (key - position) + p["scale"][head]).astype(s.dtype)
        ),
        "mask": mask,
        "output": output,
    }


def log_sigmoid(x: Array) -> Array:
    return np.asarray(np.minimum(x, 0) - np.log1p(np.exp(-np.abs(x))))


def document_ids(case: Case) -> Array:
    """Documents of about 40 keys, interleaved in request 2."""
    ids = np.repeat(np.arange(ROW_LENGTH // 40), 40)[None].repeat(len(case.kv_lens), 0).astype(np.int32)
    ids[2] = np.arange(ROW_LENGTH) % 2
    return ids


@pytest.mark.parametrize("op", OPS)
def test_the_reference_of_this_file_is_attention(op: str) -> None:
    """Where the oracle knows the same thing, it says the same."""
    case = case_of(op, window_left=100, soft_cap=4.0)
    for plain, hooks in (
        (Data(case), {}),
        (Data(replace(case, mask="bool")), "mask"),
        (Data(replace(case, pos_encoding="ALIBI", soft_cap=0.0)), "alibi"),
    ):
        data = Data(replace(plain.case, mask="", pos_encoding="NONE", causal=plain.case.causal and not plain.case.mask))
        if hooks == "mask":
            assert plain.masks is not None
            hooks = {"mask": lambda request, *_, masks=plain.masks: masks[request]}
        elif hooks == "alibi":
            slopes = published_slopes(case.heads[0])
            hooks = {"logit": lambda s, request, head, position, key, slopes=slopes: s + slopes[head] * (key - position)}
        assert isinstance(hooks, dict)
        for got, expected in zip(changed_attention(data, np.float64, **hooks), plain.expected[0], strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"kv_dtype": "float8_e4m3fn", "dtype": "bfloat16"}, {"soft_cap": 4.0, "window_left": 90}], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_sigmoid_gate(op: str, options: dict[str, Any]) -> None:
    case = case_of(op, **options)
    got = run_variant(EXAMPLES["sigmoid_gate"], case, {"bias": -0.75})
    check(case, got, logit=lambda s, *_: s + log_sigmoid(s - s.dtype.type(0.75)))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window_left": 30}, {"head_dims": (256, 256)}, {"heads": (8, 1)}], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_document_mask(op: str, options: dict[str, Any]) -> None:
    """Documents that end inside tiles, and rows that see keys far apart only."""
    if op == "decode" and "causal" in options:
        options = {}
    case = case_of(op, **options)
    ids = document_ids(case)
    got = run_variant(EXAMPLES["document_mask"], case, {"ids": ids, "row_length": ROW_LENGTH})
    check(case, got, mask=lambda request, _, position, key: (position >= 0) & (ids[request, position] == ids[request, key]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, {"heads": (12, 4)}, {"kv_dtype": "float8_e5m2"}, {"head_dims": (64, 64), "causal": False}], ids=str
)
@pytest.mark.parametrize("op", OPS)
def test_alibi_by_hand(op: str, options: dict[str, Any]) -> None:
    """Within the bounds of the built-in one, against the same oracle."""
    options = {name: value for name, value in options.items() if op != "decode" or name != "causal"}
    case = case_of(op, **options)
    got = run_variant(EXAMPLES["alibi_by_hand"], case, {"slopes": published_slopes(case.heads[0]).astype(np.float32)})
    built_in = replace(case, pos_encoding="ALIBI")
    assert_attention_close(*got, *Data(built_in).expected, case.queries, str(case))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bfloat16"}, {"head_dims": (64, 64)}, {"kv_dtype": "float8_e5m2"}, {"fixed_split_size": 64}], ids=str
)
@pytest.mark.parametrize("op", OPS)
def test_everything_at_once(op: str, options: dict[str, Any]) -> None:
    fixed = {"fixed_split_size": options["fixed_split_size"]} if "fixed_split_size" in options else {}
    case = case_of(op, **options)
    parameters = everything_parameters(case)
    check(case, run_variant(EVERYTHING, case, parameters, **fixed), **everything_hooks(parameters))


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_the_output_is_transformed_once(op: str) -> None:
    """Whatever the split, and where the query is left alone so that it is copied as it is."""
    variant = cupyinfer.UserVariant("once", output_transform="output + 1.f")
    for fixed in ({}, {"fixed_split_size": 64}, {"disable_split_kv": True}):
        case = case_of(op)
        check(case, run_variant(variant, case, {}, **fixed), output=lambda o, *_: o + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_the_query_is_transformed_before_it_turns(op: str) -> None:
    """Without the second half of its dims; after the rotation that would be another query."""
    case = case_of(op, pos_encoding="ROPE_LLAMA")
    got = run_variant(cupyinfer.UserVariant("half", query_transform="dim < 64 ? query : 0.f"), case, {})
    data = Data(case)
    data.q[..., 64:] = 0
    assert_attention_close(*got, *data.expected, case.queries, str(case))


@pytest.mark.gpu
def test_parameters_are_those_of_the_run() -> None:
    """One plan, other values each time; and the checks that need a plan."""
    case = case_of("decode")
    call = Call(case, "fa2")
    gate = EXAMPLES["sigmoid_gate"]
    module, other = module_of(gate, case), module_of(EXAMPLES["alibi_by_hand"], case)
    batch = batch_of(call)
    floats, ints = (Buffer(call.memory, num_bytes) for num_bytes in module.workspace_size(*batch))
    plan = module.plan(floats.bytes, ints.bytes, *batch)
    for bias in (0.0, 3.0, -2.0):
        got = tuple(map(call.memory.get, module.run(plan, call.q, tuple(call.caches), return_lse=True, bias=bias)))
        check(case, (got[0], got[1]), logit=lambda s, *_, bias=bias: s + log_sigmoid(s + s.dtype.type(bias)))
    with pytest.raises(ArgumentError, match=r"^plan: was not made by a module of variant alibi_by_hand"):
        other.run(plan, call.q, tuple(call.caches), slopes=call.memory.put(np.ones(8, np.float32)))
    with pytest.raises(ArgumentError, match=r"^run: variant sigmoid_gate misses bias; its parameters are bias"):
        module.run(plan, call.q, tuple(call.caches))
    with pytest.raises(StateError, match=r"^plan: one of a module with a user variant runs through that module"):
        cupyinfer.get_batch_decode_module(case.dtype, None, 128).run(plan, call.q, tuple(call.caches))


@pytest.mark.parametrize("op", OPS)
def test_a_variant_changes_no_size(op: str) -> None:
    case = case_of(op)
    batch = batch_of(Call(case, "host"))
    types = (case.dtype, case.cache_dtype, *case.head_dims)
    if op == "decode":
        plain = cupyinfer.get_batch_decode_module(*types, backend="fa2")
    else:
        plain = cupyinfer.get_batch_prefill_module(*types, paged=case.paged, backend="fa2", causal=True)
    module = module_of(EXAMPLES["sigmoid_gate"], case)
    for profile in (PROFILE, cupyinfer.PROFILES[PROFILE]):
        assert module.workspace_size(*batch, profile=profile) == plain.workspace_size(*batch, profile=profile)
    with pytest.raises(ArgumentError, match=r"^q_data_type: is fixed by this module"):
        module.workspace_size(*batch, profile=PROFILE, q_data_type="bfloat16")


def test_the_host_cannot_run_cuda_source() -> None:
    gate, case = EXAMPLES["sigmoid_gate"], case_of("decode")
    for getter in (cupyinfer.get_batch_decode_jit_module, cupyinfer.get_batch_prefill_jit_module):
        with pytest.raises(BackendUnavailable, match=r"^backend: variant sigmoid_gate is CUDA source, .* use 'fa2'"):
            getter(gate, "float16", None, 128, backend="host")
        with pytest.raises(ArgumentError, match=r"^backend: got 'cpu'"):
            getter(gate, "float16", None, 128, backend="cpu")
        with pytest.raises(ArgumentTypeError, match=r"^variant: got str, expected a UserVariant"):
            getter("logit", "float16", None, 128)
    call = Call(case, "host")
    module = replace(module_of(gate, case), backend="auto")
    with pytest.raises(BackendUnavailable, match=r"^workspaces: lie on cpu; user variants are CUDA source"):
        module.plan(call.floats.bytes, call.ints.bytes, *batch_of(call))


def test_options_keep_their_kernels() -> None:
    """Requests of one module share the object that backends keep kernels in."""
    case = case_of("decode")
    module, batch = module_of(EXAMPLES["sigmoid_gate"], case), batch_of(Call(case, "host"))
    first, second = (module._request(*batch).options for _ in range(2))
    assert first is second
    assert first.variant(16, False).user == EXAMPLES["sigmoid_gate"]
    plain = cupyinfer.get_batch_decode_module(case.dtype, case.cache_dtype, 128)._request(*batch).options
    assert plain.user_variant is None and plain.by_kernel is not first.by_kernel


def test_parameters_are_packed_in_order() -> None:
    variant = cupyinfer.UserVariant("some", (("a", "float"), ("b", "int"), ("c", "int")), (("x", "int64"), ("y", "bool")), mask="true")
    x, y = np.zeros((3, 2), np.int64), np.zeros(0, bool)
    values = user_values(variant, {"y": y, "c": 7, "x": x, "b": -(2**31), "a": np.float32(0.5)}, CPU_DEVICE)
    assert values.packed == struct.pack("<QQfii4x", x.ctypes.data, values.views[1].ptr, 0.5, -(2**31), 7)
    assert [view.owner is array for view, array in zip(values.views, (x, y), strict=True)] == [True, True]
    empty = cupyinfer.UserVariant("some", mask="true")
    assert user_values(empty, {}, CPU_DEVICE).packed == bytes(8)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"a": None}, ArgumentError, r"run: variant some misses a; its parameters are x, a, b"),
        ({"a": None, "d": 1}, ArgumentError, r"run: variant some misses a and does not know d"),
        ({"d": 1, "e": 2}, ArgumentError, r"run: variant some does not know d, e; its"),
        ({"a": "1"}, ArgumentTypeError, r"a: got '1', expected a number"),
        ({"a": True}, ArgumentTypeError, r"a: got True"),
        ({"a": math.inf}, ArgumentError, r"a: got inf, must be finite"),
        ({"a": 1e39}, ArgumentError, r"a: got 1e\+39, beyond the range of float32"),
        ({"b": 1.0}, ArgumentTypeError, r"b: got 1.0, expected an int"),
        ({"b": 2**31}, ArgumentError, r"b: got 2147483648, must be at most 2147483647"),
        ({"b": -(2**31) - 1}, ArgumentError, r"b: got -2147483649, must be at least"),
        ({"x": [1, 2]}, ArgumentTypeError, r"x: "),
        ({"x": np.zeros(4, np.int64)}, ArgumentTypeError, r"x: got int64, the variant says int32"),
        ({"x": np.zeros(8, np.int32)[::2]}, ArgumentError, r"x: got strides \(2,\) for shape \(4,\)"),
        ({"x": np.zeros((3, 2), np.int32).T}, ArgumentError, r"x: got strides"),
        ({"x": np.zeros(9, np.uint8)[1:].view(np.int32)}, ArgumentError, r"x: begins at an address that is no multiple of its 4-byte"),
    ],
)
def test_parameters_that_do_not_fit(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    variant = cupyinfer.UserVariant("some", (("a", "float"), ("b", "int")), (("x", "int32"),), mask="true")
    given = {"a": 1.5, "b": 3, "x": np.zeros((2, 2), np.int32), **wrong}
    with pytest.raises(error, match=r"^" + message):
        user_values(variant, {name: value for name, value in given.items() if value is not None}, CPU_DEVICE)
