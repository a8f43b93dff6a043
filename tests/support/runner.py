# SPDX-License-Identifier: Apache-2.0
"""Runs one case on one backend the way a careful caller would, and checks everything that can be checked of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import cupyinfer
from cupyinfer.backends.device import read_profile
from cupyinfer.dtypes import FP8_QUERY_TYPE, numpy_dtype
from cupyinfer.schedule.profile import HOST_PROFILE
from cupyinfer.workspace import WorkspaceSize
from tests.support.batches import Case, Data, tiny_case
from tests.support.compare import assert_attention_close
from tests.support.memory import Buffer, Memory, poisoned_array

Array = npt.NDArray[Any]

WRAPPERS = {
    "decode": cupyinfer.BatchDecodeWithPagedKVCacheWrapper,
    "paged": cupyinfer.BatchPrefillWithPagedKVCacheWrapper,
    "ragged": cupyinfer.BatchPrefillWithRaggedKVCacheWrapper,
}


class Call:
    """A case on a backend: its wrapper, the arguments of plan and run, and workspaces of exactly the reported size.

    Attributes:
        data: the inputs on the host.
        wrapper: the object under test, with both workspaces set.
        size: what `workspace_size` said.
        floats, ints: the workspaces.
    """

    def __init__(self, case: Case, backend: str, data: Data | None = None, **construct: Any) -> None:
        self.case, self.backend = case, backend
        self.memory = Memory(backend)
        self.data = Data(case) if data is None else data
        self.wrapper = WRAPPERS[case.op](kv_layout=case.layout, use_cuda_graph=case.graph, backend=backend, **construct)
        self.plan_args, self.plan_options = plan_arguments(self.data, self.memory)
        self.q = self.memory.put(self.data.q)
        self.caches = [self.memory.put(cache) for cache in self.data.caches]
        self.run_options = _run_options(self.data, self.memory)
        self.size: WorkspaceSize = self.wrapper.workspace_size(*self.plan_args, **self.plan_options)
        self.floats, self.ints = (Buffer(self.memory, num_bytes) for num_bytes in self.size)
        self.wrapper.reset_workspace_buffer(self.floats.bytes, self.ints.bytes)

    def plan(self) -> None:
        """Plan the case."""
        self.wrapper.plan(*self.plan_args, **self.plan_options)

    def run_into(self, out: Any, lse: Any) -> None:
        """Queue a run."""
        kv = [tuple(self.caches)] if self.case.paged else self.caches
        self.wrapper.run(self.q, *kv, out=out, lse=lse, return_lse=lse is not None, **self.run_options)

    def run(self) -> tuple[Array, Array]:
        """Run into poisoned outputs between guards; output and log-sum-exp on the host."""
        shape = (*self.q.shape[:2], self.case.head_dims[1])
        out, out_buffer = poisoned_array(self.memory, numpy_dtype(self.case.out_dtype), shape)
        lse, lse_buffer = poisoned_array(self.memory, np.float32, shape[:2])
        self.run_into(out, lse)
        result = self.memory.get(out), self.memory.get(lse)
        for buffer, name in ((out_buffer, "out"), (lse_buffer, "lse"), (self.floats, "float workspace"), (self.ints, "int workspace")):
            buffer.assert_guards_intact(name)
        return result

    def check(self, result: tuple[Array, Array]) -> None:
        """Compare with the oracle."""
        oracle, reference = self.data.expected
        assert_attention_close(*result, oracle, reference, self.case.queries, f"{self.case} on {self.backend}", self.data.weights_bound)


def plan_arguments(data: Data, memory: Memory) -> tuple[list[Any], dict[str, Any]]:
    """Positional arguments and options of `plan` and `workspace_size`."""
    case = data.case
    heads = list(case.heads)
    if case.paged:
        indices = memory.put(data.indices) if case.indices_on == "device" else data.indices
        args = [data.kv_indptr, indices, data.last_page_len, *heads, case.head_dims[0], case.page_size]
    else:
        args = [data.kv_indptr, *heads, case.head_dims[0]]
    options: dict[str, Any] = {
        "head_dim_vo": case.head_dims[1],
        "q_data_type": case.dtype,
        "kv_data_type": case.cache_dtype,
        "window_left": case.window_left,
        "logits_soft_cap": case.soft_cap,
        "sm_scale": case.sm_scale,
        "pos_encoding_mode": case.pos_encoding,
        "rope_scale": case.rope_scale,
        "rope_theta": case.rope_theta,
        "fixed_split_size": case.fixed_split_size,
        "disable_split_kv": case.disable_split_kv,
        "sinks": data.sinks,
        "alibi_slopes": data.slopes,
        **data.mask_arguments(),
    }
    if case.op != "decode":
        args = [data.qo_indptr, *args]
        options["causal"] = case.causal
        options["o_data_type"] = case.o_dtype
    return args, options


def _run_options(data: Data, memory: Memory) -> dict[str, Any]:
    if not data.case.scales:
        return {}
    scales = {"k_scale": data.k_scale, "v_scale": data.v_scale}
    if data.case.dtype == FP8_QUERY_TYPE:
        scales["q_scale"] = data.q_scale
    return {name: memory.put(scale) if isinstance(scale, np.ndarray) else scale for name, scale in scales.items()}


def bound_of(case: Case, data: Data, backend: str) -> WorkspaceSize:
    """What `workspace_bound` says suffices for every batch no larger than this one."""
    values = [
        4 * case.heads[0]
        for given in (data.sinks, data.slopes if case.slopes else case.pos_encoding == "ALIBI" or None)
        if given is not None
    ]
    values += [array.nbytes for array in data.mask_arguments().values()]
    if case.mask == "bool" and data.masks is not None:
        values[-1] = sum(-(-mask.size // 8) for mask in data.masks)
    limits = cupyinfer.WorkspaceLimits(
        kind="decode" if case.op == "decode" else "prefill",
        max_batch_size=len(case.kv_lens),
        num_qo_heads=case.heads[0],
        num_kv_heads=case.heads[1],
        head_dim=case.head_dims[0],
        head_dim_vo=case.head_dims[1],
        max_num_qo_tokens=sum(case.queries),
        max_num_pages=len(data.indices) if case.paged else None,
        page_size=case.page_size if case.paged else 1,
        kv_data_type=case.cache_dtype,
        fixed_split_size=case.fixed_split_size,
        disable_split_kv=case.disable_split_kv,
        max_kv_len=max(case.kv_lens, default=0),
        value_bytes=sum(-(-num_bytes // 16) * 16 for num_bytes in values) if values else None,
    )
    return cupyinfer.workspace_bound(limits, HOST_PROFILE if backend == "host" else read_profile(0))


def run_case(case: Case, backend: str, **construct: Any) -> tuple[Array, Array]:
    """Size, allocate exactly, plan, run, and check.

    Checked: plan uses the reported bytes, and no more than the bound for its limits; output and log-sum-exp are close to the oracle;
    nothing outside outputs and workspaces is written; a second run is equal bit for bit, whatever the float workspace holds by then;
    workspaces one byte shorter are refused by name and change nothing.

    Returns:
        The output and log-sum-exp on the host.
    """
    call = Call(case, backend, **construct)
    call.plan()
    info = call.wrapper.plan_info
    assert (info.float_bytes, info.int_bytes) == tuple(call.size)
    bound = bound_of(case, call.data, backend)
    assert call.size.float_bytes <= bound.float_bytes and call.size.int_bytes <= bound.int_bytes, (call.size, bound)
    result = call.run()
    call.check(result)
    for garbage in (0x00, 0x7F):
        call.floats.fill(garbage)
        assert_same_bits(call.run(), result)
    check_one_byte_less(call, result)
    return result


def check_one_byte_less(call: Call, result: tuple[Array, Array]) -> None:
    """Workspaces that are one byte short are refused, name the numbers, change nothing, and leave an earlier plan running."""
    whole = {"float_workspace_buffer": call.floats, "int_workspace_buffer": call.ints}
    tiny = None if call.case.graph else Call(tiny_case(call.case), call.backend)
    for name, needed in zip(whole, call.size, strict=True):
        if not needed:
            continue
        buffers = {other: buffer.bytes for other, buffer in whole.items()}
        buffers[name] = buffers[name][:-1]
        call.wrapper.reset_workspace_buffer(**buffers)
        tiny_fits = tiny is not None and all(len(buffer) >= n for buffer, n in zip(buffers.values(), tiny.size, strict=True))
        before = None
        if tiny is not None and tiny_fits:
            tiny.wrapper = call.wrapper
            tiny.plan()
            before = tiny.run()
            tiny.check(before)
        contents = [buffer.contents() for buffer in whole.values()]
        with pytest.raises(cupyinfer.WorkspaceError, match=rf"^{name} .*\b{needed} bytes, the buffer has {needed - 1}\b") as failure:
            call.plan()
        assert "region" in str(failure.value)
        for buffer, content in zip(whole.values(), contents, strict=True):
            np.testing.assert_array_equal(buffer.contents(), content)
        if tiny is not None and before is not None:
            assert_same_bits(tiny.run(), before)
    call.wrapper.reset_workspace_buffer(**{name: buffer.bytes for name, buffer in whole.items()})
    call.plan()
    assert_same_bits(call.run(), result)


def assert_same_bits(got: tuple[Array, ...], want: tuple[Array, ...]) -> None:
    """Fail unless two results are equal bit for bit; NaN equals itself."""
    for name, a, b in zip(("o", "lse"), got, want, strict=False):
        kind = np.uint16 if a.dtype.itemsize == 2 else np.uint32
        assert a.dtype == b.dtype and a.shape == b.shape
        different = np.argwhere(a.view(kind) != b.view(kind))
        assert not len(different), (
            f"{name}: {len(different)} of {a.size} elements differ in their bits, the first at {different[0].tolist()}"
        )
