# SPDX-License-Identifier: Apache-2.0
"""The host backend behind a plan: workspaces and arrays as NumPy views, handed to run_host."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupyinfer.backends.arrays import RunArrays, RunScales
from cupyinfer.backends.host import run_host
from cupyinfer.backends.host_segment import HostProblem
from cupyinfer.dtypes import numpy_dtype
from cupyinfer.interop import ArrayView, numpy_array
from cupyinfer.schedule.partition import CTA_INTS, GROUP_INTS
from cupyinfer.schedule.plan_info import PlanInfo
from cupyinfer.schedule.tiling import TILE_INTS


class HostLauncher:
    """A plan that NumPy executes out of the caller's workspaces.

    Args:
        info: the plan.
        float_workspace: the float workspace as uint8, at least `info.float_bytes` long.
        int_workspace: the int workspace as uint8, already holding the plan's records.
        options: further fields of HostProblem that do not change between runs.
        q_dtype: element type of queries.
        kv_dtype: element type of the cache.
        heads_first: the cache's layout is HND.
        head_dim_vo: width of a row of partial results.
    """

    def __init__(
        self,
        info: PlanInfo,
        float_workspace: npt.NDArray[np.uint8],
        int_workspace: npt.NDArray[np.uint8],
        options: dict[str, Any],
        q_dtype: str,
        kv_dtype: str,
        heads_first: bool,
        head_dim_vo: int,
    ) -> None:
        self._q_dtype = numpy_dtype(q_dtype)
        self._kv_dtype = numpy_dtype(kv_dtype)
        self._heads_first = heads_first

        def records(offset: int, count: int, width: int) -> npt.NDArray[np.int32]:
            return int_workspace[offset : offset + 4 * count * width].view(np.int32).reshape(count, width)

        def partial(offset: int, width: int) -> npt.NDArray[np.float32]:
            return float_workspace[offset : offset + 4 * info.num_partial_rows * width].view(np.float32)

        self._fixed: dict[str, Any] = {
            "tiles": records(info.tiles_offset, info.num_tiles, TILE_INTS),
            "cta_work": records(info.cta_work_offset, info.num_ctas, CTA_INTS),
            "merge_groups": records(info.merge_groups_offset, info.num_merge_groups, GROUP_INTS),
            "partial_o": partial(info.partial_o_offset, head_dim_vo).reshape(-1, head_dim_vo),
            "partial_lse": partial(info.partial_lse_offset, 1),
            "cta_tile_q": info.cta_tile_q,
            "kv_tile": info.kv_tile,
            "unit_step": info.unit_step,
            **options,
        }

    def launch(self, arrays: RunArrays, scales: RunScales) -> None:
        """Run the plan now."""
        run_host(
            HostProblem(
                q=_as_type(arrays.q, self._q_dtype),
                k=self._cache(arrays.k),
                v=self._cache(arrays.v),
                o=numpy_array(arrays.o),
                lse=None if arrays.lse is None else numpy_array(arrays.lse),
                sm_scale=scales.sm_scale,
                k_scale=_scale(scales.k_scale),
                v_scale=_scale(scales.v_scale),
                q_scale=None if scales.q_scale is None else numpy_array(scales.q_scale),
                **self._fixed,
            )
        )

    def _cache(self, view: ArrayView) -> npt.NDArray[Any]:
        cache = _as_type(view, self._kv_dtype)
        return cache.swapaxes(-3, -2) if self._heads_first else cache


def _as_type(view: ArrayView, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The array, whose fp8 elements may be called uint8."""
    array = numpy_array(view)
    return array if array.dtype == dtype else array.view(dtype)


def _scale(scale: float | ArrayView) -> Any:
    return numpy_array(scale) if isinstance(scale, ArrayView) else scale
