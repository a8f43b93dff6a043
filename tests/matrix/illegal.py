# SPDX-License-Identifier: Apache-2.0
"""What values of the axes never meet because a call that asks for it is an error, and the words of that error."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupyinfer.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from tests.support.batches import Case
from tests.support.runner import Call

_BASE = Case((40, 25), (5, 3), "paged", head_dims=(64, 64), indices_on="host")


@dataclass(frozen=True)
class Illegal:
    """A combination that sizing and planning refuse.

    Attributes:
        what: the combination in words.
        error: type of the error.
        words: regular expression its message must have.
        ops: operations that can be asked for it.
        arguments: arguments of plan that ask for it, on top of a legal call.
    """

    what: str
    error: type[Exception]
    words: str
    ops: tuple[str, ...] = ("decode", "paged", "ragged")
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.what

    def provoke(self, op: str, method: str, backend: str = "host") -> None:
        """Ask for the combination; `method` is "workspace_size" or "plan"."""
        case = Case(_BASE.kv_lens, None if op == "decode" else _BASE.qo_lens, op, head_dims=_BASE.head_dims, indices_on="host")
        call = Call(case, backend)
        ask: Callable[..., Any] = getattr(call.wrapper, method)
        names = list(inspect.signature(ask).parameters)
        keywords = {**dict(zip(names, call.plan_args, strict=False)), **call.plan_options}
        own_names = {"head_dim": "head_dim" if op == "decode" else "head_dim_qk"}
        ask(**{**keywords, **{own_names.get(name, name): value for name, value in self.arguments.items()}})


_PREFILL = ("paged", "ragged")
_MASK_BITS = 5 * 40 + 3 * 25
_MASK, _PACKED = np.ones(_MASK_BITS, np.bool_), np.ones(25 + 10, np.uint8)

ILLEGAL = (
    Illegal("decode, causal", ArgumentTypeError, "causal: BatchDecode.* takes no such argument", ("decode",), {"causal": True}),
    Illegal(
        "decode, custom mask", ArgumentTypeError, "custom_mask: BatchDecode.* takes no such argument", ("decode",), {"custom_mask": _MASK}
    ),
    Illegal(
        "decode, packed custom mask",
        ArgumentTypeError,
        "packed_custom_mask: BatchDecode.* takes no such argument",
        ("decode",),
        {"packed_custom_mask": _PACKED},
    ),
    Illegal(
        "custom mask in both forms",
        ArgumentError,
        "packed_custom_mask: got both this and custom_mask",
        _PREFILL,
        {"custom_mask": _MASK, "packed_custom_mask": _PACKED},
    ),
    Illegal("float32 queries", ArgumentTypeError, "q_data_type: got 'float32', expected one of", arguments={"q_data_type": "float32"}),
    Illegal("decode, fp8 queries", ArgumentTypeError, "q_data_type: got 'float8_e4m3fn'", ("decode",), {"q_data_type": "float8_e4m3fn"}),
    Illegal(
        "fp8 queries, f16 cache",
        ArgumentTypeError,
        "kv_data_type: got float16 for float8_e4m3fn queries",
        _PREFILL,
        {"q_data_type": "float8_e4m3fn", "kv_data_type": "float16"},
    ),
    Illegal("f16 queries, bf16 cache", ArgumentTypeError, "kv_data_type: got bfloat16 for float16", arguments={"kv_data_type": "bfloat16"}),
    Illegal(
        "bf16 queries, f16 cache",
        ArgumentTypeError,
        "kv_data_type: got float16 for bfloat16",
        arguments={"q_data_type": "bfloat16", "kv_data_type": "float16"},
    ),
    Illegal(
        "fp8 cache of another format",
        ArgumentTypeError,
        "kv_data_type: got 'float8_e5m2fnuz'",
        arguments={"kv_data_type": "float8_e5m2fnuz"},
    ),
    *(
        Illegal(
            f"head_dim {qk}" + (f" with head_dim_vo {vo}" if vo != qk else ""),
            UnsupportedError,
            f"head_dim: got {qk} .*supported are 64, 96, 128, 192",
            arguments={"head_dim": qk, "head_dim_vo": vo},
        )
        for qk, vo in ((32, 32), (80, 80), (112, 112), (128, 64), (160, 160), (192, 192), (512, 512), (576, 512))
    ),
    Illegal("group 65", ArgumentError, "at most 64 query heads share one", arguments={"num_qo_heads": 130}),
    Illegal("query heads not a multiple of KV heads", ArgumentError, "not a multiple of num_kv_heads", arguments={"num_qo_heads": 7}),
    Illegal("page size 0", ArgumentError, "page_size: got 0", ("decode", "paged"), {"page_size": 0}),
    Illegal(
        "ragged, page size",
        ArgumentTypeError,
        "page_size: BatchPrefillWithRagged.* takes no such argument, or took it already",
        ("ragged",),
        {"page_size": 16},
    ),
    Illegal("window below -1", ArgumentError, "window_left: got -2", arguments={"window_left": -2}),
    Illegal("negative cap", ArgumentError, "logits_soft_cap: got -30", arguments={"logits_soft_cap": -30.0}),
    Illegal("unknown position encoding", ArgumentError, "pos_encoding_mode: got 'YARN'", arguments={"pos_encoding_mode": "YARN"}),
    *(
        Illegal(
            f"ALiBi slopes, position encoding {mode}",
            ArgumentError,
            f"alibi_slopes: given with pos_encoding_mode '{mode}'",
            arguments={"pos_encoding_mode": mode, "alibi_slopes": np.ones(8, np.float32)},
        )
        for mode in ("NONE", "ROPE_LLAMA")
    ),
    Illegal("sinks of another number of heads", ArgumentError, "sinks: got .*expected", arguments={"sinks": np.ones(2, np.float32)}),
    Illegal(
        "fixed split, split off",
        ArgumentError,
        "fixed_split_size: got 4 together with disable_split_kv",
        arguments={"fixed_split_size": 4, "disable_split_kv": True},
    ),
    Illegal("index arrays of floats", ArgumentTypeError, "indptr: got float64", ("decode",), {"indptr": np.array([0.0, 3.0, 5.0])}),
    Illegal("index arrays of floats ", ArgumentTypeError, "qo_indptr: got float64", _PREFILL, {"qo_indptr": np.array([0.0, 5.0, 8.0])}),
    Illegal("16-bit sums of logits", UnsupportedError, "always summed in float32", _PREFILL, {"use_fp16_qk_reduction": True}),
)


def sentence(illegal: Illegal) -> str:
    """What the error says."""
    try:
        illegal.provoke(illegal.ops[0], "workspace_size")
    except illegal.error as error:
        return str(error)
    raise AssertionError(f"{illegal.what}: was not refused")
