# SPDX-License-Identifier: Apache-2.0
"""Arrays of NumPy, JAX, PyTorch and any DLPack producer seen as memory: same bytes, right strides, right lifetime, clear refusals."""

from __future__ import annotations

import gc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyinfer.errors import ArgumentError, ArgumentTypeError
from cupyinfer.interop import CPU_DEVICE, ArrayView, as_view, numpy_array, require_writable
from tests.interop.fake_producer import BFLOAT, E4M3FN, FLOAT, IS_COPIED, READ_ONLY, UINT, FakeProducer, OldProducer

DTYPES = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "bool",
    "int8",
    "uint8",
    "int32",
    "int64",
    "complex64",
)


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


@pytest.mark.parametrize("name", DTYPES)
def test_numpy_is_read_directly(name: str) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype_of(name))
    view = as_view(array, "q")
    assert view == ArrayView(array.ctypes.data, (2, 3, 4), (12, 4, 1), name, CPU_DEVICE, array, True, "numpy")
    assert numpy_array(view) is array


def test_numpy_strided_view_and_zero_dimensions() -> None:
    base = np.zeros((4, 6, 8), ml_dtypes.bfloat16)
    part = base[1:, ::-2, 2:5].transpose(2, 0, 1)
    view = as_view(part, "k")
    assert (view.ptr, view.shape, view.strides) == (base.ctypes.data + (48 + 40 + 2) * 2, (3, 3, 3), (1, 48, -16))
    scalar = as_view(np.array(3.0, np.float32), "k")
    assert (scalar.shape, scalar.strides) == ((), ())


def test_numpy_without_elements() -> None:
    view = as_view(np.empty((0, 8, 128), np.float16), "q")
    assert view.shape == (0, 8, 128) and view.dtype == "float16"


def test_a_view_is_its_own_view() -> None:
    view = as_view(np.zeros(3), "q")
    assert as_view(view, "q") is view


