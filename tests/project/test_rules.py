# SPDX-License-Identifier: Apache-2.0
"""The house rules every source file keeps, with no list of exemptions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project.tree import ROOT, SOURCE_DIRS, opening, sources

LICENCE = {".py": "# SPDX-License-Identifier: Apache-2.0", ".cuh": "// SPDX-License-Identifier: Apache-2.0"}
LICENCE[".cu"] = LICENCE[".cuh"]
MAX_LINES = {".py": 400, ".cuh": 500, ".cu": 500}
MAX_BODY_LINES = 80
# Spelled in two halves, so that this file keeps the rule it tests.
POSTPONED = re.compile("|".join(rf"\b{first}{second}\b" for first, second in (("TO", "DO"), ("FIX", "ME"), ("XX", "X"), ("HA", "CK"))))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def python_bodies(text: str) -> Iterator[tuple[str, int]]:
    """Name and number of body lines of every function, its docstring included."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or 0) - node.body[0].lineno + 1


def cuda_bodies(text: str) -> Iterator[tuple[str, int]]:
    """Header and number of body lines of every function: a braced block after `)` that no other function holds."""
    text = re.sub(r"//[^\n]*|\"(?:\\.|[^\"\\\n])*\"", "", text)
    text = re.sub(r"/\*.*?\*/", lambda comment: "\n" * comment.group().count("\n"), text, flags=re.DOTALL)
    open_blocks: list[tuple[str, int]] = []
    header_begin, line = 0, 1
    for position, char in enumerate(text):
        line += char == "\n"
        if char == "{":
            open_blocks.append((" ".join(text[header_begin:position].split()), line))
        elif char == "}":
            header, begin = open_blocks.pop()
            if is_cuda_function(header) and not any(is_cuda_function(outer) for outer, _ in open_blocks):
                yield header, max(line - begin - 1, 0)
        if char in "{};":
            header_begin = position + 1


def is_cuda_function(header: str) -> bool:
    return re.search(r"\)\s*(const|noexcept|\s)*$", header) is not None


def test_there_are_sources() -> None:
    for directory in ("cupyinfer", "kernels_cu", "tests"):
        assert sources(dirs=(directory,)), directory


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_licence_and_opening_sentence(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines and lines[0] == LICENCE[path.suffix]
    first = opening(path)
    assert first.endswith("."), f"the first paragraph under the licence line must be a sentence, got {first!r}"
    assert not re.search(r"\.\s+[A-Z]", first), f"one sentence, then a blank line: {first!r}"


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES[path.suffix]
    bodies = python_bodies(text) if path.suffix == ".py" else cuda_bodies(text)
    assert [(name, lines) for name, lines in bodies if lines > MAX_BODY_LINES] == []


def test_cuda_bodies_are_found() -> None:
    text = """
    namespace a {
    struct S { int x; __device__ int get() const { return x; } };
    // A comment with a brace {
    template <int N>
    __global__ void __launch_bounds__(128) kernel(const Params p) {
      for (int i = 0; i < N; ++i) {
        step(i);
      }
    }
    }
    """
    assert dict(cuda_bodies(text)) == {
        "__device__ int get() const": 0,
        "template <int N> __global__ void __launch_bounds__(128) kernel(const Params p)": 3,
    }


def test_nothing_is_postponed() -> None:
    pages = [path for path in ROOT.iterdir() if path.suffix in (".md", ".toml") or path.name == "Makefile"]
    pages += (ROOT / "docs").rglob("*.md")
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in [*sources(), *pages]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if POSTPONED.search(line)
    ]
    assert found == []


def test_only_the_command_line_prints() -> None:
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in sources(".py", dirs=("cupyinfer",))
        if not path.is_relative_to(ROOT / "cupyinfer" / "cli")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert found == []


def test_every_package_directory_is_a_package() -> None:
    """A directory without `__init__.py` imports from a checkout, and then hides what a wheel leaves out."""
    assert [name_of(path) for path in sources(".py", dirs=("cupyinfer",)) if not (path.parent / "__init__.py").exists()] == []


def test_contributing_names_real_paths() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    prefix = "|".join([*SOURCE_DIRS, "docs"])
    paths = re.findall(rf"`((?:{prefix})/[^`\s<>]*)`", text)
    assert len(paths) >= 6
    assert [path for path in paths if not (ROOT / path).exists()] == []
