# SPDX-License-Identifier: Apache-2.0
"""A run without a GPU says how much it left out, and does not pass where a GPU was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CACHE_VARIABLE
from tests.project.tree import ROOT

TESTS = """
import pytest

@pytest.mark.gpu
def test_needs_gpu(): pass

def test_each(backend): assert backend in ("host", "fa2", "fa3")

def test_host(): pytest.skip("a reason of its own")
"""


REFUSALS = """
import pytest
from cupyinfer.errors import ArgumentError, UnsupportedError

REFUSAL = "backend: fa3 has no custom masks; take 'auto' or 'fa2'"

@pytest.mark.parametrize("backend", ["fa3", "fa2"])
def test_refused(backend): raise UnsupportedError(REFUSAL)

@pytest.mark.parametrize("backend", ["fa3"])
@pytest.mark.parametrize("error", [UnsupportedError("head_dim: got 80"), NotImplementedError(REFUSAL), ArgumentError(REFUSAL)])
def test_no_refusal(backend, error): raise error

def test_elsewhere(): raise UnsupportedError(REFUSAL)
"""


DECODE = """
import pytest

@pytest.mark.parametrize("op", ["decode", "paged"])
def test_op(op, backend): pass

@pytest.mark.parametrize("name", ["decode-long", "decoder", "paged-decode"])
def test_named(name, backend): pass

@pytest.mark.decode
def test_marked(backend): pass

@pytest.mark.parametrize("op", ["decode"])
def test_without_backend(op): pass
"""


def run_pytest(tmp_path: Path, *arguments: str, tests: str = TESTS) -> subprocess.CompletedProcess[str]:
    """Run `tests` under the project's conftest and settings in a process where CUDA sees no device."""
    (tmp_path / "conftest.py").write_bytes((ROOT / "tests" / "conftest.py").read_bytes())
    (tmp_path / "test_sample.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTEST_ADDOPTS", None)
    return subprocess.run([*command, *arguments, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_skips_are_counted_by_reason(tmp_path: Path) -> None:
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 GPU tests not run: no CUDA GPU here (pytest -m gpu selects them)" in done.stdout
    assert "1 tests skipped: a reason of its own" in done.stdout
    assert "1 passed, 4 skipped" in done.stdout


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["one-process", "xdist"])
def test_a_refusal_of_fa3_is_a_counted_skip(tmp_path: Path, workers: tuple[str, ...]) -> None:
    """Only that one error, and only of a test on fa3."""
    done = run_pytest(tmp_path, *workers, tests=REFUSALS)
    assert done.returncode == 1
    assert "1 tests skipped: backend: fa3 has no custom masks; take 'auto' or 'fa2'" in done.stdout
    assert "5 failed, 1 skipped" in done.stdout


def test_decode_on_fa3_is_no_test(tmp_path: Path) -> None:
    """An operation, a case named after it, a marked test; the other two backends keep all of them."""
    done = run_pytest(tmp_path, "--collect-only", "-q", tests=DECODE)
    collected = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    assert [name for name in collected if "fa3" in name] == [
        "test_op[fa3-paged]",
        "test_named[fa3-decoder]",
        "test_named[fa3-paged-decode]",
    ]
    assert sum("fa2" in name for name in collected) == sum("host" in name for name in collected) == 6
    assert "test_without_backend[decode]" in collected and "3 deselected" in done.stdout


def test_require_gpu_fails_without_one(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "-m", "gpu", "--require-gpu")
    assert done.returncode == 4
    assert "--require-gpu: no CUDA GPU here" in done.stderr


def test_fresh_cache_is_private(fresh_cache: Path, tmp_path: Path) -> None:
    assert os.environ[CACHE_VARIABLE] == str(fresh_cache)
    assert fresh_cache.is_relative_to(tmp_path)
    assert not fresh_cache.exists()
