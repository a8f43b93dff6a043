# SPDX-License-Identifier: Apache-2.0
"""`cupyinfer replay`: a right backend passes, and every way of being wrong gives exit code 1."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupyinfer.backends.host_launcher as host_launcher
import cupyinfer.cli.replay.session as session
from cupyinfer import BatchDecodeWithPagedKVCacheWrapper, WorkspaceSize
from cupyinfer.cli.arguments import ModelShape
from cupyinfer.cli.replay import command
from cupyinfer.cli.replay.check import low_precision, oracle
from cupyinfer.cli.replay.trace import read_trace
from cupyinfer.schedule.profile import named_profile
from tests.cli.conftest import Cli
from tests.data.make_small_trace import TRACE
from tests.support.oracle import AttentionOptions, attention_oracle

SMALL = ("--backend", "host", "--requests", 8, "--scale-lengths", 0.2, "--check-every", 1)


@pytest.mark.parametrize("backend", ["host", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("auto", "fa2"))])
def test_small_trace(cli: Cli, backend: str) -> None:
    done = cli("replay", TRACE, "--requests", 20, "--backend", backend, "--num-pages", 1024, "--json")
    assert (done.code, done.err) == (0, "")
    data, requests = done.data, read_trace(TRACE, 20)
    assert (data["requests"], data["clipped_requests"], data["length_scale"]) == (20, 0, 1.0)
    assert data["accuracy"]["mismatches"] == 0 and data["workspace_faults"] == 0
    assert data["accuracy"]["rows"] >= 50 and 0 < data["accuracy"]["worst_error_over_tolerance"] <= 1
    assert data["prefill"]["tokens"] == sum(request.context for request in requests)
    assert data["decode"]["tokens"] == sum(request.generated - 1 for request in requests)
    for kind in ("prefill", "decode"):
        assert all(data[kind]["peak"][name] <= data[kind]["bound"][name] for name in ("float_bytes", "int_bytes"))
    assert data["plan_ms"]["p50"] <= data["plan_ms"]["p99"]


@pytest.mark.parametrize("options", [("--dtype", "bf16", "--num-qo-heads", 6, "--num-kv-heads", 2), ("--head-dim", 128, "--page-size", 5)])
def test_other_shapes(cli: Cli, options: tuple[object, ...]) -> None:
    done = cli("replay", TRACE, *SMALL, *options)
    assert done.code == 0, done.out
    assert "0 mismatches" in done.out and "each of exactly the size asked for" in done.out


def test_preemption(cli: Cli, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{idx},4,20\n" for idx in range(6)))
    done = cli("replay", trace, "--backend", "host", "--page-size", 2, "--num-pages", 30, "--check-every", 1, "--json")
    assert done.code == 0
    assert done.data["preemptions"] > 0 and done.data["requests"] == 6
    assert done.data["accuracy"]["mismatches"] == 0


def test_clipping_and_scaling_are_noted(cli: Cli) -> None:
    done = cli("replay", TRACE, *SMALL, "--max-context", 30)
    assert "all lengths times 0.2" in done.out and "5 requests clipped to fit" in done.out


def with_run_host(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None]) -> None:
    right = host_launcher.run_host

    def wrong(problem: Any) -> None:
        right(problem)
        change(problem)

    monkeypatch.setattr(host_launcher, "run_host", wrong)


def test_a_wrong_output_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def shift(problem: Any) -> None:
        problem.o[-1, :, 3] += 0.01

    with_run_host(monkeypatch, shift)
    done = cli("replay", TRACE, *SMALL)
    assert done.code == 1
    assert "mismatch: step 0, prefill: request" in done.out and "0 mismatches" not in done.out


def test_a_wrong_lse_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    with_run_host(monkeypatch, lambda problem: problem.lse.__iadd__(1e-3))
    done = cli("replay", TRACE, *SMALL, "--json")
    assert done.code == 1
    assert done.data["accuracy"]["worst_lse_error_over_tolerance"] > 1 >= done.data["accuracy"]["worst_error_over_tolerance"]


def test_nan_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    with_run_host(monkeypatch, lambda problem: problem.o.fill(np.nan))
    done = cli("replay", TRACE, *SMALL, "--json")
    assert done.code == 1
    assert done.data["accuracy"]["worst_error"] is None and done.data["accuracy"]["mismatches"] == done.data["accuracy"]["rows"]


def test_a_write_beside_the_workspace_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    with_run_host(monkeypatch, lambda problem: ctypes.memset(problem.tiles.ctypes.data - 4, 0, 4) and None)
    done = cli("replay", TRACE, *SMALL)
    assert done.code == 1
    assert "bytes before the int workspace were written" in done.out


def test_a_wrong_append_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    right = session.append_paged_kv_cache
    monkeypatch.setattr(session, "append_paged_kv_cache", lambda key, value, *rest: right(value, key, *rest))
    assert cli("replay", TRACE, *SMALL).code == 1


def test_a_missing_append_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "append_paged_kv_cache", lambda *args: None)
    assert cli("replay", TRACE, *SMALL).code == 1


def test_a_size_that_is_not_exact_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    right = BatchDecodeWithPagedKVCacheWrapper.workspace_size

    def generous(self: Any, *args: Any, **options: Any) -> WorkspaceSize:
        size = right(self, *args, **options)
        return WorkspaceSize(size.float_bytes, size.int_bytes + 16)

    monkeypatch.setattr(BatchDecodeWithPagedKVCacheWrapper, "workspace_size", generous)
    done = cli("replay", TRACE, *SMALL)
    assert done.code == 1
    assert "workspace_size said" in done.out and "was made in" in done.out


@pytest.mark.parametrize(
    ("backend", "profile", "changed", "expected"),
    [
        ("auto", "h200", {}, {"fa3_q128_bfloat16_d128_paged", "fa3_q128x160_bfloat16_d128_paged"}),
        ("auto", "h200", {"head_dim": 256}, {"fa3_q128_bfloat16_d256_paged"}),
        ("auto", "h200", {"head_dim": 64}, {f"fa3_q{rows}_bfloat16_d64_paged" for rows in (128, 192, 256)}),
        ("auto", "h200", {"page_size": 5}, set()),
        ("auto", "l40s", {}, set()),
        ("fa2", "h200", {}, set()),
        ("fa3", "h200", {}, {"fa3_q128_bfloat16_d128_paged", "fa3_q128x160_bfloat16_d128_paged"}),
    ],
)
def test_a_warm_start_has_fa3_where_auto_takes_it(backend: str, profile: str, changed: dict[str, Any], expected: set[str]) -> None:
    memory: Any = SimpleNamespace(backend=backend, profile=named_profile(profile))
    shape = ModelShape(**{"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "page_size": 16, **changed})
    names = {str(variant) for variant in command._kernels(shape, memory)}
    assert {name for name in names if "fa3" in name} == expected
    assert (f"fa2_q64_bfloat16_d{shape.head_dim}_paged" in names) == (backend != "fa3")


def test_the_oracle_agrees_with_the_test_suite_s() -> None:
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal(size).astype(np.float16) for size in ((3, 64), (70, 64), (70, 64)))
    o, lse = oracle(q, k, v, 0.125)
    expected_o, expected_lse = attention_oracle(q[:, None], [3], [k[:, None]], [v[:, None]], AttentionOptions(sm_scale=0.125))
    np.testing.assert_allclose(o, expected_o[:, 0], rtol=0, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse[:, 0], rtol=0, atol=1e-13)
    near_o, near_lse = low_precision(q, k, v, 0.125)
    assert 0 < np.abs(near_o - o).max() < 2e-3
    assert np.abs(near_lse - lse).max() < 1e-5
