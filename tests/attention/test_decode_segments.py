# SPDX-License-Identifier: Apache-2.0
"""Decode by CTAs of one segment and of several, whole units and parts: how a segment leaves depends on what its CTA has left to do."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from cupyinfer.backends.device import read_profile
from cupyinfer.schedule.plan_info import PlanInfo
from cupyinfer.schedule.profile import HOST_PROFILE
from tests.support.batches import Case
from tests.support.runner import Call, assert_same_bits

pytestmark = pytest.mark.decode

NUM_KV_HEADS = 2


class Form(NamedTuple):
    """A batch on a GPU of few SMs, and what its plan must look like for the test to mean anything.

    Attributes:
        num_sms: streaming multiprocessors that the plan is for.
        case: the batch.
        units_per_cta: fewest and most units of a CTA, when no unit is shared.
        in_pieces: every CTA has one part of a unit; otherwise, of shared units, CTAs have parts and whole ones by turns.
    """

    num_sms: int
    case: Case
    units_per_cta: tuple[int, int] | None = None
    in_pieces: bool = False


FORMS = {
    "one-unit": Form(8, Case((300, 170), disable_split_kv=True), (1, 1)),
    "two-units": Form(2, Case((300, 170), disable_split_kv=True), (2, 2)),
    "units": Form(3, Case((300, 0, 170, 64, 1, 515, 90), disable_split_kv=True), (4, 5)),
    "one-part": Form(8, Case((1000, 1000)), in_pieces=True),
    "one-part-of-many": Form(32, Case((4000,)), in_pieces=True),
    "parts-and-units": Form(3, Case((900, 70, 130, 0, 64, 900, 10))),
    "parts-and-units-of-each-head": Form(6, Case((70, 2000, 0, 64, 500, 1))),
}


def check_form(info: PlanInfo, form: Form) -> None:
    num_units = len(form.case.kv_lens) * NUM_KV_HEADS
    if form.units_per_cta is not None:
        assert info.num_merge_groups == 0
        assert (num_units // info.num_ctas, -(-num_units // info.num_ctas)) == form.units_per_cta
    elif form.in_pieces:
        assert info.num_merge_groups == num_units
        assert info.num_tiles * NUM_KV_HEADS == info.num_ctas > num_units
    else:
        assert info.num_merge_groups > 0
        assert info.num_ctas < info.num_tiles * NUM_KV_HEADS == num_units


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    ("head_dim", "kv_dtype", "rows"),
    [(64, None, 4), (128, None, 4), (128, None, 12), (128, "float8_e4m3fn", 4), (256, None, 4)],
    ids=["d64", "d128", "d128-12rows", "d128-fp8", "d256"],
)
def test_segments_of_a_cta(head_dim: int, kv_dtype: str | None, rows: int, name: str, backend: str) -> None:
    """At head_dim 256 one segment is on its way out of a CTA at a time, elsewhere two."""
    form = FORMS[name]
    profile = replace(HOST_PROFILE if backend == "host" else read_profile(0), num_sms=form.num_sms)
    case = replace(
        form.case,
        heads=(rows * NUM_KV_HEADS, NUM_KV_HEADS),
        head_dims=(head_dim, head_dim),
        dtype="bfloat16",
        kv_dtype=kv_dtype,
        sinks=True,
    )
    call = Call(case, backend, profile=profile)
    call.plan()
    check_form(call.wrapper.plan_info, form)
    result = call.run()
    call.check(result)
    for garbage in (0x00, 0x7F):
        call.floats.fill(garbage)
        assert_same_bits(call.run(), result)
