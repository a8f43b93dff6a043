# SPDX-License-Identifier: Apache-2.0
"""Cells: the combinations of values that a run of the matrix goes through, and the call, kernels and tiles of each."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from cupyinfer.jit.variant import AttentionVariant
from tests.matrix.axes import (
    AXES,
    KV_LENGTHS,
    NO_PAGES,
    PATH_AXES,
    SAME_KERNEL,
    STRENGTH,
    TURN_AXES,
    axes_of,
    dtypes,
    head_dims,
    kernel_axes_of,
    options_of,
    rules_of,
)  # fmt: skip
from tests.matrix.cover import Row, complete, cover, product
from tests.support.batches import Case


@dataclass(frozen=True)
class Cell:
    """One combination; the fields are the axes, the values as in AXES."""

    op: str
    types: str
    head_dim: str
    tile: str
    mask: str
    pos: str
    cap: str
    window: str
    sinks: str
    split: str
    group: str
    page: str
    layout: str
    index: str
    lengths: str
    scales: str
    lse: str

    def __str__(self) -> str:
        return " ".join(f"{axis}={getattr(self, axis)}" for axis in AXES)

    @property
    def row(self) -> Row:
        """The values by axis."""
        return {axis: getattr(self, axis) for axis in AXES}

    @cached_property
    def seed(self) -> int:
        """A number that follows from the values alone."""
        return zlib.crc32(str(self).encode())

    def tiles(self, backend: str) -> tuple[int, ...]:
        """Rows per tile that its plans, eager and for a graph, may have."""
        return options_of(self.row).fa3_shape.possible_tile_qs if backend == "fa3" else (int(self.tile),)

    def variants(self, backend: str) -> tuple[AttentionVariant, ...]:
        """The kernels that may serve it, eager and in a graph; those of fa2 for the host."""
        options, masked = options_of(self.row), self.mask in SAME_KERNEL["packed"]
        return tuple(options.variant(tile, masked, "fa3" if backend == "fa3" else "fa2") for tile in self.tiles(backend))

    def case(self) -> Case:
        """The call, with what is no axis (window and split lengths, RoPE constants, whose slopes) chosen by the seed."""
        q_dtype, kv_dtype = dtypes(self.types)
        group, seed = int(self.group), self.seed
        num_kv_heads = 2 if group <= 8 else 1
        page_size = 1 if self.page == NO_PAGES else int(self.page)
        part = (64, 128)[seed % 2]
        kv_lens = KV_LENGTHS[self.lengths]
        return Case(
            kv_lens,
            None if self.op == "decode" else query_lengths(int(self.tile), group, len(kv_lens)),
            self.op,
            heads=(group * num_kv_heads, num_kv_heads),
            head_dims=head_dims(self.head_dim),
            page_size=page_size,
            layout=self.layout,
            dtype=q_dtype,
            kv_dtype=None if kv_dtype == q_dtype else kv_dtype,
            # A custom mask takes the place of the causal one, given or not.
            causal=self.mask == "causal" or (self.mask in SAME_KERNEL["packed"] and bool(seed & 4)),
            window_left=-1 if self.window == "none" else (0, 7, 40, 130)[seed % 4],
            soft_cap=float(self.cap),
            pos_encoding=self.pos,
            rope_scale=(1.0, 4.0)[seed % 2] if self.pos == "ROPE_LLAMA" else 1.0,
            rope_theta=(1e4, 5e5)[seed // 2 % 2] if self.pos == "ROPE_LLAMA" else 1e4,
            slopes=self.pos == "ALIBI" and seed % 2 == 1,
            sinks=self.sinks == "yes",
            mask=self.mask if self.mask in SAME_KERNEL["packed"] else "",
            scales="" if self.scales == "none" else self.scales,
            fixed_split_size=max(1, part // page_size) if self.split == "fixed" else None,
            disable_split_kv=self.split == "off",
            indices_on="device" if self.index.startswith("device") else "host",
            seed=seed,
        )


def query_lengths(tile: int, group: int, num_requests: int) -> tuple[int, ...]:
    """Query tokens that make a prefill plan, eager or for a graph of just this batch, take a tile of that many rows."""
    if tile == 16:
        rest = (1,) * (num_requests - 1) if num_requests * group <= 16 else (0,) * (num_requests - 1)
        return (16 // group - sum(rest), *rest)
    if tile == 64:
        # The first request fills its tile or begins a second one, as far as the batch stays within one tile per request.
        first = max(1, (84 if num_requests > 1 else 64) // group)
        spare = 64 * num_requests // group - first
        rest = tuple(min(at, spare // num_requests) for at in range(1, num_requests))
        return (first, *rest)
    return (64 * num_requests // group + 1 + 20 // group, *range(num_requests - 1))


def pairwise_cells(backend: str = "host") -> list[Cell]:
    """A few cells in which every legal pair of values of any two axes occurs."""
    return [Cell(**row) for row in cover(axes_of(backend), rules_of(backend), 2)]


@cache
def matrix_rows(backend: str, every_kernel: bool = False) -> tuple[Row, ...]:
    """Values of the kernel and path axes of every cell; arguments as for `matrix_cells`."""
    rules, axes = rules_of(backend), axes_of(backend)
    kernel_axes = kernel_axes_of(backend)
    # fa3 has few enough kernels for all of them.
    whole = every_kernel or backend == "fa3"
    kernels = product(kernel_axes, rules) if whole else cover(kernel_axes, rules, STRENGTH)
    rows: list[Row] = []
    for kernel in kernels:
        one_kernel = {axis: (value,) for axis, value in kernel.items()}
        rows += product({**one_kernel, "mask": SAME_KERNEL[kernel["mask"]], **{axis: axes[axis] for axis in PATH_AXES}}, rules)
    return tuple(rows)


def matrix_cells(backend: str, every_kernel: bool = False) -> list[Cell]:
    """Every legal combination of path axes and mask forms, on kernels of every legal combination of four kernel axes; of fa3 on all.

    Args:
        backend: one of BACKENDS.
        every_kernel: on every kernel there is: several times the cells.
    """
    cells = []
    for row in matrix_rows(backend, every_kernel):
        rng = np.random.default_rng(zlib.crc32(repr(sorted(row.items())).encode()))
        whole = complete(row, axes_of(backend), rules_of(backend), rng)
        if whole is not None:
            cells.append(Cell(**whole))
    return sorted(dict.fromkeys(cells), key=lambda cell: (str(cell.variants(backend)[0]), str(cell)))


def matrix_size(backend: str, every_kernel: bool = False) -> tuple[int, int]:
    """Cells and kernels of `matrix_cells`, without choosing what takes turns."""
    rows, axes = matrix_rows(backend, every_kernel), axes_of(backend)
    # Any value of what takes turns will do: of all that, a kernel depends on there being pages alone.
    anything = {axis: axes[axis][0] for axis in ("tile", *TURN_AXES)}
    cells = (Cell(**{**anything, "page": NO_PAGES if row["op"] == "ragged" else axes["page"][0], **row}) for row in rows)
    return len(rows), len(kernels_of(cells, backend))


def kernels_of(cells: Iterable[Cell], backend: str) -> list[AttentionVariant]:
    """The kernels that cells need, for compiling ahead."""
    return list(dict.fromkeys(variant for cell in cells for variant in cell.variants(backend)))
