# SPDX-License-Identifier: Apache-2.0
"""User variants that tests run: the worked examples, taken from the docs as they stand, and one that uses everything there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cupyinfer import UserVariant

DOCS = Path(__file__).resolve().parents[2] / "docs" / "USER_VARIANTS.md"


def documented_variants() -> dict[str, UserVariant]:
    """Every variant that a Python block of the docs defines, by name."""
    scope: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL):
        if " = UserVariant(" in block:
            exec(block, scope)
    return {value.name: value for value in scope.values() if isinstance(value, UserVariant)}


#: All hooks, and a parameter of every type. Names are those that the kernels use for other things.
EVERYTHING = UserVariant(
    name="everything",
    scalars=(("slope", "float"), ("width", "int"), ("row_length", "int")),
    tensors=(
        ("tiles", "float16"),
        ("params", "bfloat16"),
        ("scale", "float32"),
        ("ids", "int32"),
        ("wide", "int64"),
        ("narrow", "int8"),
        ("bytes", "uint8"),
        ("flags", "bool"),
    ),
    declarations="int divide(int a, int b) { return a / b; }",
    query_transform="query * float(params[dim]) // a comment at the end",
    logit_transform="""
        float distance = static_cast<float>(kv_token - q_position);
        return logit + (slope * distance + scale[qo_head]) * narrow[kv_head];
    """,
    mask="""
        // Every third key is hidden where its flag says so.
        const long long at = static_cast<long long>(request) * row_length + kv_token;
        return (flags[at] || kv_token % ids[request] != 0) && wide[request] + bytes[kv_head] > 0 && kv_len * qo_len > 0;
    """,
    output_transform="output * float(tiles[(q_index * width + dim) % row_length]) + divide(2 * q_token, qo_len)",
)
