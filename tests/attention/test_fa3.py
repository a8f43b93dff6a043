# SPDX-License-Identifier: Apache-2.0
"""What fa3 must serve on Hopper: a refusal here fails, where tests that take the `backend` fixture skip it."""

from __future__ import annotations

import pytest

from cupyinfer.backends.device import current_device, read_profile
from cupyinfer.schedule.tiles import FA3_ARCH, FA3_TILES
from tests.support.batches import Case
from tests.support.runner import run_case


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dims", FA3_TILES, ids=str)
@pytest.mark.parametrize("op", ["paged", "ragged"])
def test_plain_prefill_is_served(op: str, head_dims: tuple[int, int], dtype: str, causal: bool) -> None:
    arch = read_profile(current_device()).arch
    if arch != FA3_ARCH:
        pytest.skip(f"fa3 runs on {FA3_ARCH} only, this GPU is {arch}")
    page_size = 16 if op == "paged" else 1
    run_case(Case((300, 150, 0, 7), (150, 100, 3, 7), op, head_dims=head_dims, dtype=dtype, causal=causal, page_size=page_size), "fa3")