@pytest.mark.parametrize(
    "bad",
    [[1.0, 2.0], 3.0, None, "q", np.float32(1), object(), (np.zeros(2), np.zeros(2))],
    ids=["list", "float", "none", "str", "scalar", "object", "tuple"],
)
def test_what_is_no_array_is_refused_by_name(bad: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^paged_kv_indptr: got .*, expected an array"):
        as_view(bad, "paged_kv_indptr")


@pytest.mark.parametrize(
    "bad", [np.zeros(2, ">f4"), np.array(["a"]), np.array([object()]), np.zeros(2, [("x", "f4")])], ids=lambda a: a.dtype.str
)
def test_numpy_dtypes_without_a_name_are_refused(bad: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^q: got dtype"):
        as_view(bad, "q")


def test_numpy_strides_of_half_elements_are_refused() -> None:
    record = np.zeros(4, np.dtype([("tag", "u1"), ("x", "<f4")]))
    with pytest.raises(ArgumentError, match=r"^q: strides \(5,\) in bytes"):
        as_view(record["x"], "q")


def test_masked_arrays_are_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r"^q: .*mask"):
        as_view(np.ma.masked_array([1.0, 2.0], mask=[0, 1]), "q")


@pytest.mark.parametrize("version", [None, (1, 0), (1, 3)], ids=["unversioned", "1.0", "1.3"])
@pytest.mark.parametrize(("code", "name"), [(FLOAT, "float16"), (BFLOAT, "bfloat16"), (E4M3FN, "float8_e4m3fn"), (UINT, "uint8")])
def test_dlpack_strides_offset_and_bytes(version: tuple[int, int] | None, code: int, name: str) -> None:
    base = np.arange(120).astype(dtype_of(name)).reshape(4, 5, 6)
    part = base[1::2, :, 5:0:-2]
    producer = FakeProducer(part, code, version=version, byte_offset=16)
    view = as_view(producer, "k")
    assert (view.ptr, view.shape, view.strides, view.dtype) == (part.ctypes.data, (2, 5, 3), (60, 6, -2), name)
    assert view.device == CPU_DEVICE and view.writable
    seen = numpy_array(view)
    assert seen.dtype == base.dtype and seen.tobytes() == part.tobytes()
    seen[1, 4, 2] = 1
    assert base[3, 4, 1] == 1


def test_dlpack_left_out_strides_are_filled_in() -> None:
    view = as_view(FakeProducer(np.zeros((2, 0, 3, 4), np.float32), FLOAT, with_strides=False), "q")
    assert view.strides == (12, 12, 4, 1)
    assert numpy_array(view).shape == (2, 0, 3, 4)
    assert as_view(FakeProducer(np.zeros((), np.float32), FLOAT, with_strides=False), "q").strides == ()


def test_dlpack_asks_for_the_newest_version_without_a_copy_and_no_stream_on_the_cpu() -> None:
    producer = FakeProducer(np.zeros(2, np.float32), FLOAT)
    as_view(producer, "q")
    assert producer.requests == [{"max_version": (1, 1), "copy": False}]


def test_dlpack_producers_of_the_old_protocol() -> None:
    array = np.arange(6, dtype=np.float32)
    for _ in range(2):
        assert as_view(OldProducer(array, FLOAT), "q").ptr == array.ctypes.data


@pytest.mark.parametrize("version", [None, (1, 1)], ids=["unversioned", "versioned"])
def test_dlpack_deleter_runs_once_and_only_after_the_last_user(version: tuple[int, int] | None) -> None:
    producer = FakeProducer(np.arange(6, dtype=np.float32), FLOAT, version=version)
    view: ArrayView | None = as_view(producer, "q")
    assert producer.capsule_name == (b"used_dltensor" if version is None else b"used_dltensor_versioned")
    assert view is not None
    array = numpy_array(view)
    view = None
    gc.collect()
    assert producer.num_deletes == 0
    assert array.tolist() == [0, 1, 2, 3, 4, 5]
    part = array[2:]
    del array
    gc.collect()
    assert producer.num_deletes == 0
    del part
    gc.collect()
    assert producer.num_deletes == 1


def test_the_producer_may_go_before_the_view() -> None:
    source = np.arange(1000, dtype=np.float32)

    class Exporter:
        def __init__(self, array: np.ndarray[Any, Any]) -> None:
            self.__dlpack = array.__dlpack__
            self.__device = array.__dlpack_device__

        def __dlpack__(self, **request: Any) -> Any:
            return self.__dlpack(**request)

        def __dlpack_device__(self) -> Any:
            return self.__device()

    exporter = Exporter(source * 2)
    view = as_view(exporter, "q")
    del exporter
    gc.collect()
    filler = [np.full(1000, np.float32(-1)) for _ in range(50)]
    assert np.array_equal(numpy_array(view), source * 2)
    assert len(filler) == 50


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"version": (2, 0)}, "2.0 is newer"),
        ({"lanes": 4}, "4 lanes"),
        ({"device": (10, 0)}, "device type 10"),
    ],
)
def test_dlpack_capsules_that_cannot_be_read_are_refused_and_left_unused(options: dict[str, Any], reason: str) -> None:
    producer = FakeProducer(np.zeros(4, np.float32), FLOAT, **options)
    with pytest.raises(ArgumentTypeError, match=rf"^v: .*{reason}"):
        as_view(producer, "v")
    assert producer.last_capsule is None or not producer.capsule_name.startswith(b"used")


def test_dlpack_unknown_element_type_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r"^v: .*code 99, 32 bits"):
        as_view(FakeProducer(np.zeros(4, np.float32), 99), "v")


def test_dlpack_used_capsules_and_failing_producers_are_refused() -> None:
    class Broken(FakeProducer):
        def __dlpack__(self, **request: Any) -> Any:
            raise BufferError("detach it first")

    class Again(FakeProducer):
        def __dlpack__(self, **request: Any) -> Any:
            return self.last_capsule or super().__dlpack__(**request)

    with pytest.raises(ArgumentTypeError, match=r"^q: .*detach it first"):
        as_view(Broken(np.zeros(4, np.float32), FLOAT), "q")
    again = Again(np.zeros(4, np.float32), FLOAT)
    first = as_view(again, "q")
    with pytest.raises(ArgumentTypeError, match=r"^q: .*not an unused DLPack capsule"):
        as_view(again, "q")
    del first
    assert again.num_deletes == 1


