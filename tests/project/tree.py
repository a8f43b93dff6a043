# SPDX-License-Identifier: Apache-2.0
"""Write the directory tree of the README from the first sentence of every source file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
BEGIN, END = "<!-- tree:start -->", "<!-- tree:end -->"
SOURCE_SUFFIXES = (".py", ".cuh", ".cu")
#: Directories that hold sources, and how many levels of each the README shows.
SOURCE_DIRS = {"cupyinfer": 2, "kernels_cu": 2, "benchmarks": 1, "tests": 1}


def sources(*suffixes: str, dirs: tuple[str, ...] = tuple(SOURCE_DIRS)) -> list[Path]:
    """Every source file below `dirs` with one of `suffixes`, in path order."""
    found = (path for directory in dirs for path in (ROOT / directory).rglob("*") if path.suffix in (suffixes or SOURCE_SUFFIXES))
    return sorted(path for path in found if path.is_file())


def opening(path: Path) -> str:
    """The first paragraph of a file's docstring (Python) or of the comment under its licence line (CUDA), on one line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        comment = ast.get_docstring(ast.parse(text)) or ""
    else:
        match = re.match(r"//[^\n]*\n((?://[^\n]*\n)*)", text)
        comment = re.sub(r"^// ?", "", match.group(1), flags=re.MULTILINE) if match else ""
    return " ".join(comment.strip().split("\n\n")[0].split())


def sentence(path: Path) -> str:
    """The first sentence of `opening`, without its full stop."""
    return re.split(r"\.(?:\s|$)", opening(path))[0]


def entries(directory: Path, levels: int, indent: str = "") -> Iterator[tuple[str, str]]:
    """Rows (indented name, sentence) of a directory and what it holds, `levels` deep."""
    init = directory / "__init__.py"
    yield f"{indent}{directory.name}/", sentence(init) if init.exists() else ""
    if levels == 0:
        return
    indent += "  "
    for path in sorted(directory.iterdir()):
        if path.suffix in SOURCE_SUFFIXES and path.name != "__init__.py":
            yield f"{indent}{path.name}", sentence(path)
    for path in sorted(directory.iterdir()):
        if path.is_dir() and any(child.suffix in SOURCE_SUFFIXES for child in path.iterdir()):
            yield from entries(path, levels - 1, indent)


def tree_text() -> str:
    """The block between the markers of the README."""
    rows = [row for name, levels in SOURCE_DIRS.items() if sources(dirs=(name,)) for row in entries(ROOT / name, levels)]
    width = max(len(name) for name, _ in rows) + 2
    lines = [f"{name:{width}}{text}".rstrip() for name, text in rows]
    return "\n".join([BEGIN, "```", *lines, "```", END])


def with_tree(readme: str) -> str:
    """The README's text with its tree brought up to date.

    Raises:
        ValueError: the text does not hold both markers, in order, once.
    """
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise ValueError(f"README.md must hold {BEGIN} and, below it, {END}, once each")
    before, rest = readme.split(BEGIN)
    return before + tree_text() + rest.split(END)[1]


if __name__ == "__main__":
    README.write_text(with_tree(README.read_text(encoding="utf-8")), encoding="utf-8")
