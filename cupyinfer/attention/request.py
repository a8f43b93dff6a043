# SPDX-License-Identifier: Apache-2.0
"""What is to be planned: a batch with its options, page table and values, and the schedule drafted for a GPU from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cupyinfer.attention.backend_choice import choose_backend
from cupyinfer.attention.metadata import NO_PAGES, NO_VALUES, PageTable, PlanValues
from cupyinfer.attention.options import AttentionOptions
from cupyinfer.errors import ArgumentError
from cupyinfer.schedule.capacity import BatchLimits
from cupyinfer.schedule.geometry import BatchGeometry
from cupyinfer.schedule.planner import PlanDraft, PlanShape, draft_plan
from cupyinfer.schedule.profile import HOST_PROFILE, DeviceProfile
from cupyinfer.schedule.tiles import FA3_ARCH


@dataclass(eq=False, slots=True)
class AttentionRequest:
    """A batch and everything a plan needs to know of it, made for one plan and completed by who plans.

    Attributes:
        options: heads, widths, element types and the rules of the logits.
        geometry: the batch.
        pages: its page table.
        values: per-head values and masks.
        kv_layout: "NHD" or "HND".
        graph_limits: plan for CUDA graphs within these limits, or None.
        graph_pages: page-table entries the int workspace holds under CUDA graphs, or None.
        graph_launch: what a captured run of the first plan for CUDA graphs holds, which this one may not change; filled in by the first.
        backend: what the caller asked for.
        causal: what the caller said, though a custom mask takes its place.
        kv_names: what errors of a run call K and V; None for the names of `options`.
    """

    options: AttentionOptions
    geometry: BatchGeometry
    pages: PageTable = NO_PAGES
    values: PlanValues = NO_VALUES
    kv_layout: str = "NHD"
    graph_limits: BatchLimits | None = None
    graph_pages: int | None = None
    graph_launch: dict[str, Any] = field(default_factory=dict)
    backend: str = "auto"
    causal: bool = False
    kv_names: tuple[str, str] | None = None

    def draft(self, profile: DeviceProfile) -> PlanDraft:
        """Schedule the batch for a GPU; touches no device.

        Raises:
            ArgumentError: the batch exceeds the limits of its CUDA graph.
            UnsupportedError: the backend asked for cannot do this.
        """
        options, values = self.options, self.values
        num_pages = self.pages.num_entries if self.pages.in_workspace else None
        if self.graph_limits is not None and num_pages is not None and self.graph_pages is not None:
            if num_pages > self.graph_pages:
                raise ArgumentError(f"batch: refers to {num_pages} pages, this object's CUDA graph holds at most {self.graph_pages}")
            num_pages = self.graph_pages
        shape = options.shape
        if self.backend == "fa3" or not options.decode:
            shape = self._shape_of_backend(profile)
        value_bytes = None if values is NO_VALUES else values.num_bytes
        return draft_plan(self.geometry, shape, profile, num_pages, value_bytes, values.mask_begin, self.graph_limits)

    def _shape_of_backend(self, profile: DeviceProfile) -> PlanShape:
        """The shape for fa2 or fa3, whichever serves the batch."""
        options = self.options
        fp8_needs_gpu = options.fp8_queries and profile is not HOST_PROFILE
        if self.backend == "fa3" or (self.backend == "auto" and profile.arch == FA3_ARCH) or fp8_needs_gpu:
            tile_q = options.shape.tile_q(self.geometry, profile.num_sms, self.graph_limits)
            if choose_backend(self.backend, options, profile.arch, self.values.mask_begin is not None, tile_q) == "fa3":
                return options.fa3_shape
        return options.shape
