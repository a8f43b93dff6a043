# SPDX-License-Identifier: Apache-2.0
"""`cupyinfer size` says what the wrappers and `workspace_bound` say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    DeviceProfile,
    WorkspaceLimits,
    workspace_bound,
)
from tests.cli.conftest import Cli
from tests.data.make_small_trace import TRACE

HEADS = (32, 8, 128)
PAGE_SIZE = 16


def paged(kv_lens: list[int], page_size: int = PAGE_SIZE) -> tuple[Any, Any, Any]:
    pages = [-(-length // page_size) for length in kv_lens]
    last = [length - (num - 1) * page_size if num else 0 for length, num in zip(kv_lens, pages, strict=True)]
    return np.cumsum([0, *pages]), np.arange(sum(pages), dtype=np.int32), np.array(last)


def as_dict(size: Any) -> dict[str, int]:
    return {"float_bytes": size.float_bytes, "int_bytes": size.int_bytes, "total_bytes": size.float_bytes + size.int_bytes}


def text(kv_lens: list[int]) -> str:
    return ",".join(map(str, kv_lens))


@pytest.mark.parametrize("flags", [{}, {"fixed_split_size": 4}, {"disable_split_kv": True}, {"kv_data_type": "float8_e4m3fn"}])
@pytest.mark.parametrize("kv_lens", [[1], [0, 17, 16], [8192, 1, 300, 300], [512] * 200])
@pytest.mark.parametrize("graph", [False, True])
def test_decode_batch(cli: Cli, kv_lens: list[int], flags: dict[str, Any], graph: bool) -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(profile="h200", use_cuda_graph=graph)
    expected = wrapper.workspace_size(*paged(kv_lens), *HEADS, PAGE_SIZE, q_data_type="bfloat16", **flags)
    argv = ["--fixed-split-size=4"] if "fixed_split_size" in flags else ["--disable-split-kv"] if "disable_split_kv" in flags else []
    argv += ["--kv-dtype", "e4m3"] if "kv_data_type" in flags else []
    done = cli("size", "--kv-lens", text(kv_lens), "--page-table", "host", "--json", *argv, *(["--cuda-graph"] if graph else []))
    assert done.code == 0
    assert done.data["exact"] == as_dict(expected)
    assert done.data["bound"]["float_bytes"] >= expected.float_bytes
    assert done.data["bound"]["int_bytes"] >= expected.int_bytes


@pytest.mark.parametrize("causal", [True, False])
def test_paged_prefill_batch(cli: Cli, causal: bool) -> None:
    kv_lens, qo_lens = [4096, 700, 33], [512, 700, 1]
    wrapper = BatchPrefillWithPagedKVCacheWrapper(profile="rtx4090")
    expected = wrapper.workspace_size(np.cumsum([0, *qo_lens]), *paged(kv_lens), *HEADS, PAGE_SIZE, causal=causal, q_data_type="float16")
    argv = ["--page-table", "host", "--dtype", "fp16", "--profile", "rtx4090", *([] if causal else ["--no-causal"])]
    done = cli("size", "--kv-lens", text(kv_lens), "--qo-lens", text(qo_lens), "--json", *argv)
    assert done.data["exact"] == as_dict(expected)
    assert done.data["bound"]["total_bytes"] >= expected.total_bytes


def test_ragged_prefill_batch(cli: Cli) -> None:
    lens = [1000, 3, 257]
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(profile="b200")
    expected = wrapper.workspace_size(np.cumsum([0, *lens]), np.cumsum([0, *lens]), *HEADS, causal=True, q_data_type="bfloat16")
    done = cli("size", "--kv-lens", text(lens), "--qo-lens", text(lens), "--ragged", "--profile", "b200", "--json")
    assert done.data["exact"] == as_dict(expected)


def test_device_page_tables_take_no_workspace(cli: Cli) -> None:
    on_device, on_host = (cli("size", "--kv-lens", "1600x10", "--page-table", where, "--json").data for where in ("device", "host"))
    assert on_host["exact"]["int_bytes"] == on_device["exact"]["int_bytes"] + 4 * 1000


def test_regions_fill_the_workspaces(cli: Cli) -> None:
    data = cli("size", "--kv-lens", "5000x3,7", "--page-table", "host", "--json").data
    for workspace in ("float", "int"):
        mapped = [region for region in data["regions"] if region["workspace"] == workspace]
        end = 0
        for region in mapped:
            assert region["offset"] >= end and region["offset"] % 16 == 0
            end = region["offset"] + region["bytes"]
        assert end == data["exact"][f"{workspace}_bytes"]


def test_text_has_the_map_and_the_bound(cli: Cli) -> None:
    out = cli("size", "--kv-lens", "5000x3,7").out
    for word in (
        "exact need",
        "bound for 4 requests",
        "fixed reserve",
        "tiles",
        "cta_work",
        "merge_groups",
        "partial_o",
        "partial_lse",
        "h200",
    ):
        assert word in out


def test_custom_gpu_and_repeats(cli: Cli) -> None:
    profile = DeviceProfile("custom", "sm_90a", 20, 228 * 1024, 227 * 1024)
    expected = BatchDecodeWithPagedKVCacheWrapper(profile=profile).workspace_size(*paged([9, 700, 700, 700]), *HEADS, PAGE_SIZE)
    done = cli("size", "--kv-lens", "9,700x3", "--num-sms", 20, "--arch", "sm_90a", "--page-table", "host", "--json")
    assert done.data["exact"] == as_dict(expected)


def test_limits(cli: Cli) -> None:
    decode = cli("size", "--max-batch-size", 256, "--json").data
    assert decode["bound"] == as_dict(workspace_bound(WorkspaceLimits("decode", 256, *HEADS), "h200"))
    prefill = cli("size", "--max-batch-size", 64, "--max-qo-tokens", 8192, "--json").data
    assert prefill["bound"] == as_dict(workspace_bound(WorkspaceLimits("prefill", 64, *HEADS, max_num_qo_tokens=8192), "h200"))
    assert "exact" not in decode and decode["regions"]


def test_values_of_another_width(cli: Cli) -> None:
    """Queries and keys of 192 go with values of 128 only."""
    wide = ("--head-dim", 192, "--head-dim-vo", 128)
    data = cli("size", "--kv-lens", "9,700x3", "--qo-lens", "9,70x3", *wide, "--json").data
    limits = WorkspaceLimits("prefill", 4, *HEADS[:2], 192, 128, max_num_qo_tokens=219)
    assert data["bound"] == as_dict(workspace_bound(limits, "h200"))
    assert data["exact"]["float_bytes"] <= data["bound"]["float_bytes"]
    assert "head_dim 192 (values 128), bfloat16" in cli("size", "--max-batch-size", 4, *wide).out
    assert cli("size", "--max-batch-size", 4, "--head-dim", 192).code == 2


def test_limits_widen_a_bound(cli: Cli) -> None:
    data = cli("size", "--kv-lens", "4096x2", "--max-batch-size", 300, "--json").data
    assert data["bound"] == as_dict(workspace_bound(WorkspaceLimits("decode", 300, *HEADS), "h200"))


def test_trace(cli: Cli) -> None:
    data = cli("size", TRACE, "--requests", 40, "--max-batch-size", 8, "--json").data
    for kind in ("prefill", "decode"):
        measured = data[kind]
        for field in ("float_bytes", "int_bytes"):
            values = [measured[name][field] for name in ("median", "p99", "peak", "bound")]
            assert values == sorted(values)
        assert measured["steps"] > 0
    assert data["requests"] == 40
