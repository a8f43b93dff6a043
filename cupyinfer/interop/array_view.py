# SPDX-License-Identifier: Apache-2.0
"""One view of every array that may come in: where it lies, its shape, strides, element type and device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cupyinfer.errors import ArgumentError, ArgumentTypeError
from cupyinfer.interop import dlpack
from cupyinfer.interop.dlpack import ManagedTensor
from cupyinfer.interop.stream import current_stream_ptr, is_capturing, use_device

_PER_THREAD_STREAM = 2
_tuple_new = tuple.__new__


@dataclass(frozen=True, slots=True)
class Device:
    """Where memory lies: kind `"cpu"` or `"cuda"`, and the index of the GPU (0 for the CPU)."""

    kind: str
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


CPU_DEVICE = Device("cpu")


@lru_cache(maxsize=64)
def cuda_device(index: int) -> Device:
    """The Device of a GPU; the same object for the same index."""
    return Device("cuda", index)


class ArrayView(NamedTuple):
    """An array of any library, seen as memory.

    A named tuple, because it is made several times in every `run` and a frozen dataclass takes four times as long to make.

    Attributes:
        ptr: address of the first element; may be 0 when the array is empty.
        shape: sizes, in elements.
        strides: strides, in elements; never left out.
        dtype: canonical name of the element type, such as `"bfloat16"` or `"float8_e4m3fn"`.
        device: where the memory lies.
        owner: keeps the memory alive.
        writable: whether writing is allowed, and reaches the caller's array.
        producer: root package of the array's type, such as `"cupy"`.
    """

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: Device
    owner: object
    writable: bool
    producer: str


_Reader = Callable[[Any, str], ArrayView]
_readers: dict[type, _Reader] = {}
_legacy_producers: set[type] = set()

_DTYPE_NAMES: dict[np.dtype[Any], str] = {
    np.dtype(kind): np.dtype(kind).name
    for kind in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
        *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
        *(ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz, ml_dtypes.float8_e8m0fnu),
    )
}


def as_view(array: Any, argument: str) -> ArrayView:
    """See any array as memory, without a copy.

    CuPy and NumPy arrays are read directly. Arrays of other libraries come through DLPack; on a GPU their pending work is put
    in order before CuPy's current stream of their device, except while that stream is being captured: then the caller sees to it.

    Args:
        array: a CuPy, NumPy, JAX or PyTorch array, or anything with `__dlpack__`; an ArrayView is returned as it is.
        argument: the name errors give it.

    Raises:
        ArgumentTypeError: it is no array, or has an element type or a device that is not known here.
        ArgumentError: its strides are not whole elements.
    """
    reader = _readers.get(type(array))
    if reader is None:
        reader = _readers[type(array)] = _reader_of(type(array))
    return reader(array, argument)


def require_writable(view: ArrayView, argument: str) -> None:
    """Raise ArgumentError unless results may be written to the array behind `view`."""
    if view.writable:
        return
    if view.producer in ("jax", "jaxlib"):
        raise ArgumentError(
            f"{argument}: got a JAX array, which is immutable; leave {argument}= away and take the result that is returned, "
            "or use cupyinfer.interop.jax.attention_call inside jax.jit"
        )
    raise ArgumentError(f"{argument}: got a read-only array of {view.producer} (or a copy of one), but it has to be written to")


def _reader_of(kind: type) -> _Reader:
    """Choose once per type how its arrays are read."""
    if kind is ArrayView:
        return _itself
    if issubclass(kind, np.ndarray):
        return _masked if issubclass(kind, np.ma.MaskedArray) else _view_numpy
    names = {(base.__module__.partition(".")[0], base.__name__) for base in kind.__mro__}
    if ("cupy", "ndarray") in names:
        return _view_cupy
    if ("jax", "Tracer") in names:
        return _tracer
    if hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
        return _view_dlpack
    return _no_array


def _itself(array: ArrayView, argument: str) -> ArrayView:
    return array


def _no_array(array: Any, argument: str) -> ArrayView:
    kind = type(array)
    raise ArgumentTypeError(
        f"{argument}: got {kind.__module__}.{kind.__qualname__}, expected an array (CuPy, NumPy, or any with __dlpack__)"
    )


def _masked(array: Any, argument: str) -> ArrayView:
    raise ArgumentTypeError(f"{argument}: got a numpy.ma.MaskedArray, whose mask would be ignored; expected a plain array")


def _tracer(array: Any, argument: str) -> ArrayView:
    raise ArgumentTypeError(f"{argument}: got a JAX tracer, which has no memory; inside jax.jit use cupyinfer.interop.jax.attention_call")


@lru_cache(maxsize=4096)
def _element_strides(strides: tuple[int, ...], itemsize: int) -> tuple[int, ...] | None:
    """Strides in elements from strides in bytes; None where one is no whole number of elements."""
    return None if any(step % itemsize for step in strides) else tuple(step // itemsize for step in strides)


def _unaligned(array: Any, argument: str) -> ArgumentError:
    return ArgumentError(f"{argument}: strides {array.strides} in bytes, expected multiples of the element size {array.dtype.itemsize}")


def _unknown_dtype(dtype: Any, argument: str) -> ArgumentTypeError:
    return ArgumentTypeError(f"{argument}: got dtype {dtype!r}, expected a native number type or bool")


def _view_cupy(array: Any, argument: str) -> ArrayView:
    memory, dtype = array.data, array.dtype
    name = _DTYPE_NAMES.get(dtype)
    if name is None:
        raise _unknown_dtype(dtype, argument)
    strides = _element_strides(array.strides, dtype.itemsize)
    if strides is None:
        raise _unaligned(array, argument)
    fields = (memory.ptr, array.shape, strides, name, cuda_device(memory.device_id), array, True, "cupy")
    return _tuple_new(ArrayView, fields)


def _view_numpy(array: np.ndarray[Any, Any], argument: str) -> ArrayView:
    dtype = array.dtype
    name = _DTYPE_NAMES.get(dtype)
    if name is None:
        raise _unknown_dtype(dtype, argument)
    strides = _element_strides(array.strides, dtype.itemsize)
    if strides is None:
        raise _unaligned(array, argument)
    return ArrayView(array.ctypes.data, array.shape, strides, name, CPU_DEVICE, array, array.flags.writeable, "numpy")


def _view_dlpack(array: Any, argument: str) -> ArrayView:
    producer = type(array).__module__.partition(".")[0]
    try:
        device_type, device_id = array.__dlpack_device__()
        device_type, device_id = int(device_type), int(device_id)
        if device_type in (dlpack.CUDA, dlpack.CUDA_MANAGED):
            with use_device(device_id):
                tensor = ManagedTensor(_capsule(array, _exchange_stream(producer, device_id)))
        elif device_type in (dlpack.CPU, dlpack.CUDA_HOST):
            tensor = ManagedTensor(_capsule(array, {}))
        else:
            raise BufferError(f"it lies on DLPack device type {device_type}, supported are CPU, CUDA, CUDA host and CUDA managed")
    except ImportError as error:
        raise ArgumentTypeError(f"{argument}: got a GPU array of {producer}, which needs CuPy, and CuPy is not installed") from error
    except MemoryError:
        raise
    except Exception as error:
        if _is_cuda_error(error):
            raise
        kind = type(array)
        raise ArgumentTypeError(
            f"{argument}: {kind.__module__}.{kind.__qualname__} cannot be taken in through DLPack without a copy: {error}"
        ) from error
    writable = not (tensor.read_only or tensor.is_copied or _is_jax_array(array))
    return ArrayView(tensor.ptr, tensor.shape, tensor.strides, tensor.dtype, _device_of(tensor), tensor, writable, producer)


def _is_cuda_error(error: Exception) -> bool:
    """Whether CUDA failed, which says nothing about the array."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(error, (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError))


