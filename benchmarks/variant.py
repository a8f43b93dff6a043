# SPDX-License-Identifier: Apache-2.0
"""What an implementation must offer to be benchmarked: an adapter says what it can do, and prepares one case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.cases import Case
from benchmarks.data import CaseData


@dataclass
class Prepared:
    """One implementation, planned for one case.

    Attributes:
        name: the variant, as in the result row.
        launch: enqueue the attention on the current stream; returns nothing that has to be kept.
        output: the last result as a CuPy array [tokens, num_qo_heads, head_dim] bfloat16.
        plan: plan again from host arrays, or None where there is nothing to plan.
        float_bytes: bytes of scratch for partial results it needs for this case; None where it cannot tell.
        int_bytes: bytes of index workspace it needs for this case; None where it cannot tell.
        self_timed: microseconds of one call measured by the adapter, where events on our stream cannot see the work.
    """

    name: str
    launch: Callable[[], object]
    output: Callable[[], Any]
    plan: Callable[[], object] | None = None
    float_bytes: int | None = None
    int_bytes: int | None = None
    self_timed: Callable[[], float] | None = None


class Adapter(Protocol):
    """One implementation. `missing` is the reason it cannot be used on this machine, or None."""

    @property
    def name(self) -> str: ...

    @property
    def missing(self) -> str | None: ...

    def supports(self, case: Case) -> bool: ...

    def prepare(self, data: CaseData) -> Prepared: ...
