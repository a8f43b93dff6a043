# SPDX-License-Identifier: Apache-2.0
"""What plans keep between each other: checked options and records to copy from, never mixed up, and bounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyinfer
from cupyinfer.attention import options as options_module
from cupyinfer.attention.options import MAX_KEPT_OPTIONS, make_options
from cupyinfer.errors import ArgumentError, ArgumentTypeError
from cupyinfer.schedule import counting as counting_module
from cupyinfer.schedule.counting import counting
from cupyinfer.schedule.partition import whole_units_only

BASE: dict[str, Any] = {"decode": True, "paged": True, "num_qo_heads": 8, "num_kv_heads": 2, "head_dim_qk": 64, "page_size": 1}


def test_equal_arguments_are_checked_once() -> None:
    assert make_options(**BASE) is make_options(**BASE)


@pytest.mark.parametrize(
    "changes",
    [
        {"decode": False},
        {"paged": False},
        {"num_qo_heads": 4},
        {"num_kv_heads": 4},
        {"head_dim_qk": 128},
        {"head_dim_qk": 192, "head_dim_vo": 128},
        {"page_size": 16},
        {"q_data_type": "bfloat16"},
        {"kv_data_type": "float8_e5m2"},
        {"decode": False, "causal": True},
        {"window_left": 5},
        {"sm_scale": 0.5},
        {"logits_soft_cap": 30.0},
        {"pos_encoding_mode": "ALIBI"},
        {"rope_scale": 2.0},
        {"rope_theta": 5e5},
        {"fixed_split_size": 4},
        {"disable_split_kv": True},
    ],
)
def test_every_argument_tells_options_apart(changes: dict[str, Any]) -> None:
    first, other = make_options(**BASE), make_options(**{**BASE, **changes})
    assert first != other
    for name, value in changes.items():
        field = {"q_data_type": "q_dtype", "kv_data_type": "kv_dtype"}.get(name, name)
        assert getattr(other, field) == value


@pytest.mark.parametrize(
    "changes", [{"page_size": True}, {"page_size": 1.0}, {"num_kv_heads": 2.0}, {"window_left": True}, {"decode": False, "causal": 0}]
)
def test_an_equal_value_of_a_wrong_type_is_refused_even_after_the_right_one(changes: dict[str, Any]) -> None:
    """1 == True == 1.0, and they hash alike."""
    right = {name: int(value) if name != "causal" else bool(value) for name, value in changes.items() if name != "decode"}
    make_options(**{**BASE, **changes, **right})
    with pytest.raises(ArgumentTypeError, match=next(name for name in changes if name != "decode")):
        make_options(**{**BASE, **changes})


def test_arguments_that_cannot_be_hashed_are_still_checked() -> None:
    with pytest.raises(ArgumentTypeError, match="page_size: got \\[16\\]") as caught:
        make_options(**{**BASE, "page_size": [16]})
    assert caught.value.__context__ is None
    with pytest.raises(ArgumentError, match="page_size: got 0"):
        make_options(**{**BASE, "page_size": 0})


def test_the_number_of_kept_options_is_bounded() -> None:
    for window in range(MAX_KEPT_OPTIONS + 40):
        make_options(**BASE, window_left=window)
    info = options_module.make_options.kept.cache_info()  # type: ignore[attr-defined]
    assert info.currsize == info.maxsize == MAX_KEPT_OPTIONS


def test_two_wrappers_with_other_options_share_nothing() -> None:
    """Plans in turn give what each gives alone."""
    indptr, indices, last = np.array([0, 300, 500]), np.arange(500, dtype=np.int32), np.array([16, 2])

    def size(**changes: Any) -> Any:
        wrapper = cupyinfer.BatchDecodeWithPagedKVCacheWrapper(profile="h200")
        return wrapper.workspace_size(indptr, indices, last, 8, 2, 64, 16, **changes)

    alone = [size(), size(fixed_split_size=1), size(disable_split_kv=True)]
    for _ in range(2):
        assert [size(), size(fixed_split_size=1), size(disable_split_kv=True)] == alone
    assert len(set(alone)) > 1


def test_records_to_copy_from_stay_as_they_are() -> None:
    first = whole_units_only(6, 4)
    with pytest.raises(ValueError, match="read-only"):
        first[:] = 77
    assert whole_units_only(6, 4).tolist() == [[4, 0, 0, 0, -1, -1, -1, -1]] * 6
    assert whole_units_only(6, 0).tolist() == [[0, 0, 0, 0, -1, -1, -1, -1]] * 6


def test_counting_is_read_only_and_keeps_no_huge_sequence() -> None:
    numbers = counting(10)
    assert numbers.tolist() == list(range(10))
    with pytest.raises(ValueError, match="read-only"):
        numbers[0] = 5
    huge = counting(200_000)
    assert huge[-1] == 199_999 and len(huge) == 200_000
    assert len(counting_module._kept) <= 1 << 16
