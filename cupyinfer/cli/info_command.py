# SPDX-License-Identifier: Apache-2.0
"""`cupyinfer info`: what is installed, which GPUs and which kernel cache there are, and which backends can run."""

from __future__ import annotations

import argparse
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import cupyinfer
from cupyinfer.backends.device import has_gpu, read_profile
from cupyinfer.cli.output import Report, count, format_bytes
from cupyinfer.errors import CupyInferError
from cupyinfer.jit.cache import cache_directory, write_problem
from cupyinfer.jit.compiler import nvrtc_version
from cupyinfer.schedule.tiles import FA3_ARCH

_DESCRIPTION = """\
Show what this machine can do: versions, GPUs, the kernel cache, and for each backend whether it can run and why not.
Put its output in bug reports.

  cupyinfer info
  cupyinfer info --json | python -m json.tool
"""
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the program's parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "info", help="what is installed, which GPU, which cache", description=_DESCRIPTION
    )
    return parser


def run(args: argparse.Namespace) -> Report:
    """Look around; nothing is compiled or launched."""
    versions = {
        "cupyinfer": cupyinfer.__version__,
        "python": platform.python_version(),
        **{name: _installed(name) for name in ("numpy", "ml_dtypes", "jax")},
        "cupy": _cupy_version(),
    }
    nvrtc, nvrtc_problem = _nvrtc()
    versions["nvrtc"] = nvrtc
    gpus = _gpus()
    fa2_problem = _fa2_problem(versions["cupy"], nvrtc_problem, gpus)
    backends = {"host": None, "fa2": fa2_problem, "fa3": fa2_problem or _fa3_problem(gpus)}
    cache = _cache()
    data = {
        "versions": versions,
        "gpus": gpus,
        "driver": _driver(),
        "cache": cache,
        "backends": {name: {"usable": problem is None, "why_not": problem} for name, problem in backends.items()},
    }
    lines = ["installed"]
    lines += [f"  {name:10} {version or 'not installed'}" for name, version in versions.items()]
    lines += ["GPUs"]
    lines += [f"  {idx}: {gpu['name']}, {gpu.get('num_sms', '?')} SMs, {gpu['arch']}" for idx, gpu in enumerate(gpus)] or ["  none visible"]
    lines += [f"  driver {data['driver']}"] if data["driver"] else []
    kernels = f"{count(cache['kernels'], 'kernel')}, {format_bytes(cache['bytes'])}"
    lines += ["kernel cache", *([f"  {cache['directory']}"] if cache["directory"] else []), f"  {kernels}"]
    lines += [f"  new kernels are not kept: {cache['problem']}"] if cache["problem"] else []
    lines += ["backends"]
    lines += [f"  {name:10} {'usable' if problem is None else f'not usable: {problem}'}" for name, problem in backends.items()]
    return Report(data, "\n".join(lines))


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cupy_version() -> str | None:
    try:
        import cupy
    except ImportError:
        return None
    return str(cupy.__version__)


def _nvrtc() -> tuple[str | None, str | None]:
    try:
        return ".".join(map(str, nvrtc_version())), None
    except CupyInferError as error:
        return None, str(error)


def _gpus() -> list[dict[str, Any]]:
    if not has_gpu():
        return []
    from cupy.cuda import runtime

    gpus: list[dict[str, Any]] = []
    for device in range(runtime.getDeviceCount()):
        try:
            profile = read_profile(device)
        except CupyInferError as error:
            gpus.append({"name": runtime.getDeviceProperties(device)["name"].decode(), "arch": None, "problem": str(error)})
        else:
            gpus.append({"name": profile.name, "arch": profile.arch, "num_sms": profile.num_sms, "problem": None})
    return gpus


def _driver() -> str | None:
    """Version of the NVIDIA driver and the newest CUDA it serves, as far as they can be read."""
    parts = []
    if _DRIVER_FILE.exists():
        match = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", _DRIVER_FILE.read_text(errors="replace"))
        parts += [match[0]] if match else []
    if has_gpu():
        from cupy.cuda import runtime

        version = runtime.driverGetVersion()
        parts.append(f"CUDA {version // 1000}.{version % 1000 // 10}")
    return ", ".join(parts) or None


def _fa2_problem(cupy: str | None, nvrtc_problem: str | None, gpus: list[dict[str, Any]]) -> str | None:
    if cupy is None:
        return "CuPy is not installed; pip install 'cupyinfer[cuda12]' (or 'cupyinfer[cuda13]' for a CUDA 13 driver)"
    if nvrtc_problem is not None:
        return nvrtc_problem
    if not gpus:
        return "no CUDA GPU is visible through CuPy; kernels still compile (cupyinfer compile)"
    problems = [gpu["problem"] for gpu in gpus]
    return None if None in problems else str(problems[0])


def _fa3_problem(gpus: list[dict[str, Any]]) -> str | None:
    archs = [gpu["arch"] for gpu in gpus]
    return None if FA3_ARCH in archs else f"prefill on {FA3_ARCH} only, here is {', '.join(sorted({str(arch) for arch in archs}))}"


def _cache() -> dict[str, Any]:
    directory = cache_directory()
    cubins = [] if directory is None else [path.stat().st_size for path in directory.glob("*.cubin")]
    return {
        "directory": None if directory is None else str(directory),
        "kernels": len(cubins),
        "bytes": sum(cubins),
        "problem": write_problem(directory),
    }
