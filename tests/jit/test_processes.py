# SPDX-License-Identifier: Apache-2.0
"""Many processes on one cache directory, some of them killed at the worst moment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

# argv: the cache directory and what to do. Prints "ready" when it may be killed or started, then its result.
CHILD = """
import hashlib, json, os, sys, time
from pathlib import Path
from cupyinfer.jit import cache
from cupyinfer.jit.source import KernelSource

def hang(*_):
    print("ready", flush=True)
    time.sleep(600)

directory, role = sys.argv[1:]
sources = [
    KernelSource(f"add{i}", 'extern "C" __global__ void add(int* x) { x[threadIdx.x] += %d; }' % i, "add") for i in range(4)
]
cubins = cache.CubinCache(Path(directory))
if role == "hang-in-compile":
    real_compile = cache.compile_cubin
    cache.compile_cubin = lambda *arguments: (real_compile(*arguments), hang())
elif role == "hang-in-rename":
    os.replace = hang
elif role == "wait":
    print("ready", flush=True)
    sys.stdin.readline()
digests = [hashlib.sha256(cubins.get(source, "sm_90a").cubin).hexdigest() for source in sources]
counters = cubins.counters
print(json.dumps({"digests": digests, "hits": counters.hits, "misses": counters.misses, "compiles": counters.compiles}))
"""


def start(cache: Path, role: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(cache), role]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "ready\n", process.communicate()[1]


def result(process: subprocess.Popen[str], first_line: str = "") -> dict[str, Any]:
    output, errors = process.communicate(first_line, timeout=120)
    assert process.returncode == 0, errors
    found: dict[str, Any] = json.loads(output)
    return found


def test_the_second_process_compiles_nothing(tmp_path: Path) -> None:
    first = result(start(tmp_path / "cache", "run"))
    second = result(start(tmp_path / "cache", "run"))
    assert (first["misses"], first["compiles"], first["hits"]) == (4, 4, 0)
    assert (second["misses"], second["compiles"], second["hits"]) == (0, 0, 4)
    assert first["digests"] == second["digests"]
    assert len(set(first["digests"])) == 4


@pytest.mark.slow
def test_killed_processes_leave_nothing_that_hurts(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    racers = [start(cache, "wait") for _ in range(6)]
    victims = [start(cache, "hang-in-compile"), start(cache, "hang-in-rename")]
    try:
        for process in (*racers, *victims):
            wait_until_ready(process)
        for process in racers:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in victims:
            process.kill()
        results = [result(process) for process in racers]
    finally:
        for process in (*racers, *victims):
            process.kill()
            process.communicate()
    assert {process.returncode for process in victims} == {-9}
    assert len({tuple(found["digests"]) for found in results}) == 1
    assert len(list(cache.glob(".*.tmp"))) == 1, "one victim died between writing its file and renaming it"
    late = result(start(cache, "run"))
    assert (late["compiles"], late["misses"], late["hits"]) == (0, 0, 4)
    assert late["digests"] == results[0]["digests"]
