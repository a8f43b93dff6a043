# SPDX-License-Identifier: Apache-2.0
"""Sizes: exact figures that must not grow unseen, bounds that hold for every batch, and CUDA-graph offsets that never move."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyinfer import BatchPrefillWithRaggedKVCacheWrapper
from cupyinfer.errors import ArgumentError, ArgumentTypeError, StateError, UnsupportedError
from cupyinfer.schedule.bounds import WorkspaceLimits, workspace_bound
from cupyinfer.schedule.capacity import BatchLimits
from cupyinfer.schedule.layout import RegionCounts, lay_out, measure, memory_map
from cupyinfer.schedule.planner import PlanShape, bound
from cupyinfer.schedule.profile import PROFILES, DeviceProfile
from cupyinfer.workspace import AlignedAllocator
from tests.schedule.batches import Case, cases
from tests.schedule.simulator import place

#: (query heads, KV heads, requests, keys of each), our float bytes on an H200, and FlashInfer 0.7.4's smaller nonzero figure
#: there, or None where it needs none either way.
DECODE_ROWS = [
    ((32, 8, 1, 8192), 264192, 1056768),
    ((32, 8, 1, 131072), 264192, 2179584),
    ((32, 8, 16, 4096), 0, 2113536),
    ((32, 8, 64, 4096), 0, 2113536),
    ((32, 8, 256, 2048), 0, None),
    ((64, 8, 64, 4096), 0, 4227072),
    ((64, 4, 64, 4096), 0, None),
    ((32, 32, 16, 4096), 0, None),
    ((64, 8, 8, 65536), 528384, 2113536),
]


@pytest.mark.parametrize(("row", "float_bytes", "peer_bytes"), DECODE_ROWS)
def test_float_bytes_of_decode_on_an_h200(row: tuple[int, int, int, int], float_bytes: int, peer_bytes: int | None) -> None:
    num_qo_heads, num_kv_heads, batch, kv_len = row
    case = Case("decode", [1] * batch, [kv_len] * batch, num_kv_heads=num_kv_heads, group_size=num_qo_heads // num_kv_heads)
    size = case.draft().size
    assert size.float_bytes == float_bytes <= 2_200_000
    assert peer_bytes is None or 2 * size.float_bytes <= peer_bytes
    largest = workspace_bound(WorkspaceLimits("decode", batch, num_qo_heads, num_kv_heads, 128), "h200")
    assert size.float_bytes <= largest.float_bytes
    assert size.int_bytes <= largest.int_bytes


def test_bounds_on_an_h200() -> None:
    decode = workspace_bound(WorkspaceLimits("decode", 4096, 32, 8, 128), "h200")
    assert decode.float_bytes == 8 * 2 * 15 * 4 * 129 * 4
    one_head = workspace_bound(WorkspaceLimits("decode", 4096, 4, 1, 128), "h200")
    assert one_head.float_bytes == 2 * 131 * 4 * 129 * 4
    assert decode.total_bytes < 2_300_000
    for num_qo_heads, num_kv_heads in ((32, 8), (64, 8), (64, 4), (32, 32), (64, 1)):
        prefill = workspace_bound(WorkspaceLimits("prefill", 4096, num_qo_heads, num_kv_heads, 128, max_num_qo_tokens=16384), "h200")
        assert prefill.float_bytes <= 2 * 132 * 128 * 129 * 4 < 18_000_000


@settings(max_examples=200)
@given(case=cases(max_batch=8, max_qo=300, max_kv=3000), spare=st.tuples(*[st.integers(0, 50)] * 3), pages=st.none() | st.integers(0, 99))
def test_bound_holds_for_every_batch_within_limits(case: Case, spare: tuple[int, int, int], pages: int | None) -> None:
    batch, tokens, keys = (limit + more for limit, more in zip(vars(case.limits).values(), spare, strict=True))
    limits = BatchLimits(batch, batch if case.kind == "decode" else tokens, keys)
    largest = bound(case.shape, limits, case.profile, pages, 64)
    for graph_limits in (None, limits):
        size = case.draft(num_page_indices=pages, value_bytes=64, graph_limits=graph_limits).size
        assert size.float_bytes <= largest.float_bytes
        assert size.int_bytes <= largest.int_bytes


@pytest.mark.parametrize("gpu", ["h200", "b200"])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_equal_units_of_every_length_stay_within_their_graph(gpu: str, head_dims: tuple[int, int]) -> None:
    """Each region, not just their sum, for as many equal units as an SM has CTAs for, and more: three CTAs cut most parts."""
    for num_requests, qo_len, kv_len in itertools.product((1, 2, 3, 8), (128, 2048), (128, 1000, 7048, 20000)):
        case = Case(
            "ragged",
            [qo_len] * num_requests,
            [kv_len] * num_requests,
            num_kv_heads=1,
            group_size=1,
            head_dims=head_dims,
            profile=PROFILES[gpu],
        )
        limits = BatchLimits(num_requests, num_requests * qo_len)
        schedule, capacity = case.draft().schedule, case.draft(graph_limits=limits).counts
        parts = schedule.partition
        needs = len(schedule.tiles), len(parts.cta_work), len(parts.merge_groups), parts.num_partial_rows
        assert all(need <= hold for need, hold in zip(needs, capacity[:4], strict=True)), (case, needs, capacity)
        assert measure(case.draft().counts).float_bytes <= bound(case.shape, limits, case.profile).float_bytes


def test_bound_against_exact_sizes(record_property: Any) -> None:
    """Some batch needs all of the bound's float bytes; the ratios over many batches are recorded with the test's report."""
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(300):
        batch = int(rng.integers(1, 65))
        case = Case("decode", [1] * batch, rng.integers(1, 8192, batch).tolist(), num_kv_heads=8)
        ratios.append(case.draft().size.float_bytes / bound(case.shape, case.limits, case.profile).float_bytes)
    smallest, largest = min(ratios), max(ratios)
    record_property("smallest_exact_to_bound", smallest)
    record_property("largest_exact_to_bound", largest)
    assert smallest > 0.5
    assert 0.99 < largest <= 1


def test_one_request_of_a_fixed_split_fills_its_bound() -> None:
    case = Case("decode", [1], [64 * 37], fixed_split_size=4)
    exact, largest = case.draft().size, bound(case.shape, case.limits, case.profile)
    assert exact.float_bytes == largest.float_bytes == 2 * 37 * 4 * 129 * 4


@pytest.mark.parametrize("kind", ["paged", "ragged"])
@pytest.mark.parametrize("split", [{}, {"fixed_split_size": 16}, {"disable_split_kv": True}])
def test_graph_offsets_do_not_depend_on_how_queries_are_distributed(kind: str, split: dict[str, Any]) -> None:
    """128 query rows as 63 + 65 fill three tiles of 64, as 64 + 64 two: grid, offsets and sizes must stay the same."""
    limits = BatchLimits(2, 128, 4096)
    fixed = set()
    for qo_lens, kv_lens in (([63, 65], [63, 65]), ([64, 64], [4096, 64]), ([1, 127], [1, 4000]), ([128], [128]), ([], [])):
        draft = Case(kind, qo_lens, kv_lens, num_kv_heads=8, group_size=1, **split).draft(graph_limits=limits)
        info = place(draft).info
        names = [
            name
            for name in vars(info)
            if name.endswith(("_offset", "_bytes")) or name in ("num_ctas", "cta_tile_q", "kv_tile", "unit_step", "cuda_graph")
        ]
        fixed.add((draft.size, *(getattr(info, name) for name in names)))
    assert len(fixed) == 1


@settings(max_examples=100)
@given(case=cases(max_batch=5, max_qo=60), other=cases(max_batch=5, max_qo=60))
def test_graph_plans_of_one_capacity_lie_alike(case: Case, other: Case) -> None:
    other = replace(case, **{name: getattr(other if case.kind != "decode" else case, name) for name in ("qo_lens", "kv_lens")})
    tokens = 5 if case.kind == "decode" else 300
    limits = BatchLimits(5, tokens, 900)
    one, two = (place(each.draft(num_page_indices=77, graph_limits=limits)).info for each in (case, other))
    for name in vars(one):
        if name.endswith(("_offset", "_bytes")) or name in ("num_ctas", "cta_tile_q", "kv_tile", "unit_step"):
            assert getattr(one, name) == getattr(two, name), name


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (BatchLimits(1, 100, 900), "batch: has 2 requests, this object's CUDA graph holds at most 1"),
        (BatchLimits(2, 39, 900), "batch: has 40 query tokens, this object's CUDA graph holds at most 39"),
        (BatchLimits(2, 40, 899), "batch: has a request of 900 keys, this object's CUDA graph holds at most 899"),
    ],
)
def test_batches_beyond_a_graph(limits: BatchLimits, message: str) -> None:
    case = Case("paged", [30, 10], [900, 20])
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        case.draft(graph_limits=limits)
    assert case.draft(graph_limits=BatchLimits(2, 40, 900)).size.total_bytes > 0


counts = st.builds(
    RegionCounts,
    num_tiles=st.integers(0, 100),
    num_ctas=st.integers(0, 300),
    num_merge_groups=st.integers(0, 100),
    num_partial_rows=st.integers(0, 999),
    head_dim_vo=st.sampled_from([64, 128]),
    num_page_indices=st.none() | st.integers(0, 999),
    value_bytes=st.none() | st.integers(0, 999),
)


@given(counts=counts)
def test_layout_counts_places_and_maps_alike(counts: RegionCounts) -> None:
    size = measure(counts)
    buffers = [np.empty(bytes_ + 16, np.uint8) for bytes_ in size]
    placing = [AlignedAllocator(block[-block.ctypes.data % 16 :][:bytes_]) for block, bytes_ in zip(buffers, size, strict=True)]
    offsets = lay_out(counts, *placing)
    assert offsets == lay_out(counts, AlignedAllocator(), AlignedAllocator())
    ends = {"float": 0, "int": 0}
    for region in memory_map(counts):
        assert region.offset == getattr(offsets, region.name)
        assert region.offset % 16 == 0
        assert ends[region.workspace] <= region.offset < ends[region.workspace] + 16
        ends[region.workspace] = region.offset + region.num_bytes
    assert ends == {"float": size.float_bytes, "int": size.int_bytes}
    assert (offsets.page_indices == -1) is (counts.num_page_indices is None)
    assert (offsets.values == -1) is (counts.value_bytes is None)


@pytest.mark.parametrize("used", [0, 1])
def test_a_layout_begins_where_the_workspaces_do(used: int) -> None:
    allocators = AlignedAllocator(), AlignedAllocator()
    allocators[used].reserve(16)
    with pytest.raises(StateError, match="holds regions already"):
        lay_out(RegionCounts(1, 1, 0, 0, 64), *allocators)


def test_partial_rows_are_a_row_of_values_and_a_log_sum_exp() -> None:
    assert measure(RegionCounts(0, 0, 0, 3, 64)).float_bytes == 768 + 12
    # The queue of whole units is one more CTA record.
    assert measure(RegionCounts(2, 3, 4, 0, 64, num_page_indices=5)) == (0, 96 + 96 + 32 + 192 + 20)


LIMITS = WorkspaceLimits("prefill", 8, 32, 8, 128, max_num_qo_tokens=100)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kind": "append"}, ArgumentError, "^kind: got 'append', expected 'decode' or 'prefill'$"),
        ({"max_num_qo_tokens": None}, ArgumentError, "^max_num_qo_tokens: a prefill bound needs it$"),
        ({"fixed_split_size": 4}, ArgumentError, "max_kv_len"),
        ({"fixed_split_size": 0, "max_kv_len": 9}, ArgumentError, "^fixed_split_size: got 0"),
        ({"fixed_split_size": True, "max_kv_len": 9}, ArgumentTypeError, "^fixed_split_size: got bool"),
        (
            {"fixed_split_size": 4, "max_kv_len": 9, "disable_split_kv": True},
            ArgumentError,
            "^fixed_split_size: got 4 together with disable",
        ),
        ({"max_batch_size": -1}, ArgumentError, "^max_batch_size: got -1, must be at least 0$"),
        ({"num_qo_heads": 30}, ArgumentError, "^num_qo_heads: got 30"),
        ({"head_dim": 80}, UnsupportedError, "^head_dim: got 80"),
        ({"kv_data_type": "float32"}, ArgumentTypeError, "^kv_data_type: got 'float32'"),
    ],
)
def test_limits_that_make_no_sense(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        workspace_bound(replace(LIMITS, **changes), "h200")


def test_what_is_no_limits_or_no_gpu() -> None:
    with pytest.raises(ArgumentTypeError, match=r"^limits: got dict"):
        workspace_bound({}, "h200")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^profile: got 'h300', known are a100"):
        workspace_bound(LIMITS, "h300")
    with pytest.raises(ArgumentTypeError, match=r"^profile: got int"):
        workspace_bound(LIMITS, 132)  # type: ignore[arg-type]
    assert workspace_bound(LIMITS, "H200") == workspace_bound(LIMITS, PROFILES["h200"])


def test_page_tables_and_values_take_their_bytes() -> None:
    plain, more = workspace_bound(LIMITS, "h200"), workspace_bound(replace(LIMITS, max_num_pages=40, value_bytes=32), "h200")
    assert more.float_bytes == plain.float_bytes
    assert more.int_bytes == plain.int_bytes + 160 + 32


def test_plan_shapes_are_checked() -> None:
    with pytest.raises(ArgumentError, match=r"^num_qo_heads: got 30"):
        PlanShape(True, 30, 8, 128, 128)
    with pytest.raises(
        UnsupportedError, match=r"^head_dim: got 128 .head_dim_vo 64., supported are 64, 96, 128, 192 .with head_dim_vo 128., 256$"
    ):
        PlanShape(True, 32, 8, 128, 64)


@pytest.mark.parametrize("integer", [np.int8, np.uint8, np.int16, np.int32, np.int64])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_numpy_integers_are_numbers_of_any_size(kind: str, integer: Any) -> None:
    """Sums and products of limits go beyond what the limits themselves need."""

    def size(number: Any) -> Any:
        limits = WorkspaceLimits(
            kind, number(100), number(64), number(2), number(64), number(64), number(100), number(127), number(64),
            fixed_split_size=number(1), max_kv_len=number(127), value_bytes=number(120),
        )  # fmt: skip
        return workspace_bound(limits, "h200")

    assert size(integer) == size(int)


def test_numpy_integers_in_gpus_batches_and_shapes() -> None:
    i8 = np.int8
    profile = DeviceProfile("x", "sm_80", i8(100), np.int32(164 << 10), np.int32(163 << 10))  # type: ignore[arg-type]
    assert profile == DeviceProfile("x", "sm_80", 100, 164 << 10, 163 << 10)
    limits, narrow = BatchLimits(100, 120, 127), BatchLimits(i8(100), i8(120), i8(127))  # type: ignore[arg-type]
    shape = PlanShape(True, 64, 2, 64, 64, page_size=64, fixed_split_size=1)
    same = PlanShape(True, i8(64), i8(2), i8(64), i8(64), page_size=i8(64), fixed_split_size=i8(1))  # type: ignore[arg-type]
    for narrow_shape in (shape, same):
        assert bound(narrow_shape, narrow, profile, 100, 16) == bound(shape, limits, profile, 100, 16)


FAULTS: list[tuple[Any, dict[str, Any], str]] = [
    (WorkspaceLimits, {"disable_split_kv": "no"}, "disable_split_kv: got 'no', expected True or False"),
    (WorkspaceLimits, {"disable_split_kv": 1}, "disable_split_kv: got 1, expected True or False"),
    (WorkspaceLimits, {"kind": np.array(["decode", "prefill"])}, "kind: got "),
    (WorkspaceLimits, {"num_kv_heads": 2.0}, "num_kv_heads: got 2.0, expected an int"),
    (WorkspaceLimits, {"value_bytes": -1}, "value_bytes: got -1, must be at least 0"),
    (DeviceProfile, {"num_sms": "x"}, "num_sms: got 'x', expected an int"),
    (DeviceProfile, {"num_sms": 1.5}, "num_sms: got 1.5, expected an int"),
    (DeviceProfile, {"num_sms": 0}, "num_sms: got 0, must be at least 1"),
    (DeviceProfile, {"smem_per_cta": None}, "smem_per_cta: got None, expected an int"),
    (DeviceProfile, {"arch": 90}, "arch: got 90, expected a string"),
]


@pytest.mark.parametrize(("kind", "change", "message"), FAULTS)
def test_fields_of_another_kind_are_refused(kind: Any, change: dict[str, Any], message: str) -> None:
    if kind is WorkspaceLimits:
        good: dict[str, Any] = {"kind": "decode", "max_batch_size": 8, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    else:
        good = {"name": "x", "arch": "sm_80", "num_sms": 2, "smem_per_sm": 167936, "smem_per_cta": 166912}
    kind(**good)
    with pytest.raises((ArgumentError, ArgumentTypeError), match=f"^{re.escape(message)}"):
        kind(**{**good, **change})


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("num_bits", [1, 5, 129, 4096])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_bound_holds_for_bytes_of_masks_as_they_are(num_bits: int, sinks: bool, graph: bool) -> None:
    """A mask's bytes are no multiple of 16, what a plan reserves for it is one."""
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(backend="host", use_cuda_graph=graph)
    values = {"sinks": np.ones(6)} if sinks else {}
    size = wrapper.workspace_size([0, 1], [0, num_bits], 6, 6, 64, custom_mask=np.ones(num_bits, bool), **values)
    num_bytes = -(-num_bits // 8) + (32 if sinks else 0)
    largest = workspace_bound(WorkspaceLimits("prefill", 1, 6, 6, 64, max_num_qo_tokens=1, value_bytes=num_bytes), "host")
    assert size.int_bytes <= largest.int_bytes
    assert size.float_bytes <= largest.float_bytes
