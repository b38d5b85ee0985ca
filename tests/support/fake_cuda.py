"""Tensors that claim to lie on a GPU, for calls that must be rejected before anything runs."""

import ctypes
from collections.abc import Sequence

import tvm_ffi

_CUDA = 2


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("index", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    """DLManagedTensor without a deleter: this module owns the memory and never frees it."""

    _fields_ = [
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_OWNED: list[object] = []
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class _Producer:
    def __init__(self, managed: _Managed) -> None:
        self._managed = managed

    def __dlpack_device__(self) -> tuple[int, int]:
        device = self._managed.tensor.device
        return device.kind, device.index

    def __dlpack__(self, **_: object) -> object:
        return _new_capsule(ctypes.addressof(self._managed), b"dltensor", None)


def fake_int32(
    shape: Sequence[int],
    strides: Sequence[int] | None = None,
    *,
    index: int = 0,
    address: int = 1 << 20,
    type_code: int = 0,
    bits: int = 32,
) -> tvm_ffi.Tensor:
    """A tensor at `address` of cuda:`index`, contiguous unless `strides` (elements) says so.

    `type_code` 0 is int, 1 unsigned int, 2 float, as in DLPack, with so many `bits`. Nothing may
    read its data.
    """
    if strides is None:
        strides = [1] * len(shape)
        for dim in reversed(range(len(shape) - 1)):
            strides[dim] = strides[dim + 1] * shape[dim + 1]
    rank = len(shape)
    sizes, steps = (ctypes.c_int64 * rank)(*shape), (ctypes.c_int64 * rank)(*strides)
    dtype = _DataType(type_code, bits, 1)
    tensor = _Tensor(address, _Device(_CUDA, index), rank, dtype, sizes, steps, 0)
    managed = _Managed(tensor, None, None)
    _OWNED.append((managed, sizes, steps))
    return tvm_ffi.from_dlpack(_Producer(managed))
