# SPDX-License-Identifier: Apache-2.0
"""The cubin cache: what is a hit, what is a miss, and what never fails."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cupyinfer.errors import CompileError
from cupyinfer.jit import cache as cache_module
from cupyinfer.jit.cache import CacheCounters, CubinCache, cache_directory, cache_key, default_cache
from cupyinfer.jit.compiler import DEFAULT_OPTIONS, CompiledKernel, compile_cubin
from cupyinfer.jit.source import KernelSource

ARCH = "sm_90a"
SOURCE = KernelSource("twice", 'extern "C" __global__ void twice(int* x) { x[threadIdx.x] *= 2; }', "twice")


def entry_of(cache: CubinCache) -> Path:
    """The cubin file of SOURCE."""
    return cache.path(SOURCE, ARCH, cache_key(SOURCE, ARCH))


def test_a_kernel_is_compiled_once_and_found_ever_after(fresh_cache: Path) -> None:
    first = CubinCache(fresh_cache)
    assert not fresh_cache.exists(), "nothing is created before the first store"
    compiled = first.get(SOURCE, ARCH)
    assert first.counters == CacheCounters(hits=0, misses=1, compiles=1)
    assert first.get(SOURCE, ARCH) is compiled
    assert first.counters == CacheCounters(hits=1, misses=1, compiles=1)
    later = CubinCache(fresh_cache)
    assert later.get(SOURCE, ARCH) == compiled
    assert later.counters == CacheCounters(hits=1, misses=0, compiles=0)
    assert first.disk_error is None


def test_an_entry_is_a_cubin_and_its_report(fresh_cache: Path) -> None:
    cache = CubinCache(fresh_cache)
    compiled = cache.get(SOURCE, ARCH)
    cubin = entry_of(cache)
    assert sorted(path.name for path in fresh_cache.iterdir()) == sorted([cubin.name, cubin.with_suffix(".json").name])
    assert cubin.name.startswith("twice-sm_90a-")
    assert cubin.read_bytes() == compiled.cubin
    assert json.loads(cubin.with_suffix(".json").read_text())["report"]["registers"] == compiled.report.registers


def _truncate(cubin: Path) -> None:
    cubin.write_bytes(cubin.read_bytes()[:-1])


def _flip(cubin: Path) -> None:
    data = bytearray(cubin.read_bytes())
    data[len(data) // 2] ^= 1
    cubin.write_bytes(data)


def _rewrite(text: str) -> Callable[[Path], None]:
    return lambda cubin: cubin.with_suffix(".json").write_text(text) and None


def _edit(field: str, value: object) -> Callable[[Path], None]:
    def edit(cubin: Path) -> None:
        path = cubin.with_suffix(".json")
        path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))

    return edit


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cubin-truncated": _truncate,
    "cubin-emptied": lambda cubin: cubin.write_bytes(b"") and None,
    "cubin-bit-flipped": _flip,
    "cubin-gone": lambda cubin: cubin.unlink(),
    "json-gone": lambda cubin: cubin.with_suffix(".json").unlink(),
    "json-empty": _rewrite(""),
    "json-cut": _rewrite('{"key": "'),
    "json-not-text": lambda cubin: cubin.with_suffix(".json").write_bytes(b"\xff\xfe") and None,
    "json-list": _rewrite("[]"),
    "json-no-fields": _rewrite("{}"),
    "other-key": _edit("key", "0" * 64),
    "other-digest": _edit("digest", "0" * 64),
    "report-null": _edit("report", None),
    "report-other-fields": _edit("report", {"warnings": [], "registers": 1}),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_entry_is_a_miss_and_is_repaired(fresh_cache: Path, damage: Callable[[Path], None]) -> None:
    cache = CubinCache(fresh_cache)
    compiled = cache.get(SOURCE, ARCH)
    damage(entry_of(cache))
    assert CubinCache(fresh_cache).lookup(SOURCE, ARCH) is None
    repairing = CubinCache(fresh_cache)
    assert repairing.get(SOURCE, ARCH) == compiled
    assert repairing.counters == CacheCounters(hits=0, misses=1, compiles=1)
    assert CubinCache(fresh_cache).lookup(SOURCE, ARCH) == compiled


def test_the_key_covers_all_a_cubin_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [
        cache_key(SOURCE, ARCH),
        cache_key(SOURCE, "sm_80"),
        cache_key(SOURCE, ARCH, (*DEFAULT_OPTIONS, "-lineinfo")),
        cache_key(KernelSource(SOURCE.name, SOURCE.text + "\n", SOURCE.entry), ARCH),
    ]
    monkeypatch.setattr(cache_module, "SCHEMA", cache_module.SCHEMA + 1)
    keys.append(cache_key(SOURCE, ARCH))
    monkeypatch.undo()
    monkeypatch.setattr(cache_module, "nvrtc_version", lambda: (12, 8))
    keys.append(cache_key(SOURCE, ARCH))
    monkeypatch.undo()
    assert len(set(keys)) == len(keys)
    assert cache_key(SOURCE, ARCH) == keys[0]


@pytest.mark.parametrize("where", ["below-a-file", "no-directory"])
def test_without_a_writable_directory_kernels_stay_in_memory(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    cache = CubinCache(tmp_path / "file" / "cache" if where == "below-a-file" else None)
    compiled = cache.get(SOURCE, ARCH)
    assert cache.get(SOURCE, ARCH) is compiled
    assert cache.counters == CacheCounters(hits=1, misses=1, compiles=1)
    assert (cache.disk_error is None) == (where == "no-directory")


def test_a_failed_write_leaves_no_temporary_file(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    cache = CubinCache(fresh_cache)
    cache.get(SOURCE, ARCH)
    assert cache.disk_error == "disk full"
    assert list(fresh_cache.iterdir()) == []


def test_only_old_temporary_files_are_removed(fresh_cache: Path) -> None:
    fresh_cache.mkdir()
    abandoned, in_use = fresh_cache / ".abandoned.tmp", fresh_cache / ".in-use.tmp"
    abandoned.write_bytes(b"")
    in_use.write_bytes(b"")
    os.utime(abandoned, (1, 1))
    CubinCache(fresh_cache).get(SOURCE, ARCH)
    assert not abandoned.exists()
    assert in_use.exists()


def test_another_user_s_abandoned_file_stops_no_write(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_cache.mkdir()
    abandoned = fresh_cache / ".abandoned.tmp"
    abandoned.write_bytes(b"")
    os.utime(abandoned, (1, 1))
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == abandoned:
            raise PermissionError(f"not yours: {path}")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    cache = CubinCache(fresh_cache)
    cache.get(SOURCE, ARCH)
    assert cache.disk_error is None and entry_of(cache).exists() and abandoned.exists()


def test_threads_share_one_compile(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The compile is held until every thread has asked, so each of them could have started its own.
    asked = threading.Barrier(8)
    all_asked = threading.Event()

    def held_compile(*arguments: object) -> CompiledKernel:
        assert all_asked.wait(timeout=60)
        return compile_cubin(SOURCE, ARCH)

    monkeypatch.setattr(cache_module, "compile_cubin", held_compile)
    cache = CubinCache(fresh_cache)

    def ask(_: int) -> CompiledKernel:
        if asked.wait(timeout=60) == 0:
            all_asked.set()
        return cache.get(SOURCE, ARCH)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(ask, range(8)))
    assert all(result is results[0] for result in results)
    assert cache.counters == CacheCounters(hits=7, misses=1, compiles=1)


def test_a_failed_compile_is_not_kept(fresh_cache: Path) -> None:
    cache = CubinCache(fresh_cache)
    broken = KernelSource("broken", "int = 3;", "broken")
    for _ in range(2):
        with pytest.raises(CompileError, match="broken"):
            cache.get(broken, ARCH)
    assert cache.counters == CacheCounters(hits=0, misses=2, compiles=0)
    assert not fresh_cache.exists()


def test_a_user_name_makes_a_plain_file_name(fresh_cache: Path) -> None:
    cache = CubinCache(fresh_cache)
    cache.get(KernelSource("../my kernel/" + "x" * 300, SOURCE.text, "twice"), ARCH)
    assert cache.disk_error is None
    assert len(list(fresh_cache.glob("___my_kernel_xxx*"))) == 2


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"CUPYINFER_CACHE_DIR": "/mine", "XDG_CACHE_HOME": "/xdg"}, "/mine"),
        ({"CUPYINFER_CACHE_DIR": "~/mine"}, "/home/me/mine"),
        ({"CUPYINFER_CACHE_DIR": "", "XDG_CACHE_HOME": "/xdg"}, "/xdg/cupyinfer"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/cupyinfer"),
        ({}, "/home/me/.cache/cupyinfer"),
    ],
)
def test_the_environment_names_the_directory(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str) -> None:
    for name in ("CUPYINFER_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_directory() == Path(expected)


def test_the_default_cache_follows_the_environment(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = default_cache()
    assert here.directory == fresh_cache
    assert default_cache() is here
    monkeypatch.setenv("CUPYINFER_CACHE_DIR", str(fresh_cache / "other"))
    assert default_cache() is not here
    assert not fresh_cache.exists()
