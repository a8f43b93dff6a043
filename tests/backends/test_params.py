# SPDX-License-Identifier: Apache-2.0
"""Numbers that kernels are given in another form than the host's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyinfer.backends.params import divisor

_LARGEST = 2**31 - 1


def _divide(dividend: int, by: int) -> int:
    """What `divide` of params.cuh computes, with its widths: 32 bits times 32 bits, the upper 32 bits, shifted."""
    multiplier, shift = by & 0xFFFFFFFF, by >> 32
    assert 0 <= shift < 32
    return ((dividend << 1) * multiplier >> 32) >> shift


@pytest.mark.parametrize("number", [*range(1, 130), *(2**k + e for k in range(7, 31) for e in (-1, 0, 1)), _LARGEST])
def test_division_is_exact_beside_every_kind_of_multiple(number: int) -> None:
    by = divisor(number)
    quotients = {1, 2, _LARGEST // number // 2, _LARGEST // number - 1, _LARGEST // number}
    for dividend in {0, _LARGEST, *(q * number + e for q in quotients for e in (-1, 0, 1))}:
        if 0 <= dividend <= _LARGEST:
            assert _divide(dividend, by) == dividend // number


@given(st.integers(0, _LARGEST), st.integers(1, _LARGEST))
def test_division_is_exact(dividend: int, number: int) -> None:
    assert _divide(dividend, divisor(number)) == dividend // number
