# SPDX-License-Identifier: Apache-2.0
"""What every test shares: skipping without a GPU, the kernel cache, the backends, and how Hypothesis runs."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[1]
CACHE_VARIABLE = "CUPYINFER_CACHE_DIR"
NO_GPU = "no CUDA GPU here"
_FA3_REFUSAL = re.compile(r"backend: fa3 .+; take '(auto' or 'fa2|fa2)'")

# Read by NumPy when it is first imported: matrix products of tests are small, and threads of several test processes get in each
# other's way (eight times slower on two cores).
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Read by JAX when it first looks at a GPU, of whose memory every test process would otherwise take three quarters.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# One cache for all test processes and runs: entries are keyed by content, so an old one is never wrong.
os.environ.setdefault(CACHE_VARIABLE, str(ROOT / ".cache" / "kernels"))

# The machine decides how long an example takes, never what it does: no deadline, and the same examples everywhere.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@functools.cache
def has_gpu() -> bool:
    """Whether CuPy is installed and its driver sees at least one device."""
    try:
        from cupy.cuda import runtime
    except ModuleNotFoundError:
        return False
    try:
        return int(runtime.getDeviceCount()) > 0
    except runtime.CUDARuntimeError:
        return False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail at once where there is no CUDA GPU, instead of skipping its tests")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--require-gpu") and not has_gpu():
        raise pytest.UsageError(f"--require-gpu: {NO_GPU}")


def _is_decode_on_fa3(item: pytest.Item) -> bool:
    """Whether a test asks fa3 for decode: it is marked, or a parameter is that operation or a case whose name begins with it."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    if params.get("backend") != "fa3":
        return False
    named = any(isinstance(value, str) and value.partition("-")[0] == "decode" for value in params.values())
    return named or item.get_closest_marker("decode") is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # fa3 has no decode at all, which test_backend_choice.py tests: a skip of each such test would say nothing more.
    pointless = [item for item in items if _is_decode_on_fa3(item)]
    if pointless:
        config.hook.pytest_deselected(items=pointless)
        items[:] = [item for item in items if item not in set(pointless)]
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not has_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_collection_finish(session: pytest.Session) -> None:
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is not None and bridge.backends_are_initialized():
        # Every test process collects every test, and would hold a GPU for one that it may never run.
        raise pytest.UsageError("a test module makes JAX arrays while it is imported; make them in the test")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests were skipped, one line per reason."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
    num_gpu = reasons.pop(NO_GPU, 0)
    if num_gpu:
        terminalreporter.write_line(f"{num_gpu} GPU tests not run: {NO_GPU} (pytest -m gpu selects them)")
    for reason, count in reasons.items():
        terminalreporter.write_line(f"{count} tests skipped: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A test on fa3 of what fa3 refuses is skipped with the refusal as its reason.

    test_backend_choice.py has the list of refusals, and test_fa3.py, which does not take the fixture, what must never be refused.
    """
    try:
        return (yield)
    except NotImplementedError as error:
        if getattr(pyfuncitem, "callspec", None) is None or pyfuncitem.callspec.params.get("backend") != "fa3":
            raise
        from cupyinfer.errors import UnsupportedError

        if not isinstance(error, UnsupportedError) or not _FA3_REFUSAL.fullmatch(str(error)):
            raise
        pytest.skip(str(error))


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel cache for tests of the cache itself; every other test shares one."""
    cache = tmp_path / "kernel-cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(cache))
    return cache


@pytest.fixture(params=[pytest.param("host"), *(pytest.param(name, marks=pytest.mark.gpu) for name in ("fa2", "fa3"))])
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend in turn, so that one test body covers all of them."""
    return str(request.param)
