# SPDX-License-Identifier: Apache-2.0
"""attention_call: a wrapper inside jax.jit works on XLA's own buffers, in every form the cache may have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyinfer.errors import ArgumentError, ArgumentTypeError
from cupyinfer.interop.jax import attention_call

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")


class HostWrapper:
    """Has the surface of a planned wrapper; `out` is q times the scale plus the mean of the last array, `lse` the sum of q."""

    def __init__(self) -> None:
        self.scale = 2.0
        self.calls: list[dict[str, Any]] = []

    def run(self, q: Any, *kv: Any, out: Any = None, lse: Any = None, return_lse: bool = False, **options: Any) -> Any:
        self.calls.append({"q": q, "kv": kv, "out": out, "lse": lse, "return_lse": return_lse, **options})
        last = kv[-1][-1] if isinstance(kv[-1], tuple) else kv[-1]
        mean = last.astype(np.float32).mean()
        out[...] = (q.astype(np.float32)[..., : out.shape[-1]] * self.scale + mean).astype(out.dtype)
        if return_lse:
            lse[...] = q.astype(np.float32).sum(-1)
        return (out, lse) if return_lse else out


def queries(dtype: Any) -> Any:
    return jnp.asarray(np.arange(48).reshape(2, 3, 8) / 8, dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_ragged_under_jit(dtype: Any) -> None:
    wrapper, q = HostWrapper(), queries(dtype)
    k, v = jnp.ones((5, 1, 8), dtype), jnp.full((5, 1, 4), 0.5, dtype)
    out, lse = jax.jit(lambda q, k, v: attention_call(wrapper, q, k, v, return_lse=True))(q, k, v)
    assert out.shape == (2, 3, 4) and out.dtype == dtype and lse.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(q, np.float32)[..., :4] * 2 + 0.5)
    np.testing.assert_array_equal(np.asarray(lse), np.asarray(q, np.float32).sum(-1))
    (call,) = wrapper.calls
    assert isinstance(call["q"], np.ndarray) and call["q"].dtype == np.dtype(dtype)
    assert not call["q"].flags.writeable and not call["kv"][1].flags.writeable
    assert call["out"].flags.writeable and call["lse"].shape == (2, 3)


def test_paged_cache_as_a_pair_and_as_one_array() -> None:
    wrapper, q = HostWrapper(), queries(jnp.bfloat16)
    pages = jnp.full((4, 16, 1, 8), 0.25, jnp.float8_e4m3fn)
    pair = jax.jit(lambda q, cache: attention_call(wrapper, q, cache, k_scale=2.0))(q, (pages, pages))
    both = attention_call(wrapper, q, jnp.full((4, 2, 16, 1, 8), 0.25, jnp.bfloat16))
    expected = np.asarray(q, np.float32) * 2 + 0.25
    for out in (pair, both):
        np.testing.assert_array_equal(np.asarray(out, np.float32), expected)
    first, second = wrapper.calls
    assert isinstance(first["kv"][0], tuple) and first["kv"][0][0].shape == (4, 16, 1, 8)
    assert first["kv"][0][0].dtype == np.dtype(jnp.float8_e4m3fn)
    assert first["k_scale"] == 2.0 and first["lse"] is None and not first["return_lse"]
    assert second["kv"][0].shape == (4, 2, 16, 1, 8)


def test_the_output_type_may_differ_and_a_later_plan_is_seen() -> None:
    wrapper, q = HostWrapper(), queries(jnp.float16)
    k = jnp.zeros((5, 1, 8), jnp.float16)
    call = jax.jit(lambda q, k: attention_call(wrapper, q, k, k, out_dtype=jnp.float32))
    assert call(q, k).dtype == jnp.float32
    wrapper.scale = -1.0
    np.testing.assert_array_equal(np.asarray(call(q, k)), -np.asarray(q, np.float32))
    assert len(wrapper.calls) == 2


def test_errors_of_the_wrapper_reach_the_caller() -> None:
    class Failing:
        def run(self, *args: Any, **options: Any) -> None:
            raise ValueError("run: call plan first")

    q = queries(jnp.float16)
    with pytest.raises(Exception, match="run: call plan first"):
        jax.block_until_ready(attention_call(Failing(), q, q, q))


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"wrapper": 3}, ArgumentTypeError, "wrapper: got int, expected a planned wrapper"),
        ({"q": [1, 2]}, ArgumentTypeError, "q: got list, expected an array"),
        ({"q": np.zeros((2, 24))}, ArgumentError, r"q: got shape \(2, 24\), expected \[num_tokens"),
        ({"kv": ()}, ArgumentError, "kv: got nothing, expected what run takes after q"),
        ({"kv": (np.zeros((5, 1, 8)), 7)}, ArgumentTypeError, "kv: got int, expected an array"),
        ({"kv": (np.zeros((5, 1, 8)), np.zeros(8))}, ArgumentError, r"kv: got shape \(8,\)"),
        ({"return_lse": "no"}, ArgumentTypeError, "return_lse: got 'no', expected True or False"),
        ({"command_buffer": 1}, ArgumentTypeError, "command_buffer: got 1, expected True or False"),
        ({"lse": np.zeros((2, 3))}, ArgumentError, "lse: XLA supplies the memory of results"),
    ],
)
def test_errors_name_the_argument(changed: dict[str, Any], error: type[Exception], words: str) -> None:
    call = {"wrapper": HostWrapper(), "q": queries(jnp.float16), "kv": (np.zeros((5, 1, 8)), np.zeros((5, 1, 8))), **changed}
    # Parameters are NumPy's, for a JAX array made while tests are collected would take the GPU in every test process.
    call = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, call)
    wrapper, q, kv = call.pop("wrapper"), call.pop("q"), call.pop("kv")
    for trace in (lambda function: function, jax.jit):
        with pytest.raises(error, match=f"^{words}"):
            trace(lambda: attention_call(wrapper, q, *kv, **call))()
