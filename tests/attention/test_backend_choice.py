# SPDX-License-Identifier: Apache-2.0
"""Which kernels serve a plan: fa3 where it is able, fa2 elsewhere, and a sentence for each refusal."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import cupyinfer
from cupyinfer.attention.backend_choice import choose_backend
from cupyinfer.attention.options import make_options
from cupyinfer.attention.prefill import paged_prefill_request, ragged_prefill_request
from cupyinfer.errors import UnsupportedError
from cupyinfer.schedule.planner import BatchLimits
from cupyinfer.schedule.profile import named_profile
from cupyinfer.schedule.tiles import fa3_box_rows
from cupyinfer.workspace import WorkspaceSize

PLAIN: dict[str, Any] = {"decode": False, "paged": True, "num_qo_heads": 8, "num_kv_heads": 2, "head_dim_qk": 128, "page_size": 16}


def choice(requested: str, arch: str = "sm_90a", custom_mask: bool = False, tile_q: int = 128, **changed: Any) -> str:
    return choose_backend(requested, make_options(**{**PLAIN, "q_data_type": "bfloat16", **changed}), arch, custom_mask, tile_q)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"causal": True},
        {"paged": False, "page_size": 1},
        {"q_data_type": "float16"},
        {"head_dim_qk": 64},
        {"head_dim_qk": 192, "head_dim_vo": 128},
        {"head_dim_qk": 256, "tile_q": 64},
        {"window_left": 100},
        {"logits_soft_cap": 30.0},
        {"pos_encoding_mode": "ALIBI"},
        {"page_size": 8},
        {"page_size": 256},
        {"page_size": 80},
        {"page_size": 320},
    ],
    ids=str,
)
def test_auto_takes_fa3_where_it_is_able(changed: dict[str, Any]) -> None:
    assert choice("auto", **changed) == "fa3"
    assert choice("fa3", **changed) == "fa3"
    assert choice("fa2", **changed) == "fa2"
    assert choice("host", **changed) == "fa2"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"arch": "sm_80"}, "runs on sm_90a only, this GPU is sm_80"),
        ({"arch": "sm_100"}, "runs on sm_90a only, this GPU is sm_100"),
        ({"decode": True}, "is for prefill"),
        ({"kv_data_type": "float8_e4m3fn"}, "needs a cache of the queries' type, got float8_e4m3fn for bfloat16 queries"),
        ({"custom_mask": True}, "has no custom masks"),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "does not rotate queries and keys"),
        ({"head_dim_qk": 96}, "has no tile for head_dim 96"),
        ({"page_size": 1}, "got 1"),
        ({"page_size": 5}, "needs pages of a multiple of 8 keys that divide 128 or 160 or are a multiple of it, got 5"),
        ({"page_size": 80, "logits_soft_cap": 30.0}, "that divide 128 or are a multiple of it, got 80"),
        ({"page_size": 80, "pos_encoding_mode": "ALIBI"}, "that divide 128 or are a multiple of it, got 80"),
        ({"page_size": 48}, "got 48"),
        ({"head_dim_qk": 256, "page_size": 96, "tile_q": 64}, "that divide 64 or are a multiple of it, got 96"),
    ],
    ids=str,
)
def test_what_fa3_refuses_goes_to_fa2(changed: dict[str, Any], reason: str) -> None:
    assert choice("auto", **changed) == "fa2"
    with pytest.raises(UnsupportedError, match=f"^backend: fa3 .*{re.escape(reason)}.*; take 'auto' or 'fa2'$"):
        choice("fa3", **changed)


FP8: dict[str, Any] = {"q_data_type": "float8_e4m3fn", "o_data_type": "bfloat16"}


@pytest.mark.parametrize(
    "changed", [{}, {"paged": False, "page_size": 1}, {"head_dim_qk": 64}, {"head_dim_qk": 256}, {"page_size": 64}], ids=str
)
@pytest.mark.parametrize("tile_q", [16, 128])
def test_fp8_queries_take_fa3_however_few(changed: dict[str, Any], tile_q: int) -> None:
    assert choice("auto", tile_q=tile_q, **FP8, **changed) == "fa3"
    assert choice("fa3", tile_q=tile_q, **FP8, **changed) == "fa3"
    assert choice("host", tile_q=tile_q, **FP8, **changed) == "fa2"  # the tiles that the host walks


@pytest.mark.parametrize(
    ("requested", "changed", "reason"),
    [
        ("fa2", {}, "fa2 takes float16 and bfloat16 queries"),
        ("auto", {"arch": "sm_89"}, "fa3 runs on sm_90a only, this GPU is sm_89"),
        ("auto", {"custom_mask": True}, "fa3 has no custom masks"),
        ("fa3", {"pos_encoding_mode": "ROPE_LLAMA"}, "fa3 does not rotate queries and keys"),
        ("auto", {"head_dim_qk": 96}, "fa3 has no tile for head_dim 96"),
        ("auto", {"page_size": 1}, "fa3 needs pages of a multiple of 8 keys"),
    ],
    ids=str,
)
def test_fp8_queries_that_nothing_serves_are_refused(requested: str, changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(
        UnsupportedError, match=f"^backend: {re.escape(reason)}.*; float8_e4m3fn queries are served by fa3 .* and by host alone$"
    ):
        choice(requested, **FP8, **changed)


def test_sizing_refuses_fp8_queries_where_no_kernel_serves_them() -> None:
    indptr = np.array([0, 100], np.int32)
    request = ragged_prefill_request(indptr, indptr, 8, 2, 128, **FP8)
    assert request.draft(named_profile("h200")).shape.backend == "fa3"
    with pytest.raises(UnsupportedError, match="this GPU is sm_80"):
        request.draft(named_profile("a100"))


@pytest.mark.parametrize("tile_q", [16, 64])
def test_few_rows_go_to_fa2_unless_fa3_is_asked_for(tile_q: int) -> None:
    assert choice("auto", tile_q=tile_q) == "fa2"
    assert choice("fa3", tile_q=tile_q) == "fa3"


@pytest.mark.parametrize(
    ("page_size", "kv_tile", "rows"), [(16, 128, 16), (128, 128, 128), (512, 128, 128), (16, 80, 16), (160, 80, 80), (24, 80, None)]
)
def test_boxes_tile_both_pages_and_tiles(page_size: int, kv_tile: int, rows: int | None) -> None:
    assert fa3_box_rows(page_size, kv_tile) == rows


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_a_bound_covers_both_backends(head_dims: tuple[int, int]) -> None:
    """Also where one object's batches go to fa2 and fa3 in turn."""
    profile = named_profile("h200")
    limits = cupyinfer.WorkspaceLimits(
        "prefill", 4, 8, 2, head_dims[0], head_dims[1], max_num_qo_tokens=700, max_kv_len=9000, fixed_split_size=None
    )
    bound = cupyinfer.workspace_bound(limits, profile)
    for lengths, kv_lengths in (((300, 1, 77), (9000, 5, 80)), ((3, 1), (9000, 9000)), ((64,), (9000,)), ((700,), (700,))):
        indptr = [np.concatenate([[0], np.cumsum(each)]).astype(np.int32) for each in (lengths, kv_lengths)]
        request = ragged_prefill_request(*indptr, 8, 2, head_dims[0], head_dim_vo=head_dims[1], causal=True, q_data_type="bfloat16")
        size: WorkspaceSize = request.draft(profile).size
        assert size.float_bytes <= bound.float_bytes and size.int_bytes <= bound.int_bytes


