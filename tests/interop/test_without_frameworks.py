# SPDX-License-Identifier: Apache-2.0
"""NumPy alone is enough: nothing here imports CuPy, JAX or PyTorch until one of their arrays comes in."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cupy", "cupy_backends", "cupyx", "jax", "jaxlib", "torch"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

sys.meta_path.insert(0, Absent())
import numpy as np
import cupyinfer.interop.jax
from cupyinfer.errors import ArgumentTypeError
from cupyinfer.interop import as_view, empty_output, hand_back, release_after_work

q = np.ones((2, 4, 8), np.float16)
view = as_view(q, "q")
out = empty_output(view.shape, "bfloat16", view.device)
assert hand_back(out, q) is out
release_after_work([view])

class OnGpu:
    def __dlpack__(self, **request):
        raise AssertionError("must not be asked")

    def __dlpack_device__(self):
        return (2, 0)

try:
    as_view(OnGpu(), "q")
except ArgumentTypeError as error:
    assert "needs CuPy, and CuPy is not installed" in str(error), error
else:
    raise AssertionError("a GPU array was accepted without CuPy")
print("done")
"""


def test_numpy_alone() -> None:
    result = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "done"
