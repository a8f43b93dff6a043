# SPDX-License-Identifier: Apache-2.0
"""Calls of the fa3 kernels that no cell of the matrix has, small enough for a sanitizer: e4m3 queries, tiles of 192 and 256 rows."""

from __future__ import annotations

from dataclasses import replace

from cupyinfer.backends.device import read_profile
from cupyinfer.dtypes import FP8_QUERY_TYPE
from cupyinfer.jit.ahead import fa3_variants
from cupyinfer.jit.variant import AttentionVariant
from tests.support.batches import Case
from tests.support.runner import Call

#: Rows that fill tiles of 192, or of 256, and would leave much of others empty; lengths that end within a tile of keys.
CASES = {
    "192 rows": Case((150, 48, 300), (48, 48, 96), "paged", head_dims=(64, 64), dtype="bfloat16", causal=True, sinks=True),
    "256 rows": Case((150, 70, 300), (64, 64, 128), "paged", head_dims=(64, 64), dtype="bfloat16", causal=True, sinks=True),
    "e4m3 queries": Case(
        (150, 3, 70, 333), (60, 2, 70, 40), "paged", dtype=FP8_QUERY_TYPE, o_dtype="bfloat16", causal=True, window_left=100, scales="head"
    ),
}


def kernels() -> list[AttentionVariant]:
    """Those that may serve the cases."""
    served = {(case.dtype, case.o_dtype or case.dtype, case.head_dims[0], case.paged) for case in CASES.values()}
    return [kernel for kernel in fa3_variants() if (kernel.q_dtype, kernel.o_dtype, kernel.head_dim_qk, kernel.paged) in served]


def run(name: str) -> None:
    """Plan a case for one SM, where a single CTA does all of it, and compare it with the oracle."""
    import cupy

    # Every array in a CUDA allocation of its own: in a pool's block, a read past one array finds the next.
    cupy.cuda.set_allocator(None)
    call = Call(CASES[name], "fa3", profile=replace(read_profile(0), num_sms=1))
    call.plan()
    info = call.wrapper.plan_info
    assert any((kernel.cta_tile_q, kernel.kv_tile) == (info.cta_tile_q, info.kv_tile) for kernel in kernels()) and info.num_ctas == 1
    assert info.cta_tile_q == {"192 rows": 192, "256 rows": 256}.get(name, 128)
    call.check(call.run())
