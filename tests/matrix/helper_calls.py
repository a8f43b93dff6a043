# SPDX-License-Identifier: Apache-2.0
"""Calls of the kernels around attention, small enough for a sanitizer: appends, their index arrays, merges."""

from __future__ import annotations

import numpy as np

from tests.attention import test_cascade as cascade
from tests.attention import test_page as page
from tests.attention.homes import GpuHome

_APPENDS = ("nhd", "one-array-hnd", "page-not-a-power-of-two", "e4m3", "keys-wider-than-values", "rows-of-3-bytes")
_GPU = GpuHome()


def _on_own_allocations() -> None:
    """Every array in a CUDA allocation of its own: in a pool's block, a read past one array finds the next."""
    import cupy

    cupy.cuda.set_allocator(None)


def appends() -> None:
    """Rows of every width, one array and two, padding tokens."""
    _on_own_allocations()
    for name in _APPENDS:
        page.Append(page.CASES[name]).check(_GPU)
    padded = page.Append(page.Case())
    padded.batch_indices[[0, 5]] = -1
    padded.check(_GPU)


def append_indices() -> None:
    """Batch indices, positions and sequence lengths."""
    _on_own_allocations()
    page.test_batch_indices_positions(_GPU, np.int32)
    page.test_batch_indices_positions(_GPU, np.int64)
    page.test_seq_lens(_GPU)


def merges() -> None:
    """Two states, several, any number per row; aligned rows and others."""
    _on_own_allocations()
    for head_dim in (65, 128):
        cascade.test_merge_state(_GPU, cascade.FLOAT16, head_dim)
    cascade.test_merge_states(_GPU, cascade.BFLOAT16, 5)
    cascade.test_any_number_of_states_per_row(_GPU, np.int32, "with-the-values")


HELPER_CALLS = (appends, append_indices, merges)
