# SPDX-License-Identifier: Apache-2.0
"""A small tree of CUDA sources that compiles in a fraction of a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cupyinfer.jit import source

TREE = {
    "params.cuh": "#pragma once\n\nstruct Params {\n  float* out;\n  int n;\n};\n",
    "tile/scale.cuh": '#pragma once\n#include "params.cuh"\n\nfloat scale(const Params& p, float x) {\n  return x * p.n;\n}\n',
    "kernels/fa2_decode.cuh": (
        "// One block writes a scaled row.\n"
        '#include "params.cuh"\n'
        '#include "tile/scale.cuh"  // after its own needs\n'
        '\nextern "C" __global__ void attention(const __grid_constant__ Params p) {\n'
        "  p.out[threadIdx.x] = scale(p, kHeadDimQk);\n"
        "}\n"
    ),
    "kernels/fa2_prefill.cuh": (
        '#include "tile/scale.cuh"\n'
        'extern "C" __global__ void attention(const __grid_constant__ Params p) {\n'
        "  p.out[threadIdx.x] = scale(p, kCtaTileQ);\n"
        "}\n"
    ),
}


@pytest.fixture
def make_tree(tmp_path: Path) -> Callable[..., Path]:
    """Write TREE under a name below tmp_path, with files replaced or added, and give its folder."""

    def make(name: str = "kernels_cu", **replaced: str) -> Path:
        root = tmp_path / name
        for path, text in {**TREE, **{key.replace("__", "/") + ".cuh": text for key, text in replaced.items()}}.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
        return root

    return make


@pytest.fixture
def tree(make_tree: Callable[..., Path]) -> Path:
    return make_tree()


@pytest.fixture
def installed_tree(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small tree in place of the library's own sources."""
    monkeypatch.setattr(source, "kernels_dir", lambda: tree)
    return tree
