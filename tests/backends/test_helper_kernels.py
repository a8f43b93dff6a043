# SPDX-License-Identifier: Apache-2.0
"""The kernels around attention compile everywhere, and their parameter records are laid out as the device has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cupyinfer.backends.append import APPEND_PARAMS, BATCH_INDICES_POSITIONS_PARAMS, SEQ_LENS_PARAMS
from cupyinfer.backends.merge import MERGE_STATES_PARAMS
from cupyinfer.errors import CompileError
from cupyinfer.jit.compiler import compile_cubin
from cupyinfer.jit.source import KernelSource, helper_source
from cupyinfer.jit.variant import HELPER_KERNELS, HelperVariant
from cupyinfer.schedule.profile import ARCHS

RECORDS = {
    "append_paged_kv_cache": ("AppendParams", APPEND_PARAMS),
    "batch_indices_positions": ("BatchIndicesPositionsParams", BATCH_INDICES_POSITIONS_PARAMS),
    "seq_lens": ("SeqLensParams", SEQ_LENS_PARAMS),
    "merge_states": ("MergeStatesParams", MERGE_STATES_PARAMS),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", HELPER_KERNELS)
def test_compiles_without_spills(kernel: str, arch: str) -> None:
    report = compile_cubin(helper_source(HelperVariant(kernel)), arch).report
    assert report.clean, str(report)


def fields(record: np.dtype[Any], prefix: str = "") -> Iterator[tuple[str, int, int]]:
    """Path, offset and size of every field, and of those within them."""
    for name, (dtype, offset, *_) in (record.fields or {}).items():
        yield prefix + name, offset, dtype.itemsize
        for path, inner, size in fields(dtype, f"{prefix}{name}."):
            yield path, offset + inner, size


def layout_check(kernel: str, record: np.dtype[Any]) -> KernelSource:
    """The kernel's text followed by assertions on its parameter struct."""
    struct = RECORDS[kernel][0]
    source = helper_source(HelperVariant(kernel))
    checks = [f'static_assert(sizeof({struct}) == {record.itemsize}, "the size of the record is wrong");']
    for path, offset, size in fields(record):
        checks.append(
            f'static_assert((unsigned long long)__INTADDR__(&(({struct}*)0)->{path}) == {offset}, "the offset of {path} is wrong");'
        )
        checks.append(f'static_assert(sizeof((({struct}*)0)->{path}) == {size}, "the size of {path} is wrong");')
    return KernelSource(source.name, source.text + "\n".join(checks) + "\n", source.entry)


def test_every_kernel_has_a_record() -> None:
    assert tuple(RECORDS) == HELPER_KERNELS


@pytest.mark.parametrize("kernel", HELPER_KERNELS)
def test_records_mirror_the_device_structs(kernel: str) -> None:
    compile_cubin(layout_check(kernel, RECORDS[kernel][1]), "sm_80")


def test_a_wrong_record_is_noticed() -> None:
    swapped = np.dtype([(name, SEQ_LENS_PARAMS[name]) for name in ("kv_last_page_len", "kv_indptr", "seq_lens", "page_size")])
    with pytest.raises(CompileError, match="the offset of kv_indptr is wrong"):
        compile_cubin(layout_check("seq_lens", swapped), "sm_80")
