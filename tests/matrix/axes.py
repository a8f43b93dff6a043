# SPDX-License-Identifier: Apache-2.0
"""The declared table: every axis of the matrix, its values, and which values may meet on a backend."""

from __future__ import annotations

from functools import cache

from cupyinfer.attention.backend_choice import fa3_problem
from cupyinfer.attention.options import AttentionOptions, make_options
from cupyinfer.schedule.tiles import FA3_ARCH, max_tile_q
from tests.matrix.cover import Row, Rule, rules_of_table

DTYPES = {"f16": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
NO_PAGES = "none"
LARGE_GROUPS = ("32", "64")
#: What a run of the matrix can use.
BACKENDS = ("host", "fa2", "fa3")

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
    "group": ("1", "4", "5", "8", "16", *LARGE_GROUPS),
    "page": ("1", "3", "8", "16", "64", "512", NO_PAGES),
    "layout": ("NHD", "HND"),
    "index": ("int32", "int64", "device", "device-int64"),
    "lengths": ("one", "pair", "empty", "long", "few"),
    "scales": ("none", "tensor", "head"),
    "lse": ("yes", "no"),
}
AXES = {**KERNEL_AXES, **PATH_AXES, **TURN_AXES}
#: Masks that one kernel serves.
SAME_KERNEL = {"none": ("none", "causal"), "packed": ("bool", "packed")}
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


def dtypes(types: str) -> tuple[str, str]:
    """Element types of queries and cache."""
    q_dtype, _, kv_dtype = types.partition("+")
    return DTYPES[q_dtype], DTYPES[kv_dtype or q_dtype]


#: What calls there are, whatever serves them.
RULES = (
    Rule(("op", "mask"), lambda op, mask: op != "decode" or mask == "none", "the one query of a decode request sees every key"),
    Rule(
        ("op", "tile", "group"),
        lambda op, tile, group: op == "decode" or tile != "16" or group not in LARGE_GROUPS,
        "a prefill tile of 16 rows holds at least one query of the whole group",
    ),
    Rule(("op", "page"), lambda op, page: (op == "ragged") == (page == NO_PAGES), "ragged keys have no pages, and all others have"),
)
#: On host and fa2 a plan takes the tile that its batch fills, and the value of `tile` is that tile.
TILE_RULES = (
    Rule(("tile", "head_dim"), lambda tile, dim: int(tile) <= int(largest_tile(dim)), "past head_dim_vo 128 a tile has at most 64 rows"),
    Rule(
        ("op", "tile", "group"),
        lambda op, tile, group: op != "decode" or tile == ("64" if group in LARGE_GROUPS else "16"),
        "the tile of a decode request follows from its group: 16 rows up to group 16, 64 above",
    ),
    Rule(("op", "tile"), lambda op, tile: op != "decode" or tile != "128", "a decode request has at most 64 packed rows"),
    Rule(
        ("op", "split", "head_dim", "tile"),
        lambda op, split, dim, tile: op == "decode" or split == "auto" or tile == largest_tile(dim),
        "prefill whose result must not depend on the batch always takes the largest tile",
    ),
)


def options_of(row: Row) -> AttentionOptions:
    """What a plan is asked for by the kernel axes and the page size of a row, with a group of 4."""
    (qk, vo), (q_dtype, kv_dtype) = head_dims(row["head_dim"]), dtypes(row["types"])
    return make_options(
        decode=row["op"] == "decode",
        paged=row["op"] != "ragged",
        num_qo_heads=8,
        num_kv_heads=2,
        head_dim_qk=qk,
        head_dim_vo=vo,
        page_size=1 if row["page"] == NO_PAGES else int(row["page"]),
        q_data_type=q_dtype,
        kv_data_type=kv_dtype,
        causal=row["mask"] == "causal",
        logits_soft_cap=float(row["cap"]),
        pos_encoding_mode=row["pos"],
    )


def fa3_refusal(row: Row) -> str | None:
    """Why fa3 does not serve a row's kernel axes and page size, in the words of the library."""
    return fa3_problem(options_of(row), FA3_ARCH, row["mask"] in SAME_KERNEL["packed"])


@cache
def rules_of(backend: str) -> tuple[Rule, ...]:
    """What may meet on a backend. For fa3 the library is asked; as fa3 has tiles of its own, `tile` is a batch that would fill that one."""
    if backend != "fa3":
        return RULES + TILE_RULES
    table = {axis: values for axis, values in AXES.items() if axis == "page" or (axis in KERNEL_AXES and axis != "tile")}
    return RULES + rules_of_table(table, RULES, lambda row: fa3_refusal(row) is None, "fa3 refuses it")


@cache
def kernel_axes_of(backend: str) -> dict[str, tuple[str, ...]]:
    """The axes that select a kernel of a backend, one value for masks that one kernel serves. The tile of an fa3 kernel is its own."""
    axes = axes_of(backend)
    found = {axis: axes[axis] for axis in KERNEL_AXES if not (backend == "fa3" and axis == "tile")}
    return {**found, "mask": tuple(mask for mask in SAME_KERNEL if mask in axes["mask"])}


@cache
def axes_of(backend: str) -> dict[str, tuple[str, ...]]:
    """The axes with the values that occur on a backend."""
    alone = [rule for rule in rules_of(backend) if len(rule.axes) == 1]
    return {
        axis: tuple(value for value in values if not any(rule.broken_by({axis: value}) for rule in alone)) for axis, values in AXES.items()
    }


def fa3_refusals() -> dict[str, str]:
    """Values that fa3 never serves, as "axis value", and why: the library's words about a call that is plain in everything else."""
    plain = {"op": "paged", "types": "f16", "head_dim": "128", "mask": "none", "pos": "NONE", "cap": "0", "page": "16"}
    served = axes_of("fa3")
    return {
        f"{axis} {value}": str(fa3_refusal({**plain, axis: value}))
        for axis, values in AXES.items()
        for value in values
        if value not in served[axis]
    }
