"""Rows as vectors of bytes, and where an (expert, slot) pair lies: shared by all kernels here."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int8, Int16, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_tensor

INDEX_TYPES = {"int32": Int32, "int64": Int64}
WORDS = {1: Int8, 2: Int16, 4: Int32, 8: Int32, 16: Int32}


def vector_registers(nbytes: int):
    """Registers for one vector."""
    return cute.make_rmem_tensor(nbytes * 8 // WORDS[nbytes].width, WORDS[nbytes])


def row_start(rows: cute.Tensor, row) -> cute.Pointer:
    """Where a row of `rows` (bytes) begins."""
    return rows.iterator + Int64(row) * rows.stride[0]


def vector_at(start: cute.Pointer, index, nbytes: int) -> cute.Tensor:
    """Vector number `index` of the row at `start`, which is aligned to `nbytes`."""
    word = WORDS[nbytes]
    address = start.toint() + Int64(index) * nbytes
    pointer = cute.make_ptr(word, address, cute.AddressSpace.gmem, assumed_align=nbytes)
    return cute.make_tensor(pointer, cute.make_layout(nbytes * 8 // word.width))


@cute.jit
def follow_kernel_ahead():
    """Wait for the kernel ahead on the stream, then let the next one be launched.

    All kernels here are launched while the one ahead may still run. Every thread calls this
    before it touches memory that another kernel writes or reads, so that launches in a row
    overlap in nothing but their start; only the ring of the sort is filled once before it.
    """
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def zero_row(rows: cute.Tensor, row, lane: Int32, lanes: Int32, nbytes: cutlass.Constexpr):
    """Zero a row, by `lanes` threads."""
    zero = vector_registers(nbytes)
    zero.fill(0)
    start, vectors = row_start(rows, row), rows.shape[1] // nbytes
    vector = lane
    while vector < vectors:
        cute.autovec_copy(zero, vector_at(start, vector, nbytes))
        vector = vector + lanes


@cute.jit
def row_of(expert, slot, offsets: cute.Tensor, rows: Int32) -> Int32:
    """Row offsets[expert] + slot, or -1 when expert, slot or row is out of range.

    Nothing here overflows: all differences and sums are of numbers from 0 to 2**31 - 1.
    """
    known = Boolean((expert >= 0) & (expert < offsets.shape[0] - 1))
    index = Int32(0)
    if known:
        index = Int32(expert)
    start, end = offsets[index], offsets[index + 1]
    limit = Int32(0)
    if (end > 0) & (start >= 0) & (start < rows):
        limit = Int32(cutlass.min(end, type(end)(rows)))
    else:
        start = type(start)(0)
    room = limit - Int32(start)
    row = Int32(-1)
    if known & (room > 0) & (slot >= 0) & (slot < room):
        row = Int32(start) + Int32(slot)
    return row


def fake_vector(dtype, size):
    """A contiguous vector, for compiling."""
    return make_fake_tensor(dtype, (size,), (1,), assumed_align=dtype.width // 8)


def fake_rows(rows, row_bytes):
    """Rows of bytes at any address and with any stride, for compiling."""
    return make_fake_tensor(Uint8, (rows, row_bytes), (cute.sym_int64(), 1), assumed_align=1)


def fake_pairs(spec, tokens):
    """(expert, slot, offsets) of `tokens` tokens, for compiling."""
    types = [INDEX_TYPES[d] for d in (spec.expert_dtype, spec.slot_dtype, spec.offset_dtype)]
    sizes = (tokens, tokens, cute.sym_int())
    return tuple(fake_vector(dtype, size) for dtype, size in zip(types, sizes, strict=True))
