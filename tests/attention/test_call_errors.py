# SPDX-License-Identifier: Apache-2.0
"""Calls that do not fit: unknown and missing arguments, numbers out of range, plans under capture; and what a run hands back."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupyinfer
from cupyinfer.attention import plan as plan_module
from cupyinfer.attention.call_errors import checked_call
from cupyinfer.errors import ArgumentError, ArgumentTypeError, StateError, UnsupportedError
from cupyinfer.interop import Device
from cupyinfer.schedule.bounds import WorkspaceLimits, workspace_bound
from cupyinfer.schedule.capacity import BatchLimits
from tests.support.batches import Case
from tests.support.runner import WRAPPERS, Call

OPS = ("decode", "paged", "ragged")
TAKES_NO = "takes no such argument, or took it already$"


def planned(op: str) -> Call:
    call = Call(Case((40, 25, 0), None if op == "decode" else (5, 3, 2), op, head_dims=(64, 64), indices_on="host"), "host")
    call.plan()
    return call


def arrays_of(call: Call) -> list[Any]:
    return [call.q, *([tuple(call.caches)] if call.case.paged else call.caches)]


def module_and_batch(call: Call, **fixed: Any) -> tuple[Any, list[Any]]:
    at_width = len(call.plan_args) - (2 if call.case.paged else 1)
    batch = [argument for at, argument in enumerate(call.plan_args) if at != at_width]
    if call.case.op == "decode":
        return cupyinfer.get_batch_decode_module("float16", "float16", 64, backend="host", **fixed), batch
    return cupyinfer.get_batch_prefill_module("float16", "float16", 64, paged=call.case.paged, backend="host", **fixed), batch


@pytest.mark.parametrize("op", OPS)
def test_wrapper_calls(op: str) -> None:
    call = planned(op)
    name = type(call.wrapper).__name__
    for method in ("plan", "workspace_size"):
        for unknown in ("causl", "kv_layout", "copy_pages", "decode", "paged"):
            with pytest.raises(ArgumentTypeError, match=rf"^{unknown}: {name}\.{method} {TAKES_NO}"):
                getattr(call.wrapper, method)(*call.plan_args, **{unknown: True})
        with pytest.raises(ArgumentTypeError, match=rf"^{name}\.{method}: missing .*'num_kv_heads'"):
            getattr(call.wrapper, method)(*call.plan_args[:2])
        with pytest.raises(ArgumentTypeError, match=rf"^num_qo_heads: {name}\.{method} {TAKES_NO}"):
            getattr(call.wrapper, method)(*call.plan_args, num_qo_heads=4)
        with pytest.raises(ArgumentTypeError, match=rf"^{name}\.{method}: too many positional arguments"):
            getattr(call.wrapper, method)(*call.plan_args, 1, 2)
    with pytest.raises(ArgumentTypeError, match=rf"^causl: {name}\.run {TAKES_NO}"):
        call.wrapper.run(*arrays_of(call), causl=True)
    with pytest.raises(ArgumentTypeError, match=rf"^{name}\.run: missing '(paged_kv_cache|k', 'v)'$"):
        call.wrapper.run(call.q)
    assert {"sm_scale", "window_left"} <= set(inspect.signature(call.wrapper.plan).parameters)
    call.check(call.run())


@pytest.mark.parametrize("op", OPS)
def test_module_calls(op: str) -> None:
    call = planned(op)
    module, batch = module_and_batch(call)
    plan = module.plan(call.floats.bytes, call.ints.bytes, *batch)
    for unknown in ("causl", "decode", "paged"):
        with pytest.raises(ArgumentTypeError, match=rf"^{unknown}: AttentionModule {TAKES_NO}"):
            module.workspace_size(*batch, **{unknown: True})
    with pytest.raises(ArgumentTypeError, match=r"^AttentionModule: missing .*'num_kv_heads'"):
        module.plan(call.floats.bytes, call.ints.bytes, *batch[:2])
    with pytest.raises(ArgumentTypeError, match=r"^AttentionModule\.plan: missing 'int_workspace'$"):
        module.plan(call.floats.bytes)
    for unknown in ("causl", "user"):
        with pytest.raises(ArgumentTypeError, match=rf"^{unknown}: AttentionModule\.run {TAKES_NO}"):
            module.run(plan, *arrays_of(call), **{unknown: True})
    with pytest.raises(ArgumentTypeError, match=r"^AttentionModule\.run: missing 'q'$"):
        module.run(plan)
    misspelt, _ = module_and_batch(call, sm_scal=1.0)
    with pytest.raises(ArgumentTypeError, match=rf"^sm_scal: AttentionModule {TAKES_NO}"):
        misspelt.workspace_size(*batch)


def test_single_calls() -> None:
    q, k = np.ones((4, 64), np.float16), np.ones((3, 2, 64), np.float16)
    calls = (cupyinfer.single_decode_with_kv_cache, q), (cupyinfer.single_prefill_with_kv_cache, np.stack([q, q]))
    for function, queries in calls:
        assert np.all(function(queries, k, k, sm_scale=0.5) == 1)
        for unknown in ("causl", "page_size", "head_dim_vo", "num_qo_heads"):
            with pytest.raises(ArgumentTypeError, match=rf"^{unknown}: {function.__name__} {TAKES_NO}"):
                function(queries, k, k, **{unknown: 1})
        with pytest.raises(ArgumentTypeError, match=rf"^{function.__name__}: missing 'v'$"):
            function(queries, k)


def test_type_errors_from_within_pass() -> None:
    """An error of another function is not taken for one of the call, whatever it says."""

    @checked_call
    def outer(first: int, *, option: int = 0) -> None:
        def inner() -> None: ...

        inner(option=first)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match=r"inner\(\) got an unexpected keyword argument 'option'") as caught:
        outer(1, option=2)
    assert not isinstance(caught.value, ArgumentTypeError)


def test_fa3_has_no_user_variants() -> None:
    variant = cupyinfer.UserVariant("plain", mask="return true;")
    with pytest.raises(UnsupportedError, match=r"^backend: variant plain changes the fa2 kernel, 'fa3' has no user variants"):
        cupyinfer.get_batch_prefill_jit_module(variant, "float16", "float16", 128, backend="fa3")


def test_factors_beyond_float32() -> None:
    call = planned("ragged")
    for name, value in (("sm_scale", 1e300), ("logits_soft_cap", 1e39)):
        with pytest.raises(ArgumentError, match=f"^{name}: got .*, beyond the range of float32$"):
            call.wrapper.plan(*call.plan_args, **{name: value})
    arrays = arrays_of(call)
    for name, value in (("q_scale", 1e300), ("k_scale", 1e300), ("v_scale", -1e39)):
        with pytest.raises(ArgumentError, match=f"^{name}: got .* beyond the range of float32$"):
            call.wrapper.run(*arrays, **{name: value})
    call.wrapper.plan(*call.plan_args, sm_scale=1e30)
    with pytest.raises(ArgumentError, match=r"^q_scale: got 1e\+30; times sm_scale = 1e\+30 it is beyond the range of float32$"):
        call.wrapper.run(*arrays, q_scale=1e30)
    with pytest.raises(ArgumentError, match=r"^k_scale: got 1e\+20; times the factors of q, 1e\+30, it is beyond"):
        call.wrapper.run(*arrays, k_scale=1e20)
    call.plan()
    call.check(call.run())


def test_arrays_of_factors_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their libraries must learn of the work even when every other array is CuPy's or NumPy's own."""
    call = planned("decode")
    released: list[int] = []
    monkeypatch.setattr(plan_module, "release_after_work", lambda views: released.extend(view.ptr for view in views))
    heads = call.caches[0].shape[2]
    k_scale, v_scale = np.ones(heads, np.float32), np.ones(heads, np.float32)
    call.wrapper.run(*arrays_of(call), k_scale=k_scale, v_scale=v_scale)
    assert released == [k_scale.ctypes.data, v_scale.ctypes.data]
    call.wrapper.run(*arrays_of(call))
    assert len(released) == 2


