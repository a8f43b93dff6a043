# SPDX-License-Identifier: Apache-2.0
"""Bring the README up to date: its tree, the outputs of its command lines, its sizes, and on request the demo.

`python -m tests.project.readme` is part of `make format`; with `--demo` it also replays the small trace, whose times it then shows.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import sys

import numpy as np

from cupyinfer import BatchDecodeWithPagedKVCacheWrapper, WorkspaceError
from cupyinfer.cli import main
from tests.project.tree import README, ROOT, with_tree

CONSOLE = re.compile(r"^```console\n\$ cupyinfer ([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DEMO = re.compile(r"(?<=^```text\n)Replayed .*?(?=^```$)", re.MULTILINE | re.DOTALL)
#: A row of the table of sizes: eight numbers.
SIZES = re.compile(r"^\|((?: [\d,]+ \|){8})$", re.MULTILINE)
#: The batch of the first example, and the error it gives in a workspace one byte short.
BATCH = re.compile(r"^batch = (dict\(indptr=.*\))$", re.MULTILINE)
TOO_SMALL = re.compile(r"^int_workspace_buffer is too small .*$", re.MULTILINE)
TRACE = "tests/data/small_trace.csv"


def printed(arguments: list[str]) -> str:
    """What `cupyinfer` prints for `arguments`, run in the project's root."""
    output = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(output):
        code = main(arguments)
    if code:
        raise RuntimeError(f"cupyinfer {shlex.join(arguments)} ended with exit code {code}")
    return output.getvalue()


def size_row(cells: str) -> str:
    """The row of decode sizes on an H200 whose first four cells are query heads, KV heads, requests and keys of each."""
    shape = [int(cell.replace(",", "")) for cell in cells.strip(" |").split("|")[:4]]
    num_qo_heads, num_kv_heads, batch_size, kv_len = shape
    heads = ["--num-qo-heads", str(num_qo_heads), "--num-kv-heads", str(num_kv_heads)]
    report = json.loads(printed(["size", "--profile", "h200", *heads, "--kv-lens", f"{kv_len}x{batch_size}", "--json"]))
    sizes = [report[which][f"{name}_bytes"] for name in ("float", "int") for which in ("exact", "bound")]
    return "".join(f" {value:,} |" for value in (*shape, *sizes))


def too_small(readme: str) -> str:
    """The error of the first example's `plan` when its int workspace is one byte short, on the host backend."""
    (batch,) = (eval(match, {"dict": dict, "range": range}) for match in BATCH.findall(readme))
    wrapper = BatchDecodeWithPagedKVCacheWrapper(backend="host")
    size = wrapper.workspace_size(**batch)
    wrapper.reset_workspace_buffer(np.empty(size.float_bytes, np.uint8), np.empty(size.int_bytes - 1, np.uint8))
    try:
        wrapper.plan(**batch)
    except WorkspaceError as error:
        return str(error)
    raise RuntimeError("a workspace one byte short was not refused")


def with_outputs(readme: str) -> str:
    """The README's text with its command lines' outputs, its table of sizes and its error message brought up to date."""
    readme = TOO_SMALL.sub(lambda _: too_small(readme), readme)
    readme = CONSOLE.sub(lambda block: f"```console\n$ cupyinfer {block[1]}\n{printed(shlex.split(block[1]))}```", readme)
    return SIZES.sub(lambda row: f"|{size_row(row[1])}", readme)


def with_demo(readme: str) -> str:
    """The README's text with what the demo prints on this machine without a GPU."""
    return DEMO.sub(lambda _: printed(["replay", TRACE, "--backend", "host"]), readme)


if __name__ == "__main__":
    text = with_outputs(with_tree(README.read_text(encoding="utf-8")))
    if "--demo" in sys.argv[1:]:
        text = with_demo(text)
    README.write_text(text, encoding="utf-8")
