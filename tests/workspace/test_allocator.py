# SPDX-License-Identifier: Apache-2.0
"""The allocator: counting equals placing, and one byte less than counted fails, naming everything, and changes nothing."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyinfer.errors import ArgumentError, ArgumentTypeError, CupyInferError, StateError, WorkspaceError
from cupyinfer.workspace import WORKSPACE_ALIGNMENT, AlignedAllocator, WorkspaceSize, check_alignment

Bytes = npt.NDArray[np.uint8]

#: Sizes and alignments of consecutive regions.
Regions = list[tuple[int, int]]
regions = st.lists(st.tuples(st.integers(0, 300), st.sampled_from([1, 2, 4, 8, 16, 32, 64, 256])), max_size=12)


def aligned_bytes(count: int, alignment: int = 256, past: int = 0) -> Bytes:
    """`count` zero bytes that begin `past` bytes past a multiple of `alignment`."""
    block = np.zeros(count + past + alignment, np.uint8)
    begin = -block.ctypes.data % alignment + past
    return block[begin : begin + count]


def allocate(allocator: AlignedAllocator, regions: Regions) -> list[int]:
    return [allocator.aligned_alloc_offset(size, alignment, f"region {i}") for i, (size, alignment) in enumerate(regions)]


@given(regions=regions)
def test_counting_equals_placing(regions: Regions) -> None:
    counting = AlignedAllocator()
    offsets = allocate(counting, regions)
    placing = AlignedAllocator(aligned_bytes(counting.num_allocated_bytes))
    assert allocate(placing, regions) == offsets
    assert placing.num_allocated_bytes == counting.num_allocated_bytes


@given(size=st.integers(0, 300), before=st.integers(0, 40), missing=st.integers(-40, 400))
def test_reserving_gives_what_allocating_gives(size: int, before: int, missing: int) -> None:
    buffer = aligned_bytes(max(before, before + 16 + size - missing))
    checking, reserving = AlignedAllocator(buffer), AlignedAllocator(buffer)
    for allocator in (checking, reserving):
        allocator.aligned_alloc_offset(before, 1, "before")
    try:
        expected = checking.aligned_alloc_offset(size, 16, "region")
    except WorkspaceError:
        expected = -1
    assert reserving.reserve(size) == expected
    assert reserving.num_allocated_bytes == checking.num_allocated_bytes
    reserving.clear()
    assert reserving.num_allocated_bytes == 0


@given(regions=regions)
def test_offsets_are_aligned_disjoint_and_tight(regions: Regions) -> None:
    allocator, end = AlignedAllocator(), 0
    for size, alignment in regions:
        offset = allocator.aligned_alloc_offset(size, alignment, "region")
        assert offset % alignment == 0
        assert end <= offset < end + alignment
        end = offset + size
        assert allocator.num_allocated_bytes == end


@given(regions=regions, last=st.tuples(st.integers(1, 300), st.sampled_from([1, 2, 4, 8, 16, 64])))
def test_one_byte_short_overflows_and_changes_nothing(regions: Regions, last: tuple[int, int]) -> None:
    counting = AlignedAllocator()
    allocate(counting, [*regions, last])
    needed = counting.num_allocated_bytes
    placing = AlignedAllocator(aligned_bytes(needed - 1), "float_workspace_buffer")
    allocate(placing, regions)
    before = placing.num_allocated_bytes
    size, alignment = last
    offset = -(-before // alignment) * alignment
    with pytest.raises(WorkspaceError) as caught:
        placing.aligned_alloc_offset(size, alignment, "partial_o")
    assert str(caught.value) == (
        f"float_workspace_buffer is too small for region partial_o: {size} bytes aligned to {alignment} at offset {offset} "
        f"need {needed} bytes, the buffer has {needed - 1} ({max(0, needed - 1 - offset)} left)"
    )
    assert placing.num_allocated_bytes == before
    assert placing.aligned_alloc_offset(needed - 1 - before, 1, "the rest") == before


def test_overflow_is_a_value_error_of_the_library() -> None:
    with pytest.raises(ValueError, match="too small for region tiles") as caught:
        AlignedAllocator(aligned_bytes(15)).aligned_alloc(16, 16, "tiles")
    assert isinstance(caught.value, CupyInferError)


@given(regions=regions)
def test_views_alias_the_buffer_at_their_offsets(regions: Regions) -> None:
    counting = AlignedAllocator()
    offsets = allocate(counting, regions)
    buffer = aligned_bytes(counting.num_allocated_bytes)
    allocator = AlignedAllocator(buffer)
    for i, ((size, alignment), offset) in enumerate(zip(regions, offsets, strict=True)):
        view = allocator.aligned_alloc(size, alignment, "region")
        assert (view.dtype, view.shape) == (np.uint8, (size,))
        view[:] = i + 1
        assert (buffer[offset : offset + size] == i + 1).all()
        assert np.count_nonzero(buffer == i + 1) == size


@pytest.mark.parametrize("dtype", [np.int8, np.float16, ml_dtypes.bfloat16, np.float32, np.int64, np.complex128])
@pytest.mark.parametrize("shape", [(48,), (4, 12), (2, 2, 12)])
def test_buffers_of_any_dtype_and_shape(dtype: Any, shape: tuple[int, ...]) -> None:
    itemsize = np.dtype(dtype).itemsize
    buffer = aligned_bytes(48 * itemsize).view(dtype).reshape(shape)
    allocator = AlignedAllocator(buffer)
    view = allocator.aligned_alloc(48 * itemsize, 16, "all")
    view[:] = 0x7F
    assert (buffer.view(np.uint8) == 0x7F).all()
    with pytest.raises(WorkspaceError):
        allocator.aligned_alloc(1, 1, "more")


@pytest.mark.parametrize("past", range(1, WORKSPACE_ALIGNMENT))
def test_unaligned_buffers_are_refused(past: int) -> None:
    buffer = aligned_bytes(64, past=past)
    with pytest.raises(
        WorkspaceError, match=rf"^int_workspace_buffer: begins {past} bytes past a multiple of 16, it needs 16-byte alignment$"
    ):
        AlignedAllocator(buffer, "int_workspace_buffer")
    with pytest.raises(WorkspaceError, match="int_workspace_buffer"):
        check_alignment(buffer, "int_workspace_buffer")


def test_a_region_may_need_more_than_the_buffer_promises() -> None:
    allocator = AlignedAllocator(aligned_bytes(1024, past=16), "float")
    with pytest.raises(WorkspaceError, match="float: region wide needs 256-byte alignment"):
        allocator.aligned_alloc_offset(8, 256, "wide")
    assert allocator.num_allocated_bytes == 0
    assert allocator.aligned_alloc_offset(8, 16, "narrow") == 0


def test_strided_buffers_are_refused() -> None:
    with pytest.raises(WorkspaceError, match="strided"):
        AlignedAllocator(aligned_bytes(64)[::2])
    with pytest.raises(WorkspaceError, match="strided"):
        AlignedAllocator(aligned_bytes(64).reshape(8, 8).T)


def test_zero_sizes() -> None:
    empty = np.empty(0, np.float32)
    check_alignment(empty, "empty")
    for allocator in (AlignedAllocator(), AlignedAllocator(empty)):
        assert allocator.aligned_alloc_offset(0, 16, "nothing") == 0
        assert allocator.num_allocated_bytes == 0
    allocator = AlignedAllocator(aligned_bytes(16))
    assert allocator.aligned_alloc_offset(3, 1, "three") == 0
    assert allocator.aligned_alloc_offset(0, 16, "nothing") == 16
    with pytest.raises(WorkspaceError, match="region one"):
        allocator.aligned_alloc_offset(1, 1, "one")


def test_counting_has_no_memory() -> None:
    allocator = AlignedAllocator(name="float")
    with pytest.raises(StateError, match="float: a counting allocator has no memory to return for region partial_o"):
        allocator.aligned_alloc(16, 16, "partial_o")
    assert allocator.num_allocated_bytes == 0


@pytest.mark.parametrize(
    ("size", "alignment", "message"), [(-1, 16, "-1 bytes"), (8, 0, "alignment 0"), (8, 12, "alignment 12"), (8, -16, "alignment -16")]
)
def test_senseless_regions(size: int, alignment: int, message: str) -> None:
    for allocator in (AlignedAllocator(), AlignedAllocator(aligned_bytes(64))):
        with pytest.raises(ArgumentError, match=f"tiles: .*{message}"):
            allocator.aligned_alloc_offset(size, alignment, "tiles")
        assert allocator.num_allocated_bytes == 0


def test_counting_has_no_limit() -> None:
    allocator = AlignedAllocator()
    allocator.aligned_alloc_offset(2**40, 16, "huge")
    assert allocator.aligned_alloc_offset(1, 16, "after") == 2**40


def test_workspace_size_is_a_pair() -> None:
    float_bytes, int_bytes = size = WorkspaceSize(float_bytes=48, int_bytes=16)
    assert (float_bytes, int_bytes, size.total_bytes) == (48, 16, 64)
    assert size == (48, 16)


@pytest.mark.parametrize("buffer", ["x", [1], b"xx", 3, object()])
def test_what_is_no_buffer_is_refused(buffer: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^floats: got \w+, expected a NumPy or CuPy array or None"):
        AlignedAllocator(buffer, "floats")


@pytest.mark.parametrize(("size", "alignment"), [(1.5, 16), ("a", 16), (None, 16), (True, 16), (16, 16.0), (16, "16"), (16, True)])
def test_sizes_that_are_no_integers_are_refused_and_change_nothing(size: Any, alignment: Any) -> None:
    allocator = AlignedAllocator(aligned_bytes(64))
    with pytest.raises(ArgumentTypeError, match=r"^x: got .* as (size|alignment), expected an int"):
        allocator.aligned_alloc_offset(size, alignment, "x")
    assert allocator.aligned_alloc_offset(64, 16, "y") == 0


def test_numpy_integers_do_not_overflow() -> None:
    allocator = AlignedAllocator()
    assert [allocator.aligned_alloc_offset(np.int8(100), np.int8(16), "x") for _ in range(3)] == [0, 112, 224]  # type: ignore[arg-type]
    assert type(allocator.num_allocated_bytes) is int
