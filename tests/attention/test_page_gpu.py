# SPDX-License-Identifier: Apache-2.0
"""Appending on a GPU only: host index arrays, what is left out, graphs, arrays of two places."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cupyinfer.attention.page import append_paged_kv_cache
from cupyinfer.errors import ArgumentError, StateError
from tests.attention.homes import GpuHome
from tests.attention.test_page import Append, Case

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu


def test_host_indices_with_a_gpu_cache() -> None:
    append = Append(Case())
    rows, caches = [cupy.asarray(rows) for rows in append.rows], tuple(map(cupy.asarray, append.cache))
    append_paged_kv_cache(*rows, append.batch_indices, append.positions, caches, *append.metadata)
    for got, want in zip(caches, append.expected(), strict=True):
        np.testing.assert_array_equal(cupy.asnumpy(got).view(np.uint16), want)
    with pytest.raises(ArgumentError, match="kv_indices: entry 0 is page 99"):
        append_paged_kv_cache(*rows, append.batch_indices, append.positions, caches, np.full(9, 99, np.int32), *append.metadata[1:])


def test_tokens_out_of_range_on_the_gpu_touch_nothing() -> None:
    append = Append(Case())
    append.batch_indices[:4] = -1  # what the expected caches leave out, the GPU leaves out for the reasons below
    expected = append.expected()
    append.batch_indices[:4] = [4, 0, 1, 1]
    append.positions[:4] = [0, 4, 20, -1]
    for got, want in zip(append.run(GpuHome()), expected, strict=True):
        np.testing.assert_array_equal(got, want)


def test_append_in_a_graph() -> None:
    """Captured once for four tokens, replayed with other rows, other slots and padding."""
    put = GpuHome().put
    case = Case(append_lens=(4,), seq_lens=(10,))
    first = Append(case)
    second = Append(replace(case, seq_lens=(5,)), seed=2)
    second.batch_indices[3] = -1
    keys, values, batch_indices, positions = map(put, (*first.rows, first.batch_indices, first.positions))
    caches, metadata = tuple(map(put, first.cache)), list(map(put, first.metadata))
    append_paged_kv_cache(keys, values, batch_indices, positions, caches, *metadata)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        append_paged_kv_cache(keys, values, batch_indices, positions, caches, *metadata)
        with pytest.raises(StateError, match="batch_indices: is a host array"):
            append_paged_kv_cache(keys, values, first.batch_indices, positions, caches, *metadata)
        graph = stream.end_capture()
        targets = (keys, values, batch_indices, positions, *caches)
        for target, source in zip(targets, (*second.rows, second.batch_indices, second.positions, *first.cache), strict=True):
            target.set(source)
        graph.launch(stream)
    stream.synchronize()
    second.cache, second.kv_indices, second.kv_indptr = first.cache, first.kv_indices, first.kv_indptr
    for got, want in zip(caches, second.expected(), strict=True):
        np.testing.assert_array_equal(cupy.asnumpy(got).view(np.uint16), want)


def test_arrays_of_two_places_are_refused() -> None:
    append = Append(Case())
    with pytest.raises(ArgumentError, match="append_key: lies on cpu"):
        append_paged_kv_cache(
            *append.rows, append.batch_indices, append.positions, tuple(map(cupy.asarray, append.cache)), *append.metadata
        )
    with pytest.raises(ArgumentError, match="positions: lies on cuda"):
        append_paged_kv_cache(*append.rows, append.batch_indices, cupy.asarray(append.positions), append.cache, *append.metadata)


def test_append_on_a_gpu_that_is_not_current() -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two CUDA GPUs")
    append = Append(Case())
    with cupy.cuda.Device(1):
        arrays = [cupy.asarray(array) for array in (*append.rows, append.batch_indices, append.positions)]
        caches, metadata = tuple(map(cupy.asarray, append.cache)), list(map(cupy.asarray, append.metadata))
    assert cupy.cuda.runtime.getDevice() == 0
    append_paged_kv_cache(*arrays, caches, *metadata)
    assert cupy.cuda.runtime.getDevice() == 0
    for got, want in zip(caches, append.expected(), strict=True):
        np.testing.assert_array_equal(cupy.asnumpy(got).view(np.uint16), want)
