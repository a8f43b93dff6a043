# SPDX-License-Identifier: Apache-2.0
"""The wheel holds the whole package, kernels included, and works away from the checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.project.tree import ROOT, sources


@pytest.fixture(scope="module")
def unpacked_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds what installing the wheel puts into site-packages."""
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("cupyinfer-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out / "site")
    return out / "site"


@pytest.mark.slow
def test_wheel_holds_every_source(unpacked_wheel: Path) -> None:
    package = unpacked_wheel / "cupyinfer"
    for folder, installed in (("cupyinfer", package), ("kernels_cu", package / "kernels_cu")):
        expected = {path.relative_to(ROOT / folder): path.read_bytes() for path in sources(dirs=(folder,))}
        assert expected
        assert {path: (installed / path).read_bytes() for path in expected if (installed / path).exists()} == expected
    assert (package / "py.typed").exists()
    assert {path.name.split("-")[0] for path in unpacked_wheel.iterdir()} == {"cupyinfer"}


@pytest.mark.slow
def test_wheel_finds_its_own_kernels(unpacked_wheel: Path, tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(unpacked_wheel)!r})
import cupyinfer, cupyinfer.jit.source
print(cupyinfer.__file__)
print(cupyinfer.jit.source.kernels_dir())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert [Path(line) for line in done.stdout.splitlines()] == [
        unpacked_wheel / "cupyinfer" / "__init__.py",
        unpacked_wheel / "cupyinfer" / "kernels_cu",
    ]


@pytest.mark.slow
def test_command_line_runs_from_the_wheel(unpacked_wheel: Path, tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(unpacked_wheel)!r}); from cupyinfer.cli import main; sys.exit(main(['--help']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("size", "replay", "compile", "info"):
        assert command in done.stdout
