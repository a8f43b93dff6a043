# SPDX-License-Identifier: Apache-2.0
"""What fa3 must serve on Hopper: a refusal here fails, where tests that take the `backend` fixture skip it."""

from __future__ import annotations

from typing import Any

import pytest

from cupyinfer.backends.device import current_device, read_profile
from cupyinfer.schedule.tiles import FA3_ARCH, FA3_CTA_TILE_Q, FA3_KV_TILES, fa3_tile_q
from tests.support.batches import Case
from tests.support.runner import run_case


def _needs_hopper() -> None:
    arch = read_profile(current_device()).arch
    if arch != FA3_ARCH:
        pytest.skip(f"fa3 runs on {FA3_ARCH} only, this GPU is {arch}")


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dims", FA3_KV_TILES, ids=str)
@pytest.mark.parametrize("op", ["paged", "ragged"])
def test_plain_prefill_is_served(op: str, head_dims: tuple[int, int], dtype: str, causal: bool) -> None:
    _needs_hopper()
    page_size = 16 if op == "paged" else 1
    run_case(Case((300, 150, 0, 7), (150, 100, 3, 7), op, head_dims=head_dims, dtype=dtype, causal=causal, page_size=page_size), "fa3")


@pytest.mark.gpu
@pytest.mark.parametrize("changed", [{}, {"window_left": 150}, {"sinks": True}, {"fixed_split_size": 128}, {"scales": "head"}], ids=str)
@pytest.mark.parametrize("heads", [(8, 2), (10, 2), (3, 3), (14, 2)], ids=str)
@pytest.mark.parametrize("op", ["paged", "ragged"])
def test_tiles_of_192_rows(op: str, heads: tuple[int, int], changed: dict[str, Any]) -> None:
    """Three consumers: groups that divide 192 and groups that do not, last tiles that leave one or two of them without rows."""
    _needs_hopper()
    page_size = 16 if op == "paged" else 1
    case = Case((1500, 700, 300, 40), (1200, 600, 190, 3), op, heads, (64, 64), page_size, dtype="bfloat16", causal=True, **changed)
    geometry_rows = [tokens * heads[0] // heads[1] for tokens in case.qo_lens or ()]
    assert fa3_tile_q(FA3_CTA_TILE_Q, lambda tile_q: sum(-(-rows // tile_q) for rows in geometry_rows)) == 192
    run_case(case, "fa3")


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["paged", "ragged"])
def test_parts_of_192_rows(op: str) -> None:
    """Few tiles of many keys, which CTAs share: three consumers write parts, and merge them together."""
    _needs_hopper()
    page_size = 16 if op == "paged" else 1
    run_case(Case((4096, 3000), (190, 40), op, (4, 1), (64, 64), page_size, dtype="float16", causal=True), "fa3")