def test_writable() -> None:
    frozen = np.zeros(4, np.float32)
    frozen.flags.writeable = False
    require_writable(as_view(np.zeros(4, np.float32), "out"), "out")
    require_writable(as_view(FakeProducer(np.zeros(4, np.float32), FLOAT), "out"), "out")
    for array in (frozen, FakeProducer(frozen, FLOAT, flags=READ_ONLY), FakeProducer(frozen, FLOAT, flags=IS_COPIED)):
        view = as_view(array, "out")
        with pytest.raises(ArgumentError, match=r"^out: got a read-only array"):
            require_writable(view, "out")
        with pytest.raises(ValueError, match="read-only"):
            numpy_array(view)[0] = 1


@pytest.mark.parametrize("name", [name for name in DTYPES if name not in ("float64", "int64")])
def test_jax_arrays_come_in_without_a_copy(name: str) -> None:
    jnp = pytest.importorskip("jax.numpy")
    host = np.arange(24).reshape(2, 3, 4).astype(dtype_of(name))
    array = jnp.asarray(host)
    view = as_view(array, "k")
    assert (view.ptr, view.shape, view.strides, view.dtype) == (array.unsafe_buffer_pointer(), (2, 3, 4), (12, 4, 1), name)
    assert view.device == CPU_DEVICE
    seen = numpy_array(view)
    del array, view
    gc.collect()
    assert seen.dtype == host.dtype and seen.tobytes() == host.tobytes()


def test_jax_arrays_are_no_outputs_and_tracers_no_arrays() -> None:
    jax = pytest.importorskip("jax")
    with pytest.raises(ArgumentError, match=r"^out: got a JAX array, which is immutable; leave out= away"):
        require_writable(as_view(jax.numpy.zeros(3), "out"), "out")
    with pytest.raises(ArgumentTypeError, match=r"^q: got a JAX tracer.*attention_call"):
        jax.jit(lambda x: as_view(x, "q").ptr)(jax.numpy.zeros(3))
    assert as_view(jax.numpy.zeros((0, 4)), "q").shape == (0, 4)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "bool", "int32", "int64"])
def test_torch_tensors_come_in_without_a_copy(name: str) -> None:
    torch = pytest.importorskip("torch")
    base = torch.arange(24).reshape(4, 6).to(getattr(torch, name))
    part = base[1:].T
    view = as_view(part, "k")
    assert (view.ptr, view.shape, view.strides, view.dtype) == (part.data_ptr(), (6, 3), (1, 6), name)
    assert view.writable and view.producer == "torch"
    seen = numpy_array(view)
    seen[5, 2] = 1
    assert float(base[3, 5]) == 1


def test_torch_tensors_with_gradients_are_refused_by_name() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ArgumentTypeError, match=r"^q: torch.Tensor .*detach"):
        as_view(torch.zeros(3, requires_grad=True), "q")


class _Failing(FakeProducer):
    """Fails while it exports."""

    def __init__(self, error: Exception) -> None:
        super().__init__(np.zeros(4, np.float32), FLOAT)
        self.error = error

    def __dlpack__(self, **request: Any) -> Any:
        raise self.error


def test_lack_of_memory_is_no_fault_of_the_array() -> None:
    errors: list[Exception] = [MemoryError("no memory")]
    try:
        import cupy
    except ImportError:
        pass
    else:
        errors.append(cupy.cuda.runtime.CUDARuntimeError(2))
    for error in errors:
        with pytest.raises(type(error)) as caught:
            as_view(_Failing(error), "q")
        assert caught.value is error
    with pytest.raises(ArgumentTypeError, match=r"^q: .*cannot be taken in through DLPack without a copy: strange"):
        as_view(_Failing(RuntimeError("strange")), "q")