def test_a_graph_keeps_its_kernel() -> None:
    """The limits decide, not the batch at hand: every batch of one object takes the backend of the first."""
    profile, limits = named_profile("h200"), BatchLimits(4, 2000)
    backends = set()
    for rows in (1, 40, 500):
        pages = -(-rows // 16)
        args = [
            np.array([0, rows], np.int32),
            np.array([0, pages], np.int32),
            np.arange(pages, dtype=np.int32),
            np.array([(rows - 1) % 16 + 1], np.int32),
        ]
        request = paged_prefill_request(*args, 8, 2, 128, 16, causal=True, q_data_type="bfloat16")
        object.__setattr__(request, "graph_limits", limits)
        backends.add(request.draft(profile).shape.backend)
    assert backends == {"fa3"}


@pytest.mark.parametrize(
    ("qo_lens", "num_qo_heads", "changed", "rows"),
    [
        ((1024,) * 16, 8, {}, 256),
        ((1000, 37, 210) * 4, 10, {}, 256),  # a group of 5 divides no tile
        ((48,) * 80, 8, {}, 192),  # one full tile of 192 rows, or one and a half of 128
        ((64,) * 80, 8, {}, 256),
        ((64,) * 16, 2, {}, 128),  # a quarter of a tile of 256 rows
        ((1000, *(3,) * 80), 8, {}, 128),
        ((2000, *(3,) * 8) * 4, 8, {}, 192),
        ((512,) * 4, 8, {}, 128),  # 64 units of 256 rows would leave half of the SMs idle
        ((768,) * 4, 8, {}, 192),
        ((64,) * 16, 2, {"disable_split_kv": True}, 256),  # must not look at the batch
        ((1024,) * 16, 8, {"q_data_type": "float8_e4m3fn", "o_data_type": "bfloat16"}, 192),
        ((1024,) * 16, 8, {"logits_soft_cap": 30.0}, 128),
        ((1024,) * 16, 8, {"pos_encoding_mode": "ALIBI"}, 128),
        ((1024,) * 16, 8, {"head_dim": 128}, 128),
    ],
)
def test_rows_per_fa3_tile(qo_lens: tuple[int, ...], num_qo_heads: int, changed: dict[str, Any], rows: int) -> None:
    """192 or 256 rows where head_dim 64 gains more from them than it loses to padding; the size is that of the plan."""
    profile = named_profile("h200")
    options = {"head_dim": 64, "q_data_type": "bfloat16", **changed}
    indptr = np.concatenate([[0], np.cumsum(qo_lens)]).astype(np.int32)
    head_dim = options.pop("head_dim")
    request = ragged_prefill_request(indptr, indptr, num_qo_heads, 2, head_dim, causal=True, **options)
    object.__setattr__(request, "backend", "fa3")
    draft = request.draft(profile)
    assert draft.schedule.config.cta_tile_q == rows
    assert draft.schedule.tiles[:, 3].max() <= rows
    limits = cupyinfer.WorkspaceLimits("prefill", len(qo_lens), num_qo_heads, 2, head_dim, max_num_qo_tokens=sum(qo_lens))
    bound = cupyinfer.workspace_bound(limits, profile)
    assert draft.size.float_bytes <= bound.float_bytes and draft.size.int_bytes <= bound.int_bytes


@pytest.mark.parametrize(("limits", "rows"), [(BatchLimits(4, 4000), 256), (BatchLimits(200, 4000), 128)], ids=["few", "many"])
def test_a_graph_keeps_its_rows(limits: BatchLimits, rows: int) -> None:
    for tokens in (4, 4000):
        indptr = np.array([0, tokens], np.int32)
        request = ragged_prefill_request(indptr, indptr, 8, 2, 64, q_data_type="bfloat16")
        object.__setattr__(request, "backend", "fa3")
        object.__setattr__(request, "graph_limits", limits)
        draft = request.draft(named_profile("h200"))
        assert draft.schedule.config.cta_tile_q == rows and draft.size == request.draft(named_profile("h200")).size
