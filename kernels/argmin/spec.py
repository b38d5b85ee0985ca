"""Variants and launch geometry of argmin and argmax. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cute_moe.kernels.device.sizes import ceil_div, power_of_two

THREADS = 256
ITEM_BYTES = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}
STAGE_BYTES = 16 * 1024
LINE_BYTES = 128
# A copy starts where its first byte lies within a line, and ends at a multiple of 16 bytes.
STAGE_STRIDE = STAGE_BYTES + LINE_BYTES


@dataclass(frozen=True)
class ScanSpec:
    """One compiled variant of the scan; the input is seen as [outer, reduce, inner].

    kind "rows":    inner is 1; vectors lie along the reduction
         "columns": threads walk down `columns` vectors, `Walk.tx` apart, by loads of their own
         "stream":  the same with single elements, through a ring of bulk copies in shared memory
    vector: elements of a load; unroll: steps whose loads are in flight together; threads: those
    that scan.
    """

    dtype: str
    largest: bool
    kind: str
    vector: int = 1
    columns: int = 1
    unroll: int = 1
    threads: int = THREADS
    stages: int = 0

    @property
    def block(self) -> int:
        """Threads of a CTA."""
        return self.threads + (32 if self.stages else 0)

    @property
    def smem_bytes(self) -> int:
        """One (place, key) for each thread, and the ring with its barriers."""
        return 12 * self.block + (STAGE_STRIDE + 16) * self.stages


@dataclass(frozen=True)
class CombineSpec:
    """The one variant of the combine kernel."""

    threads: int = THREADS

    @property
    def smem_bytes(self) -> int:
        """One (place, key) for each thread."""
        return 12 * self.threads


class Walk(NamedTuple):
    """Run-time geometry of a scan.

    A CTA has tx columns (of vectors) x ty workers x tz outer indices. A reduction is cut into
    `splits` pieces of `chunk` steps (rows, or vectors of a row), an inner dimension into `tiles`.
    A stage of the ring holds `depth` rows.
    """

    outer: int
    reduce: int
    inner: int
    chunk: int
    splits: int
    tiles: int
    tx: int
    ty: int
    tz: int
    depth: int = 1


COMBINE = CombineSpec()
STREAM_ROW_BYTES = 2048  # shorter rows are read by loads of the threads
STREAM_BYTES = 16 << 20  # so are smaller inputs
PAIR_BYTES = 24  # a (place, key) written and read
MAX_CHUNK = 1 << 30  # steps of one CTA: they are counted in 32 bits


class Plan(NamedTuple):
    """A scan and its geometry; what the combine kernel needs where splits > 1."""

    scan: ScanSpec
    walk: Walk
    outputs: int
    pair_words: int  # int64 words of all (place, key)
    combine_tx: int  # outputs of a CTA


def plan(
    outer: int, reduce: int, inner: int, dtype: str, largest: bool, address: int, sm_count: int
) -> Plan:
    """How to reduce [outer, reduce, inner], none of them 0; `address` of the data modulo 16."""
    sizes = (outer, reduce, inner)
    item = ITEM_BYTES[dtype]
    if inner == 1:
        scan = ScanSpec(dtype, largest, "rows", vector=16 // item, unroll=4)
        walk = _walk_rows(scan, sizes, sm_count)
    elif inner * item >= STREAM_ROW_BYTES and reduce * inner * outer * item >= STREAM_BYTES:
        scan = ScanSpec(dtype, largest, "stream", columns=8, threads=512, stages=6)
        walk = _walk_stream(scan, sizes, sm_count)
    else:
        aligned = not (address % 16 or inner * item % 16)
        vector, unroll = (16 // item, 8) if aligned else (1, 16)
        scan = ScanSpec(dtype, largest, "columns", vector=vector, unroll=unroll)
        walk = _walk_columns(scan, sizes, sm_count)
    outputs = outer * inner
    pairs = walk.splits * outputs
    workers = power_of_two(walk.splits)
    tx = max(THREADS // workers, min(outputs, 32))
    return Plan(scan, walk, outputs, pairs + ceil_div(pairs, 2), tx)


def _walk_rows(scan: ScanSpec, sizes: tuple[int, int, int], sm_count: int) -> Walk:
    """A group of lanes for a row; where that makes few warps and rows are long, one CTA or more."""
    outer, reduce, _ = sizes
    steps = max(reduce // scan.vector, 1)
    batch = THREADS * scan.unroll
    lanes = min(max(power_of_two(ceil_div(steps, scan.unroll)), 2 * scan.vector), 32)
    if steps <= 32 * scan.unroll or outer * 32 >= 8 * sm_count * THREADS:
        return _cut(sizes, steps, 1, 1, 1, lanes, THREADS // lanes)
    splits = min(ceil_div(2 * steps, batch), ceil_div(16 * sm_count, outer))
    return _cut(sizes, steps, splits, 1, 1, THREADS, 1)


def _walk_columns(scan: ScanSpec, sizes: tuple[int, int, int], sm_count: int) -> Walk:
    """Wide tiles, unless that makes too few CTAs; then more workers, then splits."""
    outer, reduce, inner = sizes
    vectors = inner // scan.vector
    tx = min(vectors, THREADS)
    while True:
        tiles = ceil_div(vectors, tx)
        tx = ceil_div(vectors, tiles)
        ty = max(min(THREADS // tx, ceil_div(reduce, scan.unroll)), 1)
        tz = THREADS // (tx * ty) if tiles == 1 else 1
        blocks = tiles * ceil_div(outer, tz)
        if blocks >= 2 * sm_count or tx <= 32 or reduce <= ty * scan.unroll:
            break
        tx = ceil_div(tx, 2)
    splits = min(ceil_div(8 * sm_count, blocks), reduce // (8 * ty * scan.unroll))
    return _cut(sizes, reduce, splits, tiles, tx, ty, tz)


def _walk_stream(scan: ScanSpec, sizes: tuple[int, int, int], sm_count: int) -> Walk:
    """Whole rows where they fit a CTA; as many splits as keep all SMs busy to the end.

    More splits even out the SMs' shares, but every split of an output costs PAIR_BYTES.
    """
    outer, reduce, inner = sizes
    item = ITEM_BYTES[scan.dtype]
    tiles = ceil_div(inner, scan.threads * scan.columns)
    tx = ceil_div(inner, tiles * scan.columns)
    depth = max(STAGE_BYTES // (inner * item), 1) if tiles == 1 else 1
    blocks = outer * tiles

    def cost(splits: int) -> float:
        share = ceil_div(blocks * splits, sm_count) / splits * sm_count / blocks
        return share + (splits > 1) * splits * PAIR_BYTES / (reduce * item)

    most = min(max(reduce // (8 * depth), 1), sm_count)
    splits = min(range(1, most + 1), key=cost)
    return _cut(sizes, reduce, splits, tiles, tx, min(scan.threads // tx, depth), 1, depth)


def _cut(
    sizes: tuple[int, int, int],
    steps: int,
    splits: int,
    tiles: int,
    tx: int,
    ty: int,
    tz: int,
    depth: int = 1,
) -> Walk:
    """The walk with `steps` cut into about `splits` equal chunks, none of them empty."""
    splits = max(splits, ceil_div(steps, MAX_CHUNK), 1)
    chunk = ceil_div(steps, splits)
    return Walk(*sizes, chunk, ceil_div(steps, chunk), tiles, tx, ty, tz, depth)
