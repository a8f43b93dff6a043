# SPDX-License-Identifier: Apache-2.0
"""Input that once passed for something else: flags that are words, arrays for words, memory written twice, graphs that change."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import numpy as np
import pytest

import cupyinfer
from cupyinfer.backends import host
from cupyinfer.errors import ArgumentError, ArgumentTypeError, CupyInferError
from cupyinfer.schedule.geometry import MAX_UNITS
from tests.attention.homes import HOMES, Home
from tests.support.batches import Case
from tests.support.runner import WRAPPERS, Call

PAGED: dict[str, Any] = {"num_qo_heads": 4, "num_kv_heads": 2, "page_size": 8}
#: A batch of two requests for every operation, and the name of its width.
BATCHES: dict[str, dict[str, Any]] = {
    "decode": {"indptr": [0, 2, 3], "indices": [0, 1, 2], "last_page_len": [3, 4], **PAGED, "head_dim": 64},
    "paged": {
        "qo_indptr": [0, 2, 3], "paged_kv_indptr": [0, 2, 3], "paged_kv_indices": [0, 1, 2], "paged_kv_last_page_len": [3, 4],
        **PAGED, "head_dim_qk": 64,
    },
    "ragged": {"qo_indptr": [0, 2, 3], "kv_indptr": [0, 5, 9], "num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64},
}  # fmt: skip
WORDS = np.array(["NHD", "HND"])
RAGGED_LISTS = [[1], [2, 3]]


def bytes_of(count: int) -> Any:
    block = np.zeros(count + 64, np.uint8)
    return block[-block.ctypes.data % 64 :][:count]


def wrapper_for(op: str, **options: Any) -> Any:
    return WRAPPERS[op](bytes_of(1 << 20), bytes_of(1 << 16), backend="host", **options)


def ask(op: str, **options: Any) -> Any:
    return wrapper_for(op).workspace_size(**{**BATCHES[op], **options})


FLAGS = {op: ["disable_split_kv", "non_blocking"] + ["causal", "use_fp16_qk_reduction"] * (op != "decode") for op in BATCHES}


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in FLAGS.items() for name in names])
def test_flags_are_true_or_false(op: str, name: str) -> None:
    for value in ("no", 1, 0, None, np.array([True, False]), []):
        with pytest.raises(ArgumentTypeError, match=f"^{name}: got .*, expected True or False"):
            ask(op, **{name: value})
    assert ask(op, **{name: np.False_}) == ask(op, **{name: False})
    if name != "use_fp16_qk_reduction":
        assert ask(op, **{name: np.True_}) == ask(op, **{name: True})


@pytest.mark.parametrize("op", BATCHES)
def test_arrays_where_words_or_flat_lists_are_expected(op: str) -> None:
    with pytest.raises(ArgumentError, match=r"^pos_encoding_mode: got array"):
        ask(op, pos_encoding_mode=WORDS)
    for name, value in (("kv_layout", WORDS), ("backend", WORDS)):
        with pytest.raises(ArgumentError, match=f"^{name}: got array"):
            WRAPPERS[op](**{"backend": "host", name: value})
    names = {"decode": ["sinks", "indices", "indptr"], "paged": ["sinks", "paged_kv_indices", "custom_mask", "packed_custom_mask"]}
    for name in names.get(op, ["sinks", "kv_indptr", "custom_mask", "packed_custom_mask"]):
        with pytest.raises(ArgumentTypeError, match=f"^{name}: got list, expected"):
            ask(op, **{name: RAGGED_LISTS})


@pytest.mark.parametrize("op", BATCHES)
def test_run_options_of_another_kind(op: str) -> None:
    call = Call(Case((40, 25), None if op == "decode" else (5, 3), op, head_dims=(64, 64), indices_on="host"), "host")
    call.plan()
    kv = [tuple(call.caches)] if call.case.paged else call.caches
    for name in ("window_left", "sm_scale", "logits_soft_cap", *(["causal"] if op != "decode" else [])):
        for value in (np.array([1.0, 2.0]), "x", [1]):
            with pytest.raises(ArgumentTypeError, match=f"^{name}: got "):
                call.wrapper.run(call.q, *kv, **{name: value})


@pytest.mark.parametrize("op", ["paged", "ragged"])
@pytest.mark.parametrize("packed", [False, True])
def test_causal_at_run_is_what_plan_was_given(op: str, packed: bool) -> None:
    """A custom mask takes the place of causal in both."""
    wrapper = wrapper_for(op)
    bits = 2 * 11 + 4 if op == "paged" else 2 * 5 + 4
    num_bytes = 3 + 1 if op == "paged" else 2 + 1
    mask = {"packed_custom_mask": np.full(num_bytes, 255, np.uint8)} if packed else {"custom_mask": np.ones(bits, bool)}
    q = bytes_of(3 * 4 * 64 * 2).view(np.float16).reshape(3, 4, 64)
    shape = (3, 8, 2, 64) if op == "paged" else (9, 2, 64)
    k, v = (bytes_of(int(np.prod(shape)) * 2).view(np.float16).reshape(shape) for _ in "kv")
    for given in (False, True):
        wrapper.plan(**BATCHES[op], causal=given, **mask)
        kv = [(k, v)] if op == "paged" else [k, v]
        wrapper.run(q, *kv, causal=given)
        with pytest.raises(ArgumentError, match=f"^causal: got {not given} at run, the plan has {given}"):
            wrapper.run(q, *kv, causal=not given)


ALIBI = {"pos_encoding_mode": "ALIBI"}
GRAPH_CHANGES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("decode", {}, {"sinks": np.ones(4)}, "sinks"),
    ("decode", {**ALIBI, "sinks": np.ones(4)}, ALIBI, "sinks"),
    ("paged", {}, {"custom_mask": np.ones(26, bool)}, "custom_mask"),
    ("ragged", {}, {"custom_mask": np.ones(14, bool)}, "custom_mask"),
    ("ragged", {"custom_mask": np.ones(14, bool)}, {"custom_mask": np.ones(14, bool), "sinks": np.ones(4)}, "sinks"),
    ("ragged", {"packed_custom_mask": np.ones(3, np.uint8), "sinks": np.ones(4)}, {"sinks": np.ones(4)}, "custom_mask"),
]


@pytest.mark.parametrize(("op", "first", "second", "name"), GRAPH_CHANGES)
def test_a_graph_keeps_its_masks_and_values(op: str, first: dict[str, Any], second: dict[str, Any], name: str) -> None:
    """Both ways; the plan before stays, sizes are refused too, and without graphs everything may change."""
    for before, after in ((first, second), (second, first)):
        wrapper = wrapper_for(op, use_cuda_graph=True)
        wrapper.plan(**BATCHES[op], **before)
        info = wrapper.plan_info
        for call in (wrapper.plan, wrapper.workspace_size):
            with pytest.raises(ArgumentError, match=rf"^{name}: .*first plan of this object's CUDA graph"):
                call(**BATCHES[op], **after)
        assert wrapper.plan_info is info
        wrapper.plan(**BATCHES[op], **before)
        assert wrapper.plan_info == info
        plain = wrapper_for(op)
        plain.plan(**BATCHES[op], **before)
        plain.plan(**BATCHES[op], **after)


def test_a_graph_keeps_its_launch() -> None:
    """A wrapper whose workspaces move to another kind of GPU would launch another grid."""
    wrapper = wrapper_for("decode", use_cuda_graph=True, profile="a100")
    wrapper.plan(**BATCHES["decode"])
    wrapper._profile = cupyinfer.DeviceProfile("x", "sm_80", 7, 164 << 10, 163 << 10)
    with pytest.raises(ArgumentError, match=r"^plan: num_ctas is 7, but 108 in the first plan of this object's CUDA graph"):
        wrapper.plan(**BATCHES["decode"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sinks", "packed_custom_mask"])
def test_a_graph_keeps_the_addresses_of_arrays_read_in_place(name: str) -> None:
    import cupy

    batch = BATCHES["ragged"]
    arrays = [cupy.ones(4, cupy.float32) if name == "sinks" else cupy.ones(3, cupy.uint8) for _ in range(2)]
    wrapper = WRAPPERS["ragged"](cupy.zeros(1 << 22, cupy.uint8), cupy.zeros(1 << 20, cupy.uint8), use_cuda_graph=True)
    wrapper.plan(**batch, **{name: arrays[0]})
    wrapper.plan(**batch, **{name: arrays[0]})
    with pytest.raises(ArgumentError, match=r": read in place at address .* but read in place at address .* CUDA graph"):
        wrapper.plan(**batch, **{name: arrays[1]})


@pytest.mark.parametrize("op", BATCHES)
@pytest.mark.parametrize("scale", ["k_scale", "v_scale"])
def test_outputs_over_factors_are_refused(op: str, scale: str, backend: str) -> None:
    call = Call(Case((300, 40), None if op == "decode" else (2, 1), op, heads=(4, 2), head_dims=(64, 64), indices_on="host"), backend)
    call.plan()
    kv = [tuple(call.caches)] if call.case.paged else call.caches
    lse = call.memory.put(np.ones(call.q.shape[:2], np.float32))
    out = call.memory.put(np.ones(call.q.shape, np.float16))
    for name, array in (("lse", lse), ("out", out)):
        factors = array.reshape(-1).view(np.float32)[2:4]
        before = call.memory.get(array).copy()
        with pytest.raises(ArgumentError, match=f"^{name}: shares memory with {scale}; a run would write over"):
            call.wrapper.run(call.q, *kv, return_lse=True, **{name: array, scale: factors})
        np.testing.assert_array_equal(call.memory.get(array), before)
    call.wrapper.run(call.q, *kv, return_lse=True, out=out, lse=lse, **{scale: call.memory.put(np.ones(2, np.float32))})


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sinks", "indices"])
def test_outputs_over_arrays_a_plan_reads_in_place_are_refused(name: str) -> None:
    import cupy

    wrapper = WRAPPERS["decode"](cupy.zeros(1 << 22, cupy.uint8), cupy.zeros(1 << 20, cupy.uint8))
    out = cupy.zeros((2, 4, 64), cupy.float16)
    place = out.reshape(-1).view(cupy.float32 if name == "sinks" else cupy.int32)[4:8]
    batch = {**BATCHES["decode"], name: place}
    wrapper.plan(**batch)
    cache = cupy.zeros((3, 8, 2, 64), cupy.float16)
    with pytest.raises(ArgumentError, match=f"^out: shares memory with {name};"):
        wrapper.run(cupy.zeros((2, 4, 64), cupy.float16), (cache, cache), out=out)


@pytest.mark.parametrize("op", BATCHES)
@pytest.mark.parametrize("strides", [(16, 16, 1), (64, 8, 1), (0, 64, 1), (16, 64, 1), (192, 64, 1)])
def test_outputs_whose_rows_overlap_are_refused(op: str, strides: tuple[int, ...]) -> None:
    call = Call(Case((300, 40), None if op == "decode" else (2, 1), op, heads=(4, 2), head_dims=(64, 64), indices_on="host"), "host")
    call.plan()
    kv = [tuple(call.caches)] if call.case.paged else call.caches
    memory = bytes_of(1 << 14).view(np.float16)
    tokens = len(call.q)
    for allowed in ((256, 64, 1), (64, 64 * tokens, 1), (512, 128, 1)):
        call.wrapper.run(call.q, *kv, out=np.lib.stride_tricks.as_strided(memory, (tokens, 4, 64), [2 * step for step in allowed]))
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"^out: strides .* make rows overlap"):
            call.wrapper.run(call.q, *kv, out=np.lib.stride_tricks.as_strided(memory, (tokens, 4, 64), [2 * step for step in strides]))


@pytest.mark.parametrize("op", BATCHES)
def test_values_that_make_every_output_nan_are_refused(op: str) -> None:
    for name, value in (("rope_scale", 1e-39), ("rope_scale", 1e-30), ("rope_theta", 1e-30)):
        with pytest.raises(ArgumentError, match=f"^{name}: got {value}.* beyond the range of float32"):
            ask(op, pos_encoding_mode="ROPE_LLAMA", **{name: value})
    assert ask(op, pos_encoding_mode="ROPE_LLAMA", rope_scale=1e-20, rope_theta=1e8)
    for name, options in (("sinks", {}), ("alibi_slopes", ALIBI)):
        for bad in (np.nan, np.inf, 1e39):
            with pytest.raises(ArgumentError, match=f"^{name}: entry 2 is .*, must be finite in float32"):
                ask(op, **options, **{name: [1.0, 1.0, bad, 1.0]})
    assert ask(op, sinks=[-np.inf] * 4)


@pytest.mark.parametrize("scale", ["k_scale", "v_scale"])
def test_factors_on_the_host_are_checked(scale: str) -> None:
    call = Call(Case((300, 40), None, "decode", heads=(4, 2), head_dims=(64, 64), indices_on="host"), "host")
    call.plan()
    bad = [np.nan, np.inf] + ([0.0, -1.0] if scale == "k_scale" else [])
    for value in bad:
        with pytest.raises(ArgumentError, match=f"^{scale}: head 1 has "):
            call.wrapper.run(call.q, tuple(call.caches), **{scale: np.array([1, value], np.float32)})


@HOMES
def test_caches_and_index_arrays_that_overlap_are_refused(home: Home) -> None:
    rows = home.put(np.ones((3, 2, 64), np.float16))
    indices = [home.put(np.array(values, np.int32)) for values in ([0, 0, 1], [0, 1, 0], [0, 1, 2], [0, 2, 3], [2, 1])]
    memory = home.put(np.zeros((4, 2, 4, 2, 64), np.float16))
    cache, other = memory[:, 0], memory[:, 1]
    cupyinfer.append_paged_kv_cache(rows, rows, *indices[:2], (cache, other), *indices[2:])
    cupyinfer.append_paged_kv_cache(rows, rows, *indices[:2], memory, *indices[2:])
    for pair in ((cache, cache), (cache[:3], cache[1:]), (memory[:3, 0], memory.reshape(8, 4, 2, 64)[2:5])):
        with pytest.raises(ArgumentError, match=r"^paged_kv_cache: K and V share memory"):
            cupyinfer.append_paged_kv_cache(rows, rows, *indices[:2], pair, *indices[2:])
    both = home.put(np.zeros(8, np.int32))
    for first, second in ((both[:3], both[:3]), (both[:3], both[2:5])):
        with pytest.raises(ArgumentError, match=r"^positions: shares memory with batch_indices"):
            cupyinfer.get_batch_indices_positions(indices[3], indices[4], 3, first, second)
    cupyinfer.get_batch_indices_positions(indices[3], indices[4], 3, both[:3], both[3:6])
    with pytest.raises(ArgumentError, match=r"^batch_indices: shares memory with append_indptr"):
        cupyinfer.get_batch_indices_positions(indices[3], indices[4], 3, indices[3], None)


def test_slots_of_a_cache_that_overlap_are_refused() -> None:
    rows, cache = np.ones((3, 2, 64), np.float16), np.zeros((3, 4, 2, 64), np.float16)
    ints = [np.array(values, np.int32) for values in ([0, 0, 1], [0, 1, 0], [0, 1, 2], [0, 2, 3], [2, 1])]
    folded = np.lib.stride_tricks.as_strided(cache, (3, 4, 2, 64), (0, 256, 128, 2))
    with pytest.raises(ArgumentError, match=r"^paged_kv_cache: strides .* make slots of V overlap"):
        cupyinfer.append_paged_kv_cache(rows, rows, *ints[:2], (cache.copy(), folded), *ints[2:])


@pytest.mark.parametrize("heads", [65_536, 2**31 - 1])
@pytest.mark.parametrize("op", BATCHES)
def test_more_units_than_32_bits_count_are_refused(op: str, heads: int) -> None:
    requests = 65_536 if heads == 65_536 else 2
    ones, offsets = np.ones(requests, np.int32), np.arange(requests + 1, dtype=np.int32)
    batches = {
        "decode": {"indptr": offsets, "indices": offsets, "last_page_len": ones, "head_dim": 64, "page_size": 1},
        "paged": {
            "qo_indptr": offsets, "paged_kv_indptr": offsets, "paged_kv_indices": offsets, "paged_kv_last_page_len": ones,
            "head_dim_qk": 64, "page_size": 1,
        },
        "ragged": {"qo_indptr": offsets, "kv_indptr": offsets, "head_dim_qk": 64},
    }  # fmt: skip
    for options in ({}, {"disable_split_kv": True}, {"fixed_split_size": 1}):
        with pytest.raises(ArgumentError, match=rf"^batch: has {requests} tiles of {heads} KV heads, supported are up to {MAX_UNITS} "):
            wrapper_for(op).workspace_size(**batches[op], num_qo_heads=heads, num_kv_heads=heads, **options)


def test_single_calls_name_their_own_arguments() -> None:
    q, kv = np.ones((4, 64), np.float16), np.ones((5, 2, 64), np.float16)
    wrong: list[tuple[Any, Any, Any, dict[str, Any], str]] = [
        (q.astype(np.float32), kv, kv, {}, "q"),
        (q[:0], kv, kv, {}, "q"),
        (q[:3], kv, kv, {}, "q"),
        (q[:, :63], kv, kv, {}, "q"),
        (q, kv.astype(np.float32), kv, {}, "k"),
        (q, kv.view(np.uint8), kv, {}, "k"),
        (q, kv[:, :0], kv[:, :0], {}, "k"),
        (q, kv[..., :48], kv, {}, "k"),
        (q, kv, kv.view(np.uint16), {}, "v"),
        (q, kv, kv[..., :48], {}, "q|v"),
        (q, kv, kv.view(np.uint16), {"kv_data_type": "float16"}, "v"),
        (q, np.ones((5, 2, 65), np.float16)[..., 1:], kv, {}, "k"),
        (q, kv, kv, {"copy_pages": True}, "copy_pages"),
    ]
    for queries, k, v, options, name in wrong:
        for prefill in (False, True):
            call = cupyinfer.single_prefill_with_kv_cache if prefill else cupyinfer.single_decode_with_kv_cache
            with pytest.raises(CupyInferError, match=f"^({name}): ") as caught:
                call(queries[None] if prefill else queries, k, v, **options)
            assert not any(word in str(caught.value) for word in ("q_data_type", "paged_kv_cache", "indptr"))


@pytest.mark.parametrize("make", [cupyinfer.get_batch_decode_module, cupyinfer.get_batch_prefill_module])
def test_modules_are_checked_when_made(make: Any) -> None:
    for args, name in (
        (("float32", "float32", 64), "q_dtype"),
        (("float16", "float32", 64), "kv_dtype"),
        (("float16", "bfloat16", 64), "kv_dtype"),
        (("float16", "float16", 65), "head_dim"),
        (("float16", "float16", "64"), "head_dim_qk"),
        (("float16", "float16", 192, 64), "head_dim"),
    ):
        with pytest.raises(CupyInferError, match=f"^{name}: got "):
            make(*args)
    if make is cupyinfer.get_batch_prefill_module:
        with pytest.raises(ArgumentTypeError, match=r"^paged: got 'no', expected True or False"):
            make("float16", "float16", 64, paged="no")


def test_the_backend_of_a_plan_is_public() -> None:
    wrapper = WRAPPERS["decode"](bytes_of(1 << 16), bytes_of(1 << 16))
    wrapper.plan(**BATCHES["decode"])
    assert wrapper.plan_backend == "host"


def test_unknown_and_missing_arguments_everywhere() -> None:
    """Constructors, helpers and merging say it as plan and run do."""
    wrapper = WRAPPERS["decode"](backend="host")
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (WRAPPERS["decode"], ()),
        (wrapper.reset_workspace_buffer, (None, None)),
        (cupyinfer.append_paged_kv_cache, (None,) * 8),
        (cupyinfer.get_batch_indices_positions, (None,) * 3),
        (cupyinfer.get_seq_lens, (None,) * 3),
        (cupyinfer.merge_state, (None,) * 4),
        (cupyinfer.merge_state_in_place, (None,) * 4),
        (cupyinfer.merge_states, (None,) * 2),
        (cupyinfer.get_batch_decode_module, ("float16", "float16", 64)),
        (cupyinfer.get_batch_prefill_jit_module, (None, "float16", "float16", 64)),
    ]
    for call, args in calls:
        if args:
            with pytest.raises(ArgumentTypeError, match=": missing "):
                call(*args[:-1])
        if "module" not in call.__name__:  # modules leave further options to `plan`
            with pytest.raises(ArgumentTypeError, match=r"^foo: .* takes no such argument"):
                call(*args, foo=1)


@pytest.mark.parametrize("op", BATCHES)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_wrappers_are_not_copied(op: str, copied: Any) -> None:
    """A copy would plan into addresses of the original's workspaces."""
    with pytest.raises(ArgumentTypeError, match=r"^Batch\w+Wrapper: cannot be copied or pickled"):
        copied(wrapper_for(op))


def test_a_run_that_is_interrupted_leaves_nothing_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that had arrived before do not count for the run after."""
    call, undisturbed = (Call(Case((700,), dtype="float16", fixed_split_size=4), "host") for _ in range(2))
    call.plan()
    undisturbed.plan()
    work = host._run_segment
    parts = itertools.count()

    def interrupted(*of: Any) -> None:
        if next(parts) == 3:
            raise KeyboardInterrupt
        work(*of)

    with monkeypatch.context() as patch:
        patch.setattr(host, "_run_segment", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call.run()
    again = call.run()
    assert next(parts) == 4
    for before, after in zip(undisturbed.run(), again, strict=True):
        np.testing.assert_array_equal(before, after)
