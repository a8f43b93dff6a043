# SPDX-License-Identifier: Apache-2.0
"""Attention inside `jax.jit`: a planned wrapper as one operation on XLA's own stream and buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupyinfer.errors import ArgumentError, ArgumentTypeError, BackendUnavailable
from cupyinfer.interop.array_view import as_view
from cupyinfer.interop.dlpack import CPU
from cupyinfer.interop.native import cupy_array
from cupyinfer.interop.stream import cupy_stream, use_device


def attention_call(
    wrapper: Any,
    q: Any,
    *kv: Any,
    return_lse: bool = False,
    out_dtype: Any = None,
    command_buffer: bool | None = None,
    **run_options: Any,
) -> Any:
    """Run a planned wrapper on JAX arrays, also under `jax.jit`.

    The wrapper writes XLA's output buffers in place, with CuPy's current stream set to XLA's stream on a GPU and with NumPy
    arrays on the CPU. The operation has no derivative.

    Plan before the compiled function is called. A later plan is seen by the next call, except inside XLA command buffers,
    which replay the recorded launches: those need a wrapper that keeps its buffers and launch shape from plan to plan.

    Args:
        wrapper: a wrapper after `plan`, with `run(q, *kv, out=, lse=, return_lse=)`.
        q: queries, `[num_tokens, num_qo_heads, head_dim_qk]`.
        kv: what `run` takes after `q`: the paged cache (one array, or a pair in a tuple), or ragged `k` and `v`.
            The last size of the last array is `head_dim_vo`.
        return_lse: also return the base-2 log-sum-exp.
        out_dtype: element type of the output; by default that of `q`.
        command_buffer: let XLA record the launches into its command buffers; by default if the wrapper says
            `is_cuda_graph_enabled`.
        run_options: further keyword arguments of `run`, fixed when the function is traced.

    Returns:
        `[num_tokens, num_qo_heads, head_dim_vo]`; with `return_lse` a pair of it and float32 `[num_tokens, num_qo_heads]`.

    Raises:
        ArgumentTypeError: `wrapper` has no `run`, `q` or an array of `kv` is none, or a flag is neither True nor False.
        ArgumentError: `q` or an array of `kv` has another number of dimensions, or `run_options` has what XLA supplies.
        BackendUnavailable: this JAX has no `jax.experimental.buffer_callback`.
    """
    import jax

    leaves = jax.tree_util.tree_leaves(kv)
    _check(wrapper, q, leaves, {"return_lse": return_lse, "command_buffer": command_buffer}, run_options)

    try:
        from jax.experimental.buffer_callback import buffer_callback
    except ImportError as error:
        raise BackendUnavailable(f"attention_call needs jax.experimental.buffer_callback (jax >= 0.7), found {jax.__version__}") from error

    head_dim_vo = leaves[-1].shape[-1]
    rows = tuple(q.shape[:-1])
    results = [jax.ShapeDtypeStruct((*rows, head_dim_vo), q.dtype if out_dtype is None else out_dtype)]
    if return_lse:
        results.append(jax.ShapeDtypeStruct(rows, np.float32))
    if command_buffer is None:
        command_buffer = bool(getattr(wrapper, "is_cuda_graph_enabled", False))

    def callback(context: Any, outputs: Any, queries: Any, *keys_values: Any) -> None:
        device_type, index = queries.__dlpack_device__()
        if int(device_type) == CPU:
            _run(wrapper, jax.tree_util.tree_map(_host_buffer, (queries, keys_values, outputs)), run_options)
            return
        with use_device(int(index)), cupy_stream(context.stream):
            named = ((queries, "q"), (keys_values, "kv"), (outputs, "out"))
            _run(wrapper, [jax.tree_util.tree_map(_device_buffer_named(name), arrays) for arrays, name in named], run_options)

    call = buffer_callback(callback, tuple(results), command_buffer_compatible=command_buffer)
    made = call(q, *kv)
    return (made[0], made[1]) if return_lse else made[0]


def _check(wrapper: Any, q: Any, leaves: list[Any], flags: dict[str, Any], run_options: dict[str, Any]) -> None:
    """Find what is wrong while the caller is on the stack: an error of the callback comes out of XLA as text."""
    if not callable(getattr(wrapper, "run", None)):
        raise ArgumentTypeError(f"wrapper: got {type(wrapper).__name__}, expected a planned wrapper with a method run")
    if not leaves:
        raise ArgumentError("kv: got nothing, expected what run takes after q: the paged cache, or k and v")
    for array, name in ((q, "q"), *((leaf, "kv") for leaf in leaves)):
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise ArgumentTypeError(f"{name}: got {type(array).__name__}, expected an array")
        if len(array.shape) not in ((3,) if name == "q" else (3, 4, 5)):
            expected = "[num_tokens, num_qo_heads, head_dim]" if name == "q" else "ragged keys or values, or pages"
            raise ArgumentError(f"{name}: got shape {tuple(array.shape)}, expected {expected}")
    for name, flag in flags.items():
        if not (isinstance(flag, bool) or (flag is None and name == "command_buffer")):
            raise ArgumentTypeError(f"{name}: got {flag!r}, expected True or False")
    for name in ("out", "lse"):
        if name in run_options:
            raise ArgumentError(f"{name}: XLA supplies the memory of results, it cannot be given")


def _run(wrapper: Any, arrays: Any, run_options: dict[str, Any]) -> None:
    queries, keys_values, outputs = arrays
    lse = outputs[1] if len(outputs) > 1 else None
    wrapper.run(queries, *keys_values, out=outputs[0], lse=lse, return_lse=lse is not None, **run_options)


def _host_buffer(buffer: Any) -> np.ndarray[Any, Any]:
    array = np.asarray(buffer)
    if not buffer.writeable:  # NumPy arrays over XLA's inputs do not say on their own that those are immutable
        array.flags.writeable = False
    return array


def _device_buffer_named(name: str) -> Callable[[Any], Any]:
    return lambda buffer: cupy_array(as_view(buffer, name))
