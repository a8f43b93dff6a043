# SPDX-License-Identifier: Apache-2.0
"""`cupyinfer info` and `cupyinfer compile`."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyinfer
from cupyinfer.cli import compile_command, info_command
from cupyinfer.jit import cache
from cupyinfer.jit.ahead import CompileOutcome
from cupyinfer.jit.compiler import CompileReport
from cupyinfer.jit.variant import HelperVariant
from tests.cli.conftest import Cli
from tests.conftest import CACHE_VARIABLE

ONE = ("compile", "--arch", "sm_80", "--kernel", "seq_lens", "--jobs", 1)


def test_info(cli: Cli, fresh_cache: Path) -> None:
    data = cli("info", "--json").data
    assert data["versions"]["cupyinfer"] == cupyinfer.__version__
    assert data["versions"]["python"] == platform.python_version()
    assert data["versions"]["numpy"] == np.__version__
    assert data["cache"] == {"directory": str(fresh_cache), "kernels": 0, "bytes": 0, "problem": None}
    assert data["backends"]["host"] == {"usable": True, "why_not": None}
    assert data["backends"]["fa2"]["usable"] == (data["backends"]["fa2"]["why_not"] is None)
    assert data["backends"]["fa3"]["usable"] == (data["backends"]["fa3"]["why_not"] is None)
    assert str(fresh_cache) in cli("info").out


def test_fa3_is_for_hopper(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for arch, why_not in (("sm_90a", None), ("sm_89", "prefill on sm_90a only, here is sm_89")):
        gpu = {"name": "a GPU", "arch": arch, "num_sms": 132, "problem": None}
        monkeypatch.setattr(info_command, "_gpus", lambda gpu=gpu: [gpu])
        backends = cli("info", "--json").data["backends"]
        assert backends["fa2"]["usable"] and backends["fa3"]["why_not"] == why_not


def test_a_cache_that_keeps_nothing_is_a_failure(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    done = cli(*ONE)
    assert done.code == 1
    assert "1 kernel compiled but not kept: " in done.out and str(tmp_path / "file") in done.out
    info = cli("info")
    assert info.code == 0
    assert f"new kernels are not kept: {tmp_path / 'file'} is not a directory" in info.out


def test_without_a_home_nothing_is_kept(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "cache_directory", lambda: None)
    monkeypatch.setattr(info_command, "cache_directory", lambda: None)
    monkeypatch.setattr(cache, "_caches", {})
    done = cli(*ONE, "--json")
    assert (done.code, done.data["not_kept"]) == (1, 1)
    assert done.data["kernels"][0]["not_kept"] == "in memory only: there is no home directory"
    assert "new kernels are not kept: in memory only: there is no home directory" in cli("info").out


def test_info_says_why_not(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info_command, "has_gpu", lambda: False)
    monkeypatch.setattr(info_command, "_cupy_version", lambda: None)
    done = cli("info", "--json")
    assert done.code == 0
    assert "CuPy is not installed" in done.data["backends"]["fa2"]["why_not"] and done.data["gpus"] == []
    monkeypatch.setattr(info_command, "_cupy_version", lambda: "14.2.0")
    assert "not usable: no CUDA GPU" in cli("info").out


def test_compile_then_cached(cli: Cli, fresh_cache: Path) -> None:
    first, second = cli(*ONE, "--json"), cli(*ONE, "--json")
    assert (first.code, first.err, second.code) == (0, "", 0)
    assert [(entry["variant"], entry["arch"], entry["cached"]) for entry in first.data["kernels"]] == [("seq_lens", "sm_80", False)]
    assert second.data["kernels"][0]["cached"] is True
    assert second.data["kernels"][0]["registers"] == first.data["kernels"][0]["registers"] > 0
    cache = cli("info", "--json").data["cache"]
    assert cache["kernels"] == 1
    assert cache["bytes"] == sum(path.stat().st_size for path in fresh_cache.glob("*.cubin"))


def fake(outcome: CompileOutcome) -> Any:
    def compile_variants(variants: Any, archs: Any, on_progress: Any, workers: Any) -> list[CompileOutcome]:
        on_progress(outcome, 1, 1)
        return [outcome]

    return compile_variants


def test_a_spill_is_a_failure(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = CompileOutcome(HelperVariant("seq_lens"), "sm_80", True, 1.0, CompileReport(255, 16, 8, 0, ()), None)
    monkeypatch.setattr(compile_command, "compile_variants", fake(outcome))
    done = cli(*ONE)
    assert done.code == 1
    assert "seq_lens for sm_80 spills 16 bytes" in done.out


def test_a_failed_kernel_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = CompileOutcome(HelperVariant("seq_lens"), "sm_80", False, 1.0, None, "expected a ';'")
    monkeypatch.setattr(compile_command, "compile_variants", fake(outcome))
    done = cli(*ONE)
    assert done.code == 1
    assert "seq_lens for sm_80 failed: expected a ';'" in done.out


def test_options_narrow(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    seen: list[str] = []

    def compile_variants(variants: Any, archs: Any, on_progress: Any, workers: Any) -> list[CompileOutcome]:
        seen.extend(f"{variant} {arch}" for arch in archs for variant in variants)
        return []

    monkeypatch.setattr(compile_command, "compile_variants", compile_variants)
    assert cli("compile", "--arch", "sm_80", "--kernel", "fa3").code == 2, "there is no fa3 kernel of that arch"
    cli("compile", "--arch", "sm_90a", "sm_80", "--head-dim", 64, "--dtype", "bf16", "--kernel", "q128")
    kinds = ("paged", "ragged")
    expected = [f"fa2_q128_bfloat16_d64_{kind} {arch}" for arch in ("sm_90a", "sm_80") for kind in kinds]
    types = ("bfloat16", "float8_e4m3fn_obfloat16")  # fp8 queries have outputs of a 16-bit type
    assert seen == [*expected, *(f"fa3_q128_{dtype}_d64_{kind} sm_90a" for dtype in types for kind in kinds)]
    seen.clear()
    cli("compile", "--arch", "sm_89", "sm_80", "--head-dim", 128, "--dtype", "bf16", "--kernel", "q16")
    assert seen == [f"fa2_q16_bfloat16_d128_{kind} {arch}" for arch in ("sm_89", "sm_80") for kind in ("paged", "ragged")]
