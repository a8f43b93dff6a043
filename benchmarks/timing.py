# SPDX-License-Identifier: Apache-2.0
"""How anything is timed here: interleaved, L2 made cold by reading, CUDA events, medians; and the two ceilings of the GPU."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import cupy

from benchmarks import kernels
from benchmarks.variant import Prepared

#: Bytes read between two timed calls: over ten times the L2 of the largest GPU.
FLUSH_BYTES = 640_000_000
_MATMUL_SIZE = 8192


@dataclass(frozen=True)
class Sample:
    """Microseconds of repeated calls."""

    median: float
    low: float
    high: float
    count: int


def summarize(microseconds: Sequence[float]) -> Sample:
    """Median, least and greatest of a non-empty list."""
    return Sample(statistics.median(microseconds), min(microseconds), max(microseconds), len(microseconds))


class Bench:
    """One stream for everything that is timed, a buffer whose reading makes L2 cold, and the ceilings measured so far.

    Use as a context manager: inside it the stream is current for CuPy, and for PyTorch where that is installed.
    """

    def __init__(self) -> None:
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.num_sms = int(cupy.cuda.Device().attributes["MultiProcessorCount"])
        self._stack = ExitStack()
        self._stream_config: dict[int, tuple[int, int]] = {}
        self._stream_data: Any = None
        self._matmul: float | None = None

    def __enter__(self) -> Bench:
        self._stack.enter_context(self.stream)
        try:
            import torch
        except ImportError:
            pass
        else:
            self._stack.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(self.stream.ptr)))
        self._flush_data = kernels.random_array((FLUSH_BYTES // 2,), "bfloat16", seed=1)
        self._sink = cupy.zeros(1, dtype=cupy.uint32)
        self._start, self._stop = cupy.cuda.Event(), cupy.cuda.Event()
        self.stream.synchronize()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def flush_l2(self) -> None:
        """Make L2 cold without a dirty line in it: a flush by writing charges its write-back to the next kernel."""
        kernels.launch_stream(self._flush_data, FLUSH_BYTES, self._sink, 8 * self.num_sms, 4)

    def once(self, launch: Callable[[], object]) -> float:
        """Microseconds of one call on a cold L2. The call is enqueued while the flush still runs, so host time stays outside."""
        self.flush_l2()
        self._start.record(self.stream)
        launch()
        self._stop.record(self.stream)
        self._stop.synchronize()
        return 1e3 * float(cupy.cuda.get_elapsed_time(self._start, self._stop))

    def interleaved(self, timed: Sequence[Prepared], repeats: int, warmups: int = 3) -> dict[str, Sample]:
        """Time each of `timed` once per round, `repeats` rounds, each in an order of its own: drift and hot neighbours hit all alike."""
        for each in timed:
            for _ in range(warmups):
                each.launch()
        self.stream.synchronize()
        microseconds: dict[str, list[float]] = {each.name: [] for each in timed}
        orders = random.Random(0)
        for _ in range(repeats):
            for each in orders.sample(timed, len(timed)):
                microseconds[each.name].append(each.self_timed() if each.self_timed else self.once(each.launch))
        return {name: summarize(values) for name, values in microseconds.items()}

    def host_time(self, call: Callable[[], object], repeats: int = 50) -> Sample:
        """Host microseconds of a call that starts on an idle stream; what it leaves running is not counted."""
        call()
        microseconds = []
        for _ in range(repeats):
            self.stream.synchronize()
            start = time.perf_counter_ns()
            call()
            microseconds.append((time.perf_counter_ns() - start) / 1e3)
        self.stream.synchronize()
        return summarize(microseconds)

    def stream_launch(self, num_bytes: int) -> Callable[[], None]:
        """A launch that reads `num_bytes` once, with the grid that does it fastest on this GPU: the floor of anything that reads them."""
        num_bytes -= num_bytes % 16
        if self._stream_data is None or self._stream_data.nbytes < num_bytes:
            self._stream_data = None
            self._stream_data = kernels.random_array((num_bytes // 2,), "bfloat16", seed=4)
        data = self._stream_data
        if num_bytes not in self._stream_config:
            configs = [(factor * self.num_sms, unroll) for factor in (1, 2, 3, 4, 8) for unroll in kernels.STREAM_UNROLL]

            def median(config: tuple[int, int]) -> float:
                launch = _bind_stream(data, num_bytes, self._sink, config)
                launch()
                return statistics.median(self.once(launch) for _ in range(5))

            self._stream_config[num_bytes] = min(configs, key=median)
        return _bind_stream(data, num_bytes, self._sink, self._stream_config[num_bytes])

    def matmul_tflops(self) -> float:
        """TFLOP/s of one large bf16 matrix product on random data, through PyTorch or else CuPy; measured once."""
        if self._matmul is None:
            a, b = (kernels.random_array((_MATMUL_SIZE, _MATMUL_SIZE), "bfloat16", seed=seed) for seed in (2, 3))
            launch = _matmul(a, b)
            for _ in range(3):
                launch()
            median = statistics.median(self.once(launch) for _ in range(15))
            self._matmul = 2 * _MATMUL_SIZE**3 / median / 1e6
        return self._matmul


def _bind_stream(data: Any, num_bytes: int, sink: Any, config: tuple[int, int]) -> Callable[[], None]:
    num_ctas, unroll = config
    return lambda: kernels.launch_stream(data, num_bytes, sink, num_ctas, unroll)


def _matmul(a: Any, b: Any) -> Callable[[], object]:
    try:
        import torch
    except ImportError:
        return lambda: cupy.matmul(a, b)
    left, right = (torch.from_dlpack(x.view(cupy.int16)).view(torch.bfloat16) for x in (a, b))
    out = torch.empty_like(left)
    return lambda: torch.matmul(left, right, out=out)
