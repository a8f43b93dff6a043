# SPDX-License-Identifier: Apache-2.0
"""Imports follow the table of docs/ARCHITECTURE.md, and what sizes a batch needs no CuPy."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.project.tree import ROOT, sources

ARRAY_LIBRARIES = ("cupy", "cupy_backends", "cupyx", "jax", "jaxlib", "torch")
NUMPY_ONLY = ("cupyinfer/errors.py", "cupyinfer/dtypes.py", "cupyinfer/workspace/", "cupyinfer/schedule/")

MODULES = [path.relative_to(ROOT).as_posix() for path in sources(".py", dirs=("cupyinfer",))]
SIZING_MODULES = [path for path in MODULES if path.startswith(NUMPY_ONLY)]


def stage_homes() -> list[str]:
    """The homes of the stages, in order, one string per row of the table: paths joined by commas."""
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|([^|]+)\|([^|]+)\|", text, flags=re.MULTILINE)
    return [",".join(re.findall(r"`(cupyinfer/[^`]+)`", home)) for _, home in rows if "`cupyinfer/" in home]


STAGES = [row.split(",") for row in stage_homes()]


def stage(path: str) -> int:
    """The row of the table a file belongs to: the longest home that holds it; a package's `__init__` is its last row."""
    if path.endswith("__init__.py"):
        package = path.removesuffix("__init__.py")
        rows = [row for row, homes in enumerate(STAGES) if any(home.startswith(package) for home in homes)]
        if rows:
            return rows[-1]
    rows_and_homes = [(row, home) for row, homes in enumerate(STAGES) for home in homes]
    matches = [(len(home), row) for row, home in rows_and_homes if path == home or (home[-1] == "/" and path.startswith(home))]
    assert matches, f"{path} has no row in docs/ARCHITECTURE.md"
    return max(matches)[1]


def file_of(module: str) -> str | None:
    """Path of a module of this package, or None."""
    base = ROOT / module.replace(".", "/")
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.exists():
            return path.relative_to(ROOT).as_posix()
    return None


def imported_modules(path: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a file imports, wherever in the file it does so."""
    package = path.split("/")[:-1]
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{module}.{alias.name}"
                yield node.lineno, name if module.startswith("cupyinfer") and file_of(name) else module


def test_the_table_is_read() -> None:
    assert len(STAGES) >= 8
    assert stage("cupyinfer/errors.py") == 0
    assert stage("cupyinfer/schedule/geometry.py") < stage("cupyinfer/schedule/tiles.py") < stage("cupyinfer/schedule/__init__.py")
    assert stage("cupyinfer/__init__.py") == len(STAGES) - 1


@pytest.mark.parametrize("own", MODULES)
def test_imports_point_up_the_table(own: str) -> None:
    wrong = []
    for line, module in imported_modules(own):
        if module.split(".")[0] == "cupyinfer":
            target = file_of(module)
            assert target, f"{own}:{line} imports {module}, which does not exist"
            if stage(target) > stage(own):
                wrong.append(f"{own}:{line} imports {target}")
    assert wrong == []


@pytest.mark.parametrize("path", SIZING_MODULES)
def test_sizing_never_names_an_array_library(path: str) -> None:
    assert [(line, module) for line, module in imported_modules(path) if module.split(".")[0] in ARRAY_LIBRARIES] == []


def test_the_package_imports_without_array_libraries() -> None:
    """In a process where they cannot be found: the whole surface and the command line, and every module that sizes."""
    sizing = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in SIZING_MODULES]
    names = ["cupyinfer", "cupyinfer.cli", *sizing]
    code = f"""
import importlib, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ARRAY_LIBRARIES!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Block())
for name in {names!r}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
