# SPDX-License-Identifier: Apache-2.0
"""Plans as values: the vector layout is pinned, survives the round trip, and other vectors are refused."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyinfer.errors import ArgumentError
from cupyinfer.schedule.plan_info import VECTOR_VERSION, DecodePlanInfo, PlanInfo, PrefillPlanInfo
from tests.schedule.batches import Case, cases
from tests.schedule.simulator import place

#: Entries of the vector form after version and kind. A change here is a new VECTOR_VERSION.
LAYOUT = [
    "num_requests",
    "num_qo_tokens",
    "num_kv_entries",
    "num_ctas",
    "cta_tile_q",
    "kv_tile",
    "num_tiles",
    "num_merge_groups",
    "num_partial_rows",
    "unit_step",
    "cuda_graph",
    "tiles_offset",
    "cta_work_offset",
    "merge_groups_offset",
    "page_indices_offset",
    "values_offset",
    "partial_o_offset",
    "partial_lse_offset",
    "float_bytes",
    "int_bytes",
]


@pytest.mark.parametrize(("kind", "number"), [(DecodePlanInfo, 1), (PrefillPlanInfo, 2)])
def test_vector_layout_is_pinned(kind: type[PlanInfo], number: int) -> None:
    assert VECTOR_VERSION == 2
    assert [entry.name for entry in fields(kind)] == LAYOUT
    vector = kind(**{name: 100 + i for i, name in enumerate(LAYOUT)}).to_vector()
    assert vector.dtype == np.int64
    assert vector.tolist() == [2, number, *range(100, 120)]


@given(kind=st.sampled_from([DecodePlanInfo, PrefillPlanInfo]), values=st.lists(st.integers(-1, 2**63 - 1), min_size=20, max_size=20))
def test_vector_round_trip(kind: type[PlanInfo], values: list[int]) -> None:
    info = kind(*values)
    again = PlanInfo.from_vector(info.to_vector())
    assert type(again) is kind
    assert again == info
    assert all(type(getattr(again, name)) is int for name in LAYOUT)


@given(case=cases(max_qo=20, max_kv=300))
def test_plans_hold_plain_integers_and_survive_the_round_trip(case: Case) -> None:
    info = place(case.draft()).info
    assert isinstance(info, DecodePlanInfo if case.kind == "decode" else PrefillPlanInfo)
    assert all(type(getattr(info, name)) is int for name in LAYOUT)
    assert PlanInfo.from_vector(info.to_vector()) == info


def good() -> Any:
    return DecodePlanInfo(*range(20)).to_vector()


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        (good()[:-1], r"shape \(21,\), expected int64 of shape \(22,\)"),
        (np.append(good(), 0), r"shape \(23,\)"),
        (good().reshape(1, -1), r"shape \(1, 22\)"),
        (good().astype(np.int32), "int32"),
        (good().astype(np.float64), "float64"),
        (np.where(np.arange(22) == 0, 1, good()), "version 1, this library reads version 2"),
        (np.where(np.arange(22) == 1, 0, good()), r"kind 0 is none of \[1, 2\]"),
        (np.where(np.arange(22) == 1, 3, good()), "kind 3"),
        ([], "shape"),
    ],
)
def test_other_vectors_are_refused(vector: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^plan_info: .*{message}"):
        PlanInfo.from_vector(vector)


def test_frozen_printable_and_hashable() -> None:
    info = DecodePlanInfo(*range(20))
    with pytest.raises(FrozenInstanceError):
        info.num_ctas = 5  # type: ignore[misc]
    assert repr(info).startswith("DecodePlanInfo(num_requests=0, num_qo_tokens=1, ")
    assert hash(info) == hash(DecodePlanInfo(*range(20)))
    assert info != PrefillPlanInfo(*range(20))
