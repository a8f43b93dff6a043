# SPDX-License-Identifier: Apache-2.0
"""The README shows the tree as it is."""

from __future__ import annotations

import pytest

from tests.project.tree import BEGIN, END, README, tree_text, with_tree


def test_readme_tree_is_current() -> None:
    readme = README.read_text(encoding="utf-8")
    assert with_tree(readme) == readme, "run `make format`"


def test_with_tree_replaces_only_the_block() -> None:
    assert with_tree(f"before\n{BEGIN}\nold\n{END}\nafter\n") == f"before\n{tree_text()}\nafter\n"


@pytest.mark.parametrize("readme", ["", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_with_tree_refuses_missing_markers(readme: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        with_tree(readme)