def test_no_plan_under_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "current_stream_state", lambda index: (5, index == 3))
    monkeypatch.setattr(plan_module, "read_profile", lambda index: None)
    options = SimpleNamespace(user_variant=None)
    with pytest.raises(StateError, match=r"^plan: CuPy's current stream of cuda:3 is being captured"):
        plan_module.plan_attention(SimpleNamespace(options=options), SimpleNamespace(device=Device("cuda", 3)))  # type: ignore[arg-type]


def test_capacities_are_integers() -> None:
    for name in ("max_batch_size", "max_num_qo_tokens", "max_num_pages", "max_kv_len"):
        for value, error in ((2.5, ArgumentTypeError), ("2", ArgumentTypeError), (-1, ArgumentError)):
            for wrapper in WRAPPERS.values():
                with pytest.raises(error, match=f"^{name}: got "):
                    wrapper(backend="host", use_cuda_graph=True, **{name: value})
    for name, limits in (("max_batch_size", ("2", 2)), ("max_num_qo_tokens", (2, None)), ("max_kv_len", (2, 2, 1.5))):
        with pytest.raises(ArgumentTypeError, match=f"^{name}: got .*, expected an int$"):
            BatchLimits(*limits)  # type: ignore[arg-type]


def test_limits_are_integers() -> None:
    good = {"kind": "prefill", "max_batch_size": 2, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "max_num_qo_tokens": 8}
    assert workspace_bound(WorkspaceLimits(**good), "h200").total_bytes > 0  # type: ignore[arg-type]
    names = [*list(good)[1:], "head_dim_vo", "max_num_pages", "page_size", "max_kv_len", "value_bytes"]
    for name in names:
        with pytest.raises(ArgumentTypeError, match=f"^{name}: got '8', expected an int$"):
            workspace_bound(WorkspaceLimits(**{**good, name: "8"}), "h200")  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"^max_batch_size: got None"):
        workspace_bound(WorkspaceLimits(**{**good, "max_batch_size": None}), "h200")  # type: ignore[arg-type]
