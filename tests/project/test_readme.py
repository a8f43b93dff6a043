# SPDX-License-Identifier: Apache-2.0
"""What the README shows is true: its examples run, its command lines print what it says, its table holds."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyinfer
from tests.conftest import has_gpu
from tests.project.readme import CONSOLE, DEMO, SIZES, TOO_SMALL, with_demo, with_outputs
from tests.project.tree import README, ROOT

TEXT = README.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
#: Lines of the demo's output that depend on the machine.
MEASURED = ("Replayed", "plan time", "attention", "KV bandwidth", "accuracy")


def run_example(library: str) -> dict[str, Any]:
    """The names an example that uses `library` leaves behind; NumPy stands in for CuPy where there is no GPU."""
    if has_gpu():
        pytest.importorskip("cupy")
    (code,) = (code for code in EXAMPLES if library in code)
    names: dict[str, Any] = {}
    exec(code if has_gpu() else code.replace("import cupy as cp", "import numpy as cp"), names)
    return names


def on_host(array: Any) -> np.ndarray[Any, Any]:
    """A NumPy float64 copy of an array of any library."""
    return np.asarray(array.get() if hasattr(array, "get") else array).astype(np.float64)


def attend(q: np.ndarray[Any, Any], k: np.ndarray[Any, Any], v: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Causal attention of one request: q [qo_len, num_qo_heads, d], k and v [kv_len, num_kv_heads, d]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    logits = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[2])
    positions = np.arange(len(q)) + len(k) - len(q)
    logits[:, positions[:, None] < np.arange(len(k))] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)


def test_cupy_example() -> None:
    names = run_example("import cupy as cp\nimport cupyinfer\n")
    q, cache, out = (on_host(names[name]) for name in ("q", "cache", "out"))
    assert type(names["out"]) is type(names["q"]) and names["out"].dtype == np.float16
    expected = []
    for token, (pages, kv_len) in zip(q, ((slice(0, 3), 40), (slice(3, 4), 5), (slice(4, 13), 130)), strict=True):
        k, v = (cache[pages, which].reshape(-1, 8, 128)[:kv_len] for which in (0, 1))
        expected.append(attend(token[None], k, v)[0])
    np.testing.assert_allclose(out, expected, rtol=2**-10, atol=2**-11)


def test_fp8_example() -> None:
    names = run_example("import ml_dtypes\n")
    q, out = on_host(names["q"]), on_host(names["out"])
    assert names["cache"][0].dtype == np.uint8
    host = (cache.get() if hasattr(cache, "get") else cache for cache in names["cache"])
    caches = [cache.view(ml_dtypes.float8_e4m3fn) for cache in host]
    expected = []
    for token, (pages, kv_len) in zip(q, ((slice(0, 3), 40), (slice(3, 4), 5), (slice(4, 13), 130)), strict=True):
        rows = (cache[pages].reshape(-1, 8, 128)[:kv_len] for cache in caches)
        k, v = (np.asarray(part, np.float64) * names[scale] for part, scale in zip(rows, ("k_scale", "v_scale"), strict=True))
        expected.append(attend(token[None], k, v)[0])
    np.testing.assert_allclose(out, expected, rtol=2**-9, atol=2**-10)


def test_jax_example() -> None:
    jax = pytest.importorskip("jax")
    if has_gpu() and jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU support")
    names = run_example("import jax\n")
    q, k, v, out = (on_host(names[name]) for name in ("q", "k", "v", "out"))
    assert isinstance(names["out"], jax.Array) and names["out"].dtype == "bfloat16"
    expected = np.concatenate([attend(q[part], k[part], v[part]) for part in (slice(0, 200), slice(200, 231))])
    np.testing.assert_allclose(out, expected, rtol=2**-7, atol=2**-7)


def test_bound_example() -> None:
    run_example("WorkspaceLimits")


def test_command_lines_and_sizes() -> None:
    assert len(CONSOLE.findall(TEXT)) >= 3
    assert len(SIZES.findall(TEXT)) == 9
    assert len(TOO_SMALL.findall(TEXT)) == 1
    assert with_outputs(TEXT) == TEXT, "run `make format`"


@pytest.mark.slow
def test_demo_output() -> None:
    def counted(text: str) -> list[str]:
        (shown,) = DEMO.findall(text)
        return [line for line in shown.splitlines() if not line.strip().startswith(MEASURED)]

    assert len(counted(TEXT)) >= 10
    assert counted(with_demo(TEXT)) == counted(TEXT), "run `python -m tests.project.readme --demo`"


def test_links_and_errors() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert len(links) >= 5
    assert [link for link in links if not (ROOT / link).exists()] == []
    documented = re.findall(r"^\| `(\w+)` \| `", TEXT, re.MULTILINE)
    errors = [name for name in cupyinfer.__all__ if isinstance(getattr(cupyinfer, name), type)]
    errors = [name for name in errors if issubclass(getattr(cupyinfer, name), cupyinfer.CupyInferError)]
    assert sorted([*documented, "CupyInferError"]) == sorted(errors)
