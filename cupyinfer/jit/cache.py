# SPDX-License-Identifier: Apache-2.0
"""The cubin cache: keyed by content, shared by any number of processes without a lock between them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cupyinfer.jit.compiler import DEFAULT_OPTIONS, CompiledKernel, CompileReport, compile_cubin, nvrtc_version
from cupyinfer.jit.source import KernelSource

#: Part of every key; raised when the meaning of an entry changes.
SCHEMA = 1
#: A temporary file this old belongs to a process that died; writing one takes milliseconds.
_ABANDONED_SECONDS = 3600


@dataclass
class CacheCounters:
    """What a cache did since it was made.

    Attributes:
        hits: kernels found, in memory or on disk.
        misses: look-ups that found no intact entry.
        compiles: kernels compiled.
    """

    hits: int = 0
    misses: int = 0
    compiles: int = 0


def cache_directory() -> Path | None:
    """Where cubins are kept: CUPYINFER_CACHE_DIR, else cupyinfer/ under XDG_CACHE_HOME or ~/.cache; None without a home."""
    chosen = os.environ.get("CUPYINFER_CACHE_DIR")
    if chosen:
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):  # the XDG specification has relative paths ignored
        return Path(xdg) / "cupyinfer"
    try:
        return Path.home() / ".cache" / "cupyinfer"
    except RuntimeError:
        return None


def write_problem(directory: Path | None) -> str | None:
    """Why kernels cannot be kept in `directory`, as far as it can be seen without writing; None when they can."""
    if directory is None:
        return "in memory only: there is no home directory"
    # What is not there yet is created below the first parent that is.
    existing = next(path for path in (directory, *directory.parents) if os.path.exists(path))
    if not os.path.isdir(existing):
        return f"{existing} is not a directory"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} cannot be written"


def cache_key(source: KernelSource, arch: str, options: tuple[str, ...] = DEFAULT_OPTIONS) -> str:
    """Hex SHA-256 of everything the cubin depends on. Holds no path, so it is the same in every checkout.

    Raises:
        CompileError: there is no NVRTC whose version could be asked.
    """
    content = json.dumps([SCHEMA, nvrtc_version(), arch, options, source.text])
    return hashlib.sha256(content.encode()).hexdigest()


class CubinCache:
    """Kernels in memory and, where the directory can be written, on disk.

    An entry is two files, each written under a temporary name and renamed into place: the cubin, then a JSON file with the
    cubin's digest and the compile report. Anything else found there is a miss. Processes that miss the same entry each
    compile it and write equal files; threads of one process share one compile.

    Attributes:
        directory: where entries are; created at the first store. None keeps all in memory.
        counters: what happened so far.
        disk_error: why the last store could not write, or None.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self.counters = CacheCounters()
        self.disk_error: str | None = None
        self._memory: dict[str, CompiledKernel] = {}
        self._lock = threading.Lock()
        self._key_locks: dict[str, threading.Lock] = {}

    def get(self, source: KernelSource, arch: str, options: tuple[str, ...] = DEFAULT_OPTIONS) -> CompiledKernel:
        """The compiled kernel: from memory, from disk, or compiled now and stored.

        Raises:
            ArgumentError: `arch` is not the name of an architecture.
            CompileError: it had to be compiled, and that failed.
        """
        with self._lock:
            key_lock = self._key_locks.setdefault(cache_key(source, arch, options), threading.Lock())
        with key_lock:
            found = self.lookup(source, arch, options)
            if found is None:
                found = compile_cubin(source, arch, options)
                self.store(source, arch, found, options)
            return found

    def lookup(self, source: KernelSource, arch: str, options: tuple[str, ...] = DEFAULT_OPTIONS) -> CompiledKernel | None:
        """The kernel if it is here and intact; counts a hit or a miss."""
        key = cache_key(source, arch, options)
        found = self._memory.get(key) or self._read(source, arch, key)
        with self._lock:
            if found is None:
                self.counters.misses += 1
            else:
                self.counters.hits += 1
                self._memory[key] = found
        return found

    def store(self, source: KernelSource, arch: str, compiled: CompiledKernel, options: tuple[str, ...] = DEFAULT_OPTIONS) -> None:
        """Keep a kernel that was just compiled. A directory that cannot be written is noted in `disk_error`."""
        key = cache_key(source, arch, options)
        with self._lock:
            self.counters.compiles += 1
            self._memory[key] = compiled
        if self.directory is None:
            return
        entry = {"key": key, "digest": _digest(compiled.cubin), "report": asdict(compiled.report)}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(self.directory)
            # The JSON file comes last: an entry without it is a miss.
            _replace(self.path(source, arch, key), compiled.cubin)
            _replace(self.path(source, arch, key).with_suffix(".json"), json.dumps(entry, indent=1).encode())
        except OSError as error:
            self.disk_error = str(error)
        else:
            self.disk_error = None

    def path(self, source: KernelSource, arch: str, key: str) -> Path:
        """File of the cubin of an entry on disk; its JSON file lies beside it."""
        assert self.directory is not None
        readable = re.sub(r"\W", "_", source.name)[:80]
        return self.directory / f"{readable}-{arch}-{key}.cubin"

    def _read(self, source: KernelSource, arch: str, key: str) -> CompiledKernel | None:
        if self.directory is None:
            return None
        path = self.path(source, arch, key)
        try:
            entry = json.loads(path.with_suffix(".json").read_bytes())
            cubin = path.read_bytes()
            if entry["key"] != key or entry["digest"] != _digest(cubin):
                return None
            return CompiledKernel(cubin, _report(entry["report"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


_caches: dict[Path | None, CubinCache] = {}


def default_cache() -> CubinCache:
    """This process's cache for the directory that the environment names now."""
    directory = cache_directory()
    return _caches.setdefault(directory, CubinCache(directory))


def _report(fields: dict[str, Any]) -> CompileReport:
    return CompileReport(**{**fields, "warnings": tuple(fields["warnings"])})


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _remove_abandoned(directory: Path) -> None:
    for temporary in directory.glob(".*.tmp"):
        with contextlib.suppress(OSError):  # another process may remove it first, and another user's is theirs to remove
            if time.time() - temporary.stat().st_mtime > _ABANDONED_SECONDS:
                temporary.unlink()


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")  # the same directory, so the rename stays in one file system
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
