# SPDX-License-Identifier: Apache-2.0
"""Every command explains itself, and bad arguments give exit code 2 and one line."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest

import cupyinfer
from cupyinfer.cli.output import format_bytes, format_table, progress
from tests.cli.conftest import Cli
from tests.data.make_small_trace import TRACE

COMMANDS = ("size", "replay", "compile", "info")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(cli: Cli, command: str) -> None:
    done = cli(command, "--help")
    assert (done.code, done.err) == (0, "")
    assert f"\n  cupyinfer {command} " in done.out or f" cupyinfer {command} --" in done.out
    assert "--json" in done.out


def test_help_lists_every_command(cli: Cli) -> None:
    done = cli("--help")
    assert done.code == 0
    assert all(f"cupyinfer {command}" in done.out for command in COMMANDS)


def test_version(cli: Cli) -> None:
    assert cli("--version").out == f"cupyinfer {cupyinfer.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("", "COMMAND"),
        ("sise", "sise"),
        ("size", "--kv-lens"),
        ("size --kv-lens 1,b", "'b'"),
        ("size --kv-lens 1 --kv 2", "--kv"),
        ("size --kv-lens 16 --profile h900", "h900"),
        ("size --kv-lens 16 --num-sms 100", "--arch"),
        ("size --kv-lens 16 --num-sms 100 --arch sm_70", "sm_70"),
        ("size --kv-lens 16 --num-sms 100 --arch sm_80 --profile h200", "--profile"),
        ("size --kv-lens 16 --num-qo-heads 7", "num_kv_heads = 8"),
        ("size --kv-lens 16 --head-dim 80", "head_dim"),
        ("size --kv-lens 16 --dtype float32", "float32"),
        ("size --kv-lens 16,16 --qo-lens 1", "--qo-lens: has 1"),
        ("size --qo-lens 16", "--kv-lens"),
        ("size --kv-lens 16 --ragged", "--ragged"),
        ("size --kv-lens 16x4 --max-batch-size 3", "the batch needs 4"),
        ("size --max-batch-size 4 --cuda-graph", "--max-pages"),
        ("size --max-batch-size 4 --fixed-split-size 8", "--max-kv-len"),
        ("size --max-batch-size -1", "at least 0"),
        ("replay", "TRACE"),
        ("replay /nowhere/trace.csv", "/nowhere/trace.csv"),
        (f"replay {TRACE} --requests 0", "at least 1"),
        (f"replay {TRACE} --scale-lengths 0", "above 0"),
        (f"replay {TRACE} --backend gpu", "gpu"),
        (f"replay {TRACE} --backend host --head-dim 80", "head_dim"),
        (f"size {TRACE} --kv-lens 4", "TRACE"),
        ("compile --arch sm_70", "sm_70"),
        ("compile --head-dim 72", "got 72"),
        ("compile --kernel warp9", "no standard kernel"),
        ("compile --dtype float8_e5m2", "float8_e5m2"),
        ("info --arch sm_80", "--arch"),
    ],
)
def test_bad_arguments(cli: Cli, argv: str, said: str) -> None:
    done = cli(*argv.split())
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("cupyinfer: error: ") and done.err.count("\n") == 1
    assert said in done.err


def test_without_a_gpu_fa2_says_so(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupyinfer.cli.replay.command.has_gpu", lambda: False)
    done = cli("replay", TRACE, "--backend", "fa2")
    assert done.code == 2
    assert "no CUDA GPU" in done.err and done.err.count("\n") == 1


def test_out_of_memory_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*args: object) -> None:
        raise MemoryError("no room for 1 TiB")

    monkeypatch.setattr("cupyinfer.cli.replay.command.ReplaySession", exhausted)
    done = cli("replay", TRACE, "--backend", "host")
    assert done.code == 2
    assert "no room for 1 TiB" in done.err and done.err.count("\n") == 1


def test_module_is_the_command() -> None:
    argv = [sys.executable, "-m", "cupyinfer", "size", "--kv-lens", "64", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["kind"] == "decode"
    assert done.stderr == ""


class _Terminal(io.StringIO):
    def __init__(self, interactive: bool) -> None:
        super().__init__()
        self._interactive = interactive

    def isatty(self) -> bool:
        return self._interactive


@pytest.mark.parametrize("interactive", [True, False])
def test_progress_is_for_terminals(monkeypatch: pytest.MonkeyPatch, interactive: bool) -> None:
    terminal = _Terminal(interactive)
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress(2, "counting", "thing") as advance:
        advance(1)
        advance(1)
    assert ("counting" in terminal.getvalue() and "2/2" in terminal.getvalue()) == interactive
    assert bool(terminal.getvalue()) == interactive


def test_format_bytes() -> None:
    assert format_bytes(1023) == "1,023 B"
    assert format_bytes(3 * 2**19) == "1,572,864 B (1.50 MiB)"


def test_format_table_aligns_numbers_right() -> None:
    assert format_table(("name", "bytes"), [("a", 5), ("long", 12345)], indent="") == "name   bytes\na          5\nlong  12,345"
