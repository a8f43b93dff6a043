# SPDX-License-Identifier: Apache-2.0
"""Compiling ahead of time: the catalog of standard kernels, and many kernels into the cache in parallel, with no GPU."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context

from cupyinfer.dtypes import FP8_QUERY_TYPE, HALF_TYPES, itemsize
from cupyinfer.errors import ArgumentError, CupyInferError
from cupyinfer.jit.cache import CubinCache, default_cache, write_problem
from cupyinfer.jit.compiler import CompiledKernel, CompileReport, compile_cubin
from cupyinfer.jit.source import KernelSource, kernel_source
from cupyinfer.jit.variant import HELPER_KERNELS, AttentionVariant, HelperVariant, KernelVariant
from cupyinfer.schedule.profile import profile_for_arch
from cupyinfer.schedule.tiles import CTA_TILE_Q, FA3_TILES, max_tile_q

_STANDARD_HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True)
class CompileOutcome:
    """What became of one kernel.

    Attributes:
        variant: which kernel.
        arch: for which architecture.
        compiled: it was compiled now; False when it was cached, or failed.
        seconds: time its compile took.
        report: what ptxas said; None when it failed.
        error: why it failed, or None.
        not_kept: why a kernel that was compiled now is not in the cache's directory, or None.
    """

    variant: KernelVariant
    arch: str
    compiled: bool
    seconds: float
    report: CompileReport | None
    error: str | None
    not_kept: str | None = None


#: Called after each kernel with its outcome, how many are done, and how many there are.
ProgressCallback = Callable[[CompileOutcome, int, int], None]


def standard_variants() -> tuple[KernelVariant, ...]:
    """The kernels that plain batches need on every arch: 16-bit caches, common head dims, all query tiles, paged and ragged; helpers."""
    attention = tuple(
        AttentionVariant(dtype, dtype, head_dim, head_dim, cta_tile_q, paged)
        for dtype, head_dim, cta_tile_q, paged in itertools.product(HALF_TYPES, _STANDARD_HEAD_DIMS, CTA_TILE_Q, (True, False))
        if cta_tile_q <= max_tile_q(head_dim)
    )
    return (*attention, *(HelperVariant(kernel) for kernel in HELPER_KERNELS))


def fa3_variants() -> tuple[AttentionVariant, ...]:
    """The Hopper kernels that plain prefill needs, paged and ragged; they exist for `cupyinfer.schedule.tiles.FA3_ARCH` alone."""
    found = []
    for o_dtype, q_dtype, paged in itertools.product(HALF_TYPES, (None, FP8_QUERY_TYPE), (True, False)):
        dtype = q_dtype or o_dtype
        for (head_dim_qk, head_dim_vo), rows in FA3_TILES[itemsize(dtype)].items():
            found += [
                AttentionVariant(dtype, dtype, head_dim_qk, head_dim_vo, tile_q, paged, backend="fa3", kv_tile=kv_tile, o_dtype=o_dtype)
                for tile_q, kv_tiles in rows.items()
                for kv_tile in kv_tiles
            ]
    return tuple(found)


def compile_variants(
    variants: Iterable[KernelVariant],
    archs: Iterable[str],
    on_progress: ProgressCallback | None = None,
    workers: int | None = None,
    cache: CubinCache | None = None,
) -> list[CompileOutcome]:
    """Compile every variant for every arch into the cache; one that fails does not stop the others.

    NVRTC compiles one program at a time per process, so more than one worker means processes. They are spawned: a script
    that calls this at its top level guards it with ``if __name__ == "__main__"``.

    Args:
        variants: which kernels.
        archs: architectures of `cupyinfer.schedule.profile.ARCHS`.
        on_progress: called in this process after each kernel, cached ones first.
        workers: processes, by default one per usable CPU; 1 compiles in this process.
        cache: where cubins go, by default `default_cache()`.

    Returns:
        One outcome per (variant, arch), variants varying fastest.

    Raises:
        ArgumentError: an arch that is not in ARCHS, or workers below 1.
        CompileError: there is no NVRTC.
    """
    if workers is not None and workers < 1:
        raise ArgumentError(f"workers: got {workers}, needs at least 1")
    cache = default_cache() if cache is None else cache
    profiles = [profile_for_arch(arch) for arch in archs]
    jobs = [(variant, profile) for profile, variant in itertools.product(profiles, list(variants))]
    outcomes: dict[int, CompileOutcome] = {}

    def finish(
        job: int, compiled: bool, seconds: float, report: CompileReport | None, error: str | None, not_kept: str | None = None
    ) -> None:
        variant, profile = jobs[job]
        outcomes[job] = CompileOutcome(variant, profile.arch, compiled, seconds, report, error, not_kept)
        if on_progress is not None:
            on_progress(outcomes[job], len(outcomes), len(jobs))

    missing: dict[int, KernelSource] = {}
    for job, (variant, profile) in enumerate(jobs):
        try:
            source = kernel_source(variant, profile)
        except CupyInferError as error:
            finish(job, False, 0.0, None, str(error))
            continue
        cached = cache.lookup(source, profile.arch)
        if cached is None:
            missing[job] = source
        else:
            finish(job, False, 0.0, cached.report, None)
    # Only this process writes the cache, so a worker that dies leaves nothing behind.
    tasks = [(job, source, jobs[job][1].arch) for job, source in missing.items()]
    for job, seconds, result in _compile_all(tasks, workers or _usable_cpus()):
        if isinstance(result, CompiledKernel):
            cache.store(missing[job], jobs[job][1].arch, result)
            finish(job, True, seconds, result.report, None, cache.disk_error if cache.directory else write_problem(None))
        else:
            finish(job, False, seconds, None, result)
    return [outcomes[job] for job in range(len(jobs))]


_Task = tuple[int, KernelSource, str]
_Result = tuple[int, float, CompiledKernel | str]


def _compile_all(tasks: Sequence[_Task], workers: int) -> Iterator[_Result]:
    workers = min(workers, len(tasks))
    if workers <= 1:
        yield from map(_compile_task, tasks)
        return
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        futures: dict[Future[_Result], int] = {pool.submit(_compile_task, task): task[0] for task in tasks}
        for future in as_completed(futures):
            try:
                yield future.result()
            except BrokenProcessPool as error:
                yield futures[future], 0.0, f"a compiling process died: {error}"
    finally:
        pool.shutdown(cancel_futures=True)


def _compile_task(task: _Task) -> _Result:
    job, source, arch = task
    start = time.perf_counter()
    result: CompiledKernel | str
    try:
        result = compile_cubin(source, arch)
    except CupyInferError as error:
        result = str(error)
    return job, time.perf_counter() - start, result


def _usable_cpus() -> int:
    # A container's share of CPUs shows in the affinity mask, where the system has one.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
