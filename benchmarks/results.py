# SPDX-License-Identifier: Apache-2.0
"""Result rows, the file they are kept in, and what a run must say about itself to be repeated."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_PACKAGES = (
    "cupyinfer", "cupy-cuda12x", "cupy-cuda13x", "numpy", "ml-dtypes", "torch", "jax",
    "flashinfer-python", "flash-attn3-jax",
)  # fmt: skip
#: Most relative error of a right answer from ours: bf16 rounding of weights and outputs stays near 2e-3.
_OUR_ERROR = 0.01
#: The same with fp8 queries, whose weights are rounded to e4m3, by 2.6% in the mean square.
_OUR_FP8_ERROR = 0.05
#: The same for peers, some of which compute in fp8 by design.
_PEER_ERROR = 0.1


@dataclass
class Row:
    """One variant on one case.

    Attributes:
        case: name of the case.
        label: the name without its kind.
        kind: "decode" or "prefill".
        variant: name of the implementation.
        ours: whether it is cupyinfer.
        us: median microseconds on the GPU; `us_min` and `us_max` bound the repeats.
        rate: TB/s of KV bytes (decode) or TFLOP/s (prefill), at the median.
        ceiling: the same unit, of a read-only stream of the same bytes or of a large matrix product, in this run.
        share: rate / ceiling.
        ratio_to_best_peer: us over the us of the fastest peer on this case, `best_peer`.
        plan_us: host microseconds of planning from host arrays.
        run_us: host microseconds of enqueueing one call on an idle stream.
        float_bytes: scratch for partial results the variant asks for this case.
        int_bytes: index workspace the variant asks for this case.
        relative_error: worst ``|out - ref| / |ref|`` of the sampled float64 check.
        failure: why the variant has no figures.
        fp8_queries: the case has 8-bit queries.
    """

    case: str
    label: str
    kind: str
    variant: str
    ours: bool
    us: float | None = None
    us_min: float | None = None
    us_max: float | None = None
    rate: float | None = None
    ceiling: float | None = None
    share: float | None = None
    ratio_to_best_peer: float | None = None
    best_peer: str | None = None
    plan_us: float | None = None
    run_us: float | None = None
    float_bytes: int | None = None
    int_bytes: int | None = None
    relative_error: float | None = None
    failure: str | None = None
    fp8_queries: bool = False

    @property
    def wrong(self) -> bool:
        """Whether the check found another result than attention's."""
        allowed = _PEER_ERROR if not self.ours else _OUR_FP8_ERROR if self.fp8_queries else _OUR_ERROR
        return self.relative_error is not None and self.relative_error > allowed

    @property
    def unit(self) -> str:
        """Unit of `rate` and `ceiling`."""
        return "TB/s" if self.kind == "decode" else "TFLOP/s"


@dataclass
class Results:
    """Everything one run found.

    Attributes:
        environment: GPU, driver, versions, commit, options.
        missing_peers: why a peer was left out of the whole run.
        skipped_cases: cases the time budget left no room for.
        rows: in the order they were measured.
    """

    environment: dict[str, Any] = field(default_factory=dict)
    missing_peers: dict[str, str] = field(default_factory=dict)
    skipped_cases: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Replace `path` in one step, so that a run killed at any moment leaves a whole file."""
        scratch = path.with_name(path.name + ".part")
        scratch.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(scratch, path)

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read what `save` wrote."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        return cls(raw["environment"], raw["missing_peers"], raw["skipped_cases"], [Row(**row) for row in raw["rows"]])

    def of_case(self, case: str) -> list[Row]:
        """Rows of one case."""
        return [row for row in self.rows if row.case == case]

    def case_names(self, kind: str) -> list[str]:
        """Cases of one kind, in order, without repeats."""
        return list(dict.fromkeys(row.case for row in self.rows if row.kind == kind))


def fill_ratios(rows: list[Row]) -> None:
    """Set `best_peer` and `ratio_to_best_peer` of the rows of one case; a peer whose result is wrong is no measure."""
    peers = [(row.us, row.variant) for row in rows if not row.ours and row.us is not None and not row.wrong]
    if not peers:
        return
    best_us, best_peer = min(peers)
    for row in rows:
        row.best_peer = best_peer
        row.ratio_to_best_peer = row.us / best_us if row.us is not None else None


def commit() -> str | None:
    """The checked-out commit, with "+changes" where the work tree differs; None outside a checkout."""
    folder = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def versions() -> dict[str, str]:
    """Installed versions of whatever takes part in a run."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def gpu() -> dict[str, Any]:
    """Name, multiprocessors, and driver and run-time versions of the current GPU."""
    import cupy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(cupy.cuda.Device().id)
    return {
        "name": properties["name"].decode(),
        "multiprocessors": int(properties["multiProcessorCount"]),
        "l2_bytes": int(properties["l2CacheSize"]),
        "driver": int(runtime.driverGetVersion()),
        "runtime": int(runtime.runtimeGetVersion()),
        "nvrtc": ".".join(str(part) for part in cupy.cuda.nvrtc.getVersion()),
    }
