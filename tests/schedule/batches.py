# SPDX-License-Identifier: Apache-2.0
"""Random batches, shapes and GPUs for schedule tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from cupyinfer.schedule.capacity import BatchLimits
from cupyinfer.schedule.geometry import BatchGeometry, decode_geometry, paged_prefill_geometry, ragged_prefill_geometry
from cupyinfer.schedule.planner import PlanDraft, PlanShape, draft_plan
from cupyinfer.schedule.profile import PROFILES, DeviceProfile
from cupyinfer.schedule.tiles import FA3_TILES, fa3_tile_qs
from cupyinfer.schedule.tiling import KeySpan

KINDS = ("decode", "paged", "ragged")
GROUP_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 64)
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
SMALL_GPUS = tuple(DeviceProfile(f"{sms} SMs", "sm_80", sms, 164 * 1024, 163 * 1024) for sms in (1, 2, 3, 7, 8, 13))


def offsets(lengths: list[int]) -> npt.NDArray[np.int64]:
    """``[0, a, a + b, ...]`` of lengths ``a, b, ...``."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


@dataclass(frozen=True)
class Case:
    """A batch, what is asked of it, and the GPU."""

    kind: str
    qo_lens: list[int]
    kv_lens: list[int]
    page_size: int = 16
    num_kv_heads: int = 2
    group_size: int = 4
    head_dims: tuple[int, int] = (128, 128)
    kv_itemsize: int = 2
    causal: bool = False
    window_left: int = -1
    fixed_split_size: int | None = None
    disable_split_kv: bool = False
    profile: DeviceProfile = field(default=PROFILES["h200"])
    backend: str = "fa2"
    transforms_logits: bool = False

    @property
    def shape(self) -> PlanShape:
        return PlanShape(
            decode=self.kind == "decode",
            num_qo_heads=self.num_kv_heads * self.group_size,
            num_kv_heads=self.num_kv_heads,
            head_dim_qk=self.head_dims[0],
            head_dim_vo=self.head_dims[1],
            kv_itemsize=self.kv_itemsize,
            page_size=1 if self.kind == "ragged" else self.page_size,
            span=KeySpan(self.causal, self.window_left),
            fixed_split_size=self.fixed_split_size,
            disable_split_kv=self.disable_split_kv,
            backend=self.backend,
            transforms_logits=self.transforms_logits,
        )

    @property
    def kv_indptr(self) -> npt.NDArray[np.int64]:
        if self.kind == "ragged":
            return offsets(self.kv_lens)
        return offsets([-(-length // self.page_size) for length in self.kv_lens])

    @property
    def last_page_len(self) -> npt.NDArray[np.int64]:
        return np.array([(length - 1) % self.page_size + 1 if length else 0 for length in self.kv_lens], np.int64)

    @property
    def geometry(self) -> BatchGeometry:
        if self.kind == "decode":
            return decode_geometry(self.kv_indptr, self.last_page_len, self.page_size)
        if self.kind == "paged":
            return paged_prefill_geometry(offsets(self.qo_lens), self.kv_indptr, self.last_page_len, self.page_size)
        return ragged_prefill_geometry(offsets(self.qo_lens), self.kv_indptr)

    @property
    def limits(self) -> BatchLimits:
        """The tightest limits that hold this batch."""
        return BatchLimits(len(self.qo_lens), sum(self.qo_lens), max(self.kv_lens, default=0))

    def draft(self, **options: Any) -> PlanDraft:
        return draft_plan(self.geometry, self.shape, self.profile, **options)


@st.composite
def cases(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS, max_batch: int = 6, max_qo: int = 70, max_kv: int = 900) -> Case:
    """Any batch of a few requests, on any GPU, with any option."""
    kind = draw(st.sampled_from(kinds))
    batch = draw(st.integers(0, max_batch))
    kv_len = st.one_of(st.integers(0, max_kv), st.sampled_from([0, 1, 63, 64, 65, 512]).filter(lambda length: length <= max_kv))
    qo_len = st.just(1) if kind == "decode" else st.one_of(st.integers(0, max_qo), st.sampled_from([0, 1, 2, 16]))
    repeated = draw(st.booleans())  # equal requests take another path than mixed ones
    kv_lens = [draw(kv_len)] * batch if repeated else [draw(kv_len) for _ in range(batch)]
    qo_lens = [draw(qo_len)] * batch if repeated else [draw(qo_len) for _ in range(batch)]
    split = draw(st.sampled_from(["automatic", "automatic", "fixed", "disabled"]))
    head_dims = draw(st.sampled_from(HEAD_DIMS))
    page_size = draw(st.sampled_from([1, 3, 16, 64, 80]))
    transforms_logits = draw(st.booleans())
    kv_itemsize = draw(st.sampled_from([1, 2]))
    pages = 1 if kind == "ragged" else page_size
    fits = head_dims in FA3_TILES[kv_itemsize] and fa3_tile_qs(*head_dims, pages, transforms_logits, kv_itemsize)
    backends = ["fa2", "fa3"] if kind != "decode" and fits else ["fa2"]
    return Case(
        kind=kind,
        qo_lens=qo_lens,
        kv_lens=kv_lens,
        page_size=page_size,
        num_kv_heads=draw(st.integers(1, 3)),
        group_size=draw(st.sampled_from(GROUP_SIZES)),
        head_dims=head_dims,
        kv_itemsize=kv_itemsize,
        causal=draw(st.booleans()),
        window_left=draw(st.sampled_from([-1, -1, 0, 5, 64, 300, 100000])),
        fixed_split_size=draw(st.integers(1, 40)) if split == "fixed" else None,
        disable_split_kv=split == "disabled",
        profile=draw(st.sampled_from([*SMALL_GPUS, *PROFILES.values()])),
        backend=draw(st.sampled_from(backends)),
        transforms_logits=transforms_logits,
    )