def _is_jax_array(array: Any) -> bool:
    # JAX exports unversioned capsules, which cannot say that its arrays are immutable.
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.Array)


def _exchange_stream(producer: str, device_id: int) -> dict[str, int | None]:
    """The `stream` argument that makes the producer's pending work come before ours."""
    if is_capturing(device_id):
        # A capture may not wait for work outside of it. JAX does not know -1 and waits on the CPU instead.
        return {"stream": None if producer in ("jax", "jaxlib") else -1}
    handle = current_stream_ptr(device_id) or 1
    if handle == _PER_THREAD_STREAM and producer == "torch":
        # PyTorch refuses the per-thread stream; the legacy stream precedes later work on it.
        handle = 1
    return {"stream": handle}


def _capsule(array: Any, stream: dict[str, int | None]) -> Any:
    kind = type(array)
    if kind not in _legacy_producers:
        try:
            return array.__dlpack__(**stream, max_version=dlpack.MAX_VERSION, copy=False)
        except TypeError:
            # Producers from before DLPack 1.0 do not know the two arguments; another cause raises again below.
            capsule = array.__dlpack__(**stream)
            _legacy_producers.add(kind)
            return capsule
    return array.__dlpack__(**stream)


def _device_of(tensor: ManagedTensor) -> Device:
    if tensor.device_type == dlpack.CUDA:
        return cuda_device(tensor.device_id)
    if tensor.device_type == dlpack.CUDA_MANAGED:
        import cupy

        # The index in the capsule may be 0 whatever the GPU; the driver knows, unless the memory is not bound to one.
        index = int(cupy.cuda.runtime.pointerGetAttributes(tensor.ptr).device) if tensor.ptr else tensor.device_id
        return cuda_device(index if index >= 0 else tensor.device_id)
    return CPU_DEVICE
