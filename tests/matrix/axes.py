# SPDX-License-Identifier: Apache-2.0
"""The declared table: every axis of the matrix, its values, which values may meet, and the cells that follow."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cupyinfer.jit.variant import AttentionVariant
from cupyinfer.schedule.tiles import max_tile_q
from tests.matrix.cover import Row, Rule, complete, cover, product
from tests.support.batches import Case

_DTYPES = {"f16": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
_NO_PAGES = "none"
_LARGE_GROUPS = ("32", "64")

#: Axes that select a kernel.
KERNEL_AXES: dict[str, tuple[str, ...]] = {
    "op": ("decode", "paged", "ragged"),
    "types": ("f16", "bf16", "f16+e4m3", "bf16+e4m3", "f16+e5m2", "bf16+e5m2"),
    "head_dim": ("64", "96", "128", "192x128", "256"),
    "tile": ("16", "64", "128"),
    "mask": ("none", "causal", "bool", "packed"),
    "pos": ("NONE", "ROPE_LLAMA", "ALIBI"),
    "cap": ("0", "30"),
}
#: Axes that select a path inside a kernel or a schedule.
PATH_AXES: dict[str, tuple[str, ...]] = {
    "window": ("none", "small"),
    "sinks": ("no", "yes"),
    "split": ("auto", "fixed", "off"),
}
#: Axes that take turns: every value meets every value of every other axis that it may meet.
TURN_AXES: dict[str, tuple[str, ...]] = {
    "group": ("1", "4", "5", "8", "16", *_LARGE_GROUPS),
    "page": ("1", "3", "16", "64", "512", _NO_PAGES),
    "layout": ("NHD", "HND"),
    "index": ("int32", "int64", "device", "device-int64"),
    "lengths": ("one", "pair", "empty", "long", "few"),
    "scales": ("none", "tensor", "head"),
    "lse": ("yes", "no"),
}
AXES = {**KERNEL_AXES, **PATH_AXES, **TURN_AXES}
#: Masks that one kernel serves.
_SAME_KERNEL = {"none": ("none", "causal"), "packed": ("bool", "packed")}
#: What a run of the matrix can use; a backend that serves less than every cell is given a rule here.
BACKENDS: dict[str, tuple[Rule, ...]] = {"host": (), "fa2": ()}

#: Keys of each request.
KV_LENGTHS = {"one": (333,), "pair": (150, 3), "empty": (70, 0, 130), "long": (640, 33), "few": (9, 64)}
#: Any four kernel axes are covered; more would be the product.
STRENGTH = 4


def largest_tile(head_dim: str) -> str:
    """Rows of the largest tile at a head_dim."""
    return str(max_tile_q(head_dims(head_dim)[1]))


def head_dims(head_dim: str) -> tuple[int, int]:
    """Width of q and k, and of v and o."""
    qk, _, vo = head_dim.partition("x")
    return int(qk), int(vo or qk)


RULES = (
    Rule(("op", "mask"), lambda op, mask: op != "decode" or mask == "none", "the one query of a decode request sees every key"),
    Rule(("tile", "head_dim"), lambda tile, dim: int(tile) <= int(largest_tile(dim)), "past head_dim 128 a tile has at most 64 rows"),
    Rule(
        ("op", "tile", "group"),
        lambda op, tile, group: op != "decode" or tile == ("64" if group in _LARGE_GROUPS else "16"),
        "the tile of a decode request follows from its group: 16 rows up to group 16, 64 above",
    ),
    Rule(("op", "tile"), lambda op, tile: op != "decode" or tile != "128", "a decode request has at most 64 packed rows"),
    Rule(
        ("op", "tile", "group"),
        lambda op, tile, group: op == "decode" or tile != "16" or group not in _LARGE_GROUPS,
        "a prefill tile of 16 rows holds at least one query of the whole group",
    ),
    Rule(
        ("op", "split", "head_dim", "tile"),
        lambda op, split, dim, tile: op == "decode" or split == "auto" or tile == largest_tile(dim),
        "prefill whose result must not depend on the batch always takes the largest tile",
    ),
    Rule(("op", "page"), lambda op, page: (op == "ragged") == (page == _NO_PAGES), "ragged keys have no pages, and all others have"),
)


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

    @property
    def variant(self) -> AttentionVariant:
        """The fa2 kernel that serves it, eager and in a graph."""
        q_dtype, kv_dtype = self._dtypes
        masked = self.mask in _SAME_KERNEL["packed"]
        return AttentionVariant(
            q_dtype, kv_dtype, *head_dims(self.head_dim), int(self.tile), self.op != "ragged", masked, self.cap != "0", self.pos
        )

    @property
    def _dtypes(self) -> tuple[str, str]:
        q_dtype, _, kv_dtype = self.types.partition("+")
        return _DTYPES[q_dtype], _DTYPES[kv_dtype or q_dtype]

    def case(self) -> Case:
        """The call, with what is no axis (window and split lengths, RoPE constants, whose slopes) chosen by the seed."""
        q_dtype, kv_dtype = self._dtypes
        group, seed = int(self.group), self.seed
        num_kv_heads = 2 if group <= 8 else 1
        page_size = 1 if self.page == _NO_PAGES else int(self.page)
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
            causal=self.mask == "causal" or (self.mask in _SAME_KERNEL["packed"] and bool(seed & 4)),
            window_left=-1 if self.window == "none" else (0, 7, 40, 130)[seed % 4],
            soft_cap=float(self.cap),
            pos_encoding=self.pos,
            rope_scale=(1.0, 4.0)[seed % 2] if self.pos == "ROPE_LLAMA" else 1.0,
            rope_theta=(1e4, 5e5)[seed // 2 % 2] if self.pos == "ROPE_LLAMA" else 1e4,
            slopes=self.pos == "ALIBI" and seed % 2 == 1,
            sinks=self.sinks == "yes",
            mask=self.mask if self.mask in _SAME_KERNEL["packed"] else "",
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


def rules_of(backend: str) -> tuple[Rule, ...]:
    """What may meet on a backend."""
    return RULES + BACKENDS[backend]


def pairwise_cells(backend: str = "host") -> list[Cell]:
    """A few cells in which every legal pair of values of any two axes occurs."""
    return [Cell(**row) for row in cover(AXES, rules_of(backend), 2)]


def matrix_rows(backend: str, every_kernel: bool = False) -> list[Row]:
    """Values of the kernel and path axes of every cell; arguments as for `matrix_cells`."""
    rules = rules_of(backend)
    kernel_axes = {**KERNEL_AXES, "mask": tuple(_SAME_KERNEL)}
    kernels = product(kernel_axes, rules) if every_kernel else cover(kernel_axes, rules, STRENGTH)
    rows = []
    for kernel in kernels:
        one_kernel = {axis: (value,) for axis, value in kernel.items()}
        rows += product({**one_kernel, "mask": _SAME_KERNEL[kernel["mask"]], **PATH_AXES}, rules)
    return rows


def matrix_cells(backend: str, every_kernel: bool = False) -> list[Cell]:
    """Every legal combination of path axes and mask forms, on kernels of every legal combination of four kernel axes.

    Args:
        backend: one of BACKENDS.
        every_kernel: on every kernel there is: several times the cells.
    """
    cells = []
    for row in matrix_rows(backend, every_kernel):
        rng = np.random.default_rng(zlib.crc32(repr(sorted(row.items())).encode()))
        whole = complete(row, AXES, rules_of(backend), rng)
        if whole is not None:
            cells.append(Cell(**whole))
    return sorted(dict.fromkeys(cells), key=lambda cell: (str(cell.variant), str(cell)))


def matrix_size(backend: str, every_kernel: bool = False) -> tuple[int, int]:
    """Cells and kernels of `matrix_cells`, without choosing what takes turns."""
    rows = matrix_rows(backend, every_kernel)
    anything = {axis: values[0] for axis, values in TURN_AXES.items()}
    return len(rows), len(kernels_of(Cell(**{**anything, **row}) for row in rows))


def kernels_of(cells: Iterable[Cell]) -> list[AttentionVariant]:
    """The fa2 kernels that cells need, for compiling ahead."""
    return list(dict.fromkeys(cell.variant for cell in cells))
