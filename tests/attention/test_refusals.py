# SPDX-License-Identifier: Apache-2.0
"""What a stranger may try: overlapping workspaces, numbers without bounds, GPU backends where there is no GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyinfer import ArgumentError, BackendUnavailable, BatchDecodeWithPagedKVCacheWrapper, WorkspaceError
from cupyinfer.backends.device import has_gpu

BATCH: dict[str, Any] = {
    "indptr": [0, 9],
    "indices": range(9),
    "last_page_len": [3],
    "num_qo_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 64,
    "page_size": 16,
}


@pytest.mark.parametrize(("float_part", "int_part"), [((0, 4096), (0, 4096)), ((0, 2048), (1024, 4096)), ((1024, 4096), (0, 2048))])
def test_workspaces_that_share_memory_are_refused(float_part: tuple[int, int], int_part: tuple[int, int]) -> None:
    memory = np.zeros(4096 + 16, np.uint8)
    memory = memory[-memory.ctypes.data % 16 :][:4096]
    with pytest.raises(WorkspaceError, match=r"^int_workspace_buffer: shares memory with float_workspace_buffer"):
        BatchDecodeWithPagedKVCacheWrapper(memory[slice(*float_part)], memory[slice(*int_part)], backend="host")


def test_neighbouring_workspaces_are_fine() -> None:
    memory = np.zeros(65536 + 16, np.uint8)
    memory = memory[-memory.ctypes.data % 16 :][:65536]
    wrapper = BatchDecodeWithPagedKVCacheWrapper(memory[:49152], memory[49152:], backend="host")
    wrapper.plan(**BATCH)
    assert wrapper.plan_info.num_requests == 1


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("page_size", 2**62),
        ("window_left", 2**70),
        ("sm_scale", 10**400),
        ("logits_soft_cap", 10**400),
        ("head_dim", 2**40),
        ("num_qo_heads", 2**33),
    ],
)
def test_numbers_without_bounds_are_refused(argument: str, value: int) -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(backend="host")
    with pytest.raises(ArgumentError, match=f"^{argument}: got "):
        wrapper.workspace_size(**{**BATCH, argument: value})


@pytest.mark.skipif(has_gpu(), reason="is about machines without a GPU")
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_gpu_backends_without_a_gpu(backend: str) -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(backend=backend)
    with pytest.raises(BackendUnavailable, match=r"^no CUDA GPU is visible through CuPy"):
        wrapper.workspace_size(**BATCH)
    with pytest.raises(BackendUnavailable, match=r"^no CUDA GPU is visible through CuPy"):
        wrapper.plan(**BATCH)
    if backend == "fa2":
        named = BatchDecodeWithPagedKVCacheWrapper(backend=backend, profile="h100")
        assert named.workspace_size(**BATCH).int_bytes > 0
