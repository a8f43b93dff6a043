# SPDX-License-Identifier: Apache-2.0
"""What a run need not check since another one did: never a batch, an address, or a layout that differs in anything."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyinfer
from cupyinfer.attention.options import AttentionOptions, make_options
from cupyinfer.attention.run_arrays import ArrayChecker, PlanMemories, cache_views
from cupyinfer.backends.arrays import RunArrays
from cupyinfer.errors import ArgumentError, StateError
from cupyinfer.interop import CPU_DEVICE, Device, cuda_device
from cupyinfer.schedule.plan_info import DecodePlanInfo

cupy = pytest.importorskip("cupy")

BF16 = np.dtype(ml_dtypes.bfloat16)
GPU = cuda_device(0)
BATCH, HEADS, KV_HEADS, DIM, PAGES, PAGE = 3, 8, 2, 64, 10, 16
#: Nothing is read: a run's arrays are checked by what they say of themselves.
PLACES = {"q": 1 << 40, "k": 2 << 40, "v": 3 << 40, "out": 4 << 40}
WORKSPACES: PlanMemories = (5 << 40, (5 << 40) + 100, "float"), (6 << 40, (6 << 40) + 100, "int")


@dataclass(frozen=True)
class Array:
    """A CuPy array without memory behind it."""

    shape: tuple[int, ...]
    at: int
    dtype: np.dtype[Any] = BF16
    strides: tuple[int, ...] | None = None
    device: int = 0

    def made(self) -> Any:
        memory = cupy.cuda.UnownedMemory(self.at, 1 << 30, None, self.device)
        return cupy.ndarray(self.shape, self.dtype, cupy.cuda.MemoryPointer(memory, 0), self.strides)


def given(**changes: Array) -> dict[str, Array]:
    cache = (PAGES, PAGE, KV_HEADS, DIM)
    shapes = {"q": (BATCH, HEADS, DIM), "k": cache, "v": cache, "out": (BATCH, HEADS, DIM)}
    return {name: Array(shape, PLACES[name]) for name, shape in shapes.items()} | changes


def made(arrays: dict[str, Array]) -> tuple[Any, Any, Any, Any]:
    q, k, v, out = (array.made() for array in arrays.values())
    return q, k, v, out


def options() -> AttentionOptions:
    """Not the ones that are kept, so that no other test has left anything in them."""
    kept = make_options(True, True, HEADS, KV_HEADS, DIM, None, PAGE, "bfloat16")
    return replace(kept, sm_scale=kept.sm_scale)


def checker(of: AttentionOptions, batch: int = BATCH, max_page: int = PAGES - 1, device: Device = GPU, layout: str = "NHD") -> ArrayChecker:
    info = DecodePlanInfo(batch, batch, PAGES, 1, 16, 64, batch, 0, 0, 1, 0, *[0] * 9)
    return ArrayChecker(of, info, layout, device, max_page, WORKSPACES)


def check(one: ArrayChecker, q: Any, cache: Any, out: Any) -> RunArrays:
    """What an ordinary run does before its launch."""
    return one.check(q, *cache_views(cache, "NHD"), out, None, False)[0]


def checked(one: ArrayChecker, arrays: dict[str, Array]) -> RunArrays:
    """And after it."""
    q, k, v, out = made(arrays)
    found = check(one, q, (k, v), out)
    one.remember(found)
    return found


@pytest.fixture
def seen() -> ArrayChecker:
    one = checker(options())
    checked(one, given())
    return one


def test_nothing_is_known_before_the_first_run() -> None:
    assert checker(options()).addresses_again(*made(given())) is None


def test_arrays_elsewhere_have_their_own_addresses_and_the_same_strides(seen: ArrayChecker) -> None:
    elsewhere = {name: replace(array, at=array.at + (1 << 33)) for name, array in given().items()}
    found = seen.addresses_again(*made(elsewhere))
    assert found is not None
    addresses, shapes, strides = found
    assert shapes == tuple(array.shape for array in given().values())
    assert addresses == (*(array.at for array in elsewhere.values()), 0)
    assert strides == checked(checker(options()), given()).strides


DIFFERENT = {
    "shape": lambda array: replace(array, shape=(array.shape[0] + 1, *array.shape[1:])),
    "strides": lambda array: replace(array, strides=(*(2 * n for n in array.made().strides[:-1]), 2)),
    "dtype": lambda array: replace(array, dtype=np.dtype(np.float16)),
    "device": lambda array: replace(array, device=1),
    "alignment": lambda array: replace(array, at=array.at + 8),
}


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("change", DIFFERENT.values(), ids=DIFFERENT)
def test_whatever_differs_is_left_to_the_checks(seen: ArrayChecker, name: str, change: Any) -> None:
    arrays = given()
    arrays[name] = change(arrays[name])
    assert seen.addresses_again(*made(arrays)) is None
    assert seen.addresses_again(*made(given())) is not None


@pytest.mark.parametrize("where", ["q", "k", "v", "float", "int"])
def test_outputs_near_anything_are_left_to_the_checks(seen: ArrayChecker, where: str) -> None:
    at = PLACES[where] if where in PLACES else WORKSPACES[where == "int"][0]
    assert seen.addresses_again(*made(given(out=Array((BATCH, HEADS, DIM), at + 16)))) is None


def test_arrays_of_another_type_are_left_to_the_checks(seen: ArrayChecker) -> None:
    for at in range(4):
        arrays: list[Any] = list(made(given()))
        arrays[at] = np.zeros((BATCH, HEADS, DIM), BF16)
        assert seen.addresses_again(*arrays) is None


def test_parts_of_larger_arrays_are_not_remembered() -> None:
    one = checker(options())
    q, _, _, out = made(given())
    both = Array((PAGES, 2, PAGE, KV_HEADS, DIM), PLACES["k"]).made()
    one.remember(check(one, q, both, out))
    assert one.addresses_again(q, both, both, out) is None


def test_the_next_plan_of_the_same_options_knows_the_layout() -> None:
    of = options()
    checked(checker(of), given())
    assert checker(of).addresses_again(*made(given())) is not None
    for other in (cuda_device(1), CPU_DEVICE):
        assert checker(of, device=other).addresses_again(*made(given())) is None
    assert checker(of, layout="HND").addresses_again(*made(given())) is None
    assert checker(options()).addresses_again(*made(given())) is None


@pytest.mark.parametrize("again", [True, False], ids=["again", "checked"])
def test_the_next_plan_checks_its_own_batch(again: bool) -> None:
    """A layout that fits the options may be too short for the next batch, or for its page table."""
    of = options()
    checked(checker(of), given())
    longer, further = checker(of, batch=BATCH + 1), checker(of, max_page=PAGES)
    for one, error, message in (
        (longer, StateError, "q: has 3 query tokens, the planned batch has 4"),
        (further, ArgumentError, r"paged_kv_cache \(K\): has 10 pages, the page table refers to page 10"),
    ):
        for _ in range(2):
            with pytest.raises(error, match=message):
                q, k, v, out = made(given())
                one.addresses_again(q, k, v, out) if again else check(one, q, (k, v), out)


def test_a_run_of_numpy_arrays_after_another_batch_is_checked_too() -> None:
    wrapper = cupyinfer.BatchDecodeWithPagedKVCacheWrapper(backend="host")
    arguments = HEADS, KV_HEADS, DIM, PAGE

    def plan(batch: int) -> None:
        last = np.full(batch, PAGE, np.int32)
        args = np.arange(batch + 1, dtype=np.int32), np.arange(batch, dtype=np.int32), last, *arguments
        size = wrapper.workspace_size(*args)
        wrapper.reset_workspace_buffer(*(np.empty(n + 16, np.uint8)[: max(n, 1)] for n in size))
        wrapper.plan(*args)

    q = np.ones((2, HEADS, DIM), np.float16)
    cache = np.ones((2, PAGE, KV_HEADS, DIM), np.float16), np.ones((2, PAGE, KV_HEADS, DIM), np.float16)
    plan(2)
    np.testing.assert_array_equal(wrapper.run(q, cache), q)
    plan(3)
    with pytest.raises(StateError, match="q: has 2 query tokens, the planned batch has 3"):
        wrapper.run(q, cache)
    plan(2)
    np.testing.assert_array_equal(wrapper.run(q, cache), q)
