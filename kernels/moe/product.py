"""The FP8 product that both projections share: weights as A, activations as B, fp32 sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cute_moe.kernels.device.quant import RESIDUAL
from cute_moe.kernels.moe.spec import BLOCK, MAX_TOKENS, MMA_ROWS, MoeSpec

MMA_FEATURES = 32  # K of one WGMMA
BLOCK_MMAS = BLOCK // MMA_FEATURES
VALUES = 4  # of a thread in one term of an accumulator: two columns of each of two rows
ACCUMULATED = 4  # blocks that a warpgroup has registers for, both terms counted


def tiled_mma(spec: MoeSpec, weights=warpgroup.OperandSource.SMEM):
    """One warpgroup's WGMMA, weights as A (64 rows), activations as B (8 columns a term)."""
    op = warpgroup.MmaF8Op(
        Float8E4M3FN,
        Float8E4M3FN,
        Float32,
        (MMA_ROWS, MAX_TOKENS * spec.terms, MMA_FEATURES),
        weights,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    return cute.make_tiled_mma(op, cute.make_layout((1, 1, 1)))


def accumulators(
    mma: cute.TiledMma, blocks: int, spec: MoeSpec, most: int = ACCUMULATED
) -> list[cute.Tensor]:
    """One accumulator for every WGMMA of `blocks` blocks, or of as many as there is room for."""
    shape = mma.partition_shape_C((MMA_ROWS, MAX_TOKENS * spec.terms))
    count = BLOCK_MMAS * min(blocks, most // spec.terms)
    return [mma.make_fragment_C(shape) for _ in range(count)]


def issue(mma: cute.TiledMma, accs, a: cute.Tensor, a_first, b: cute.Tensor, b_first):
    """Start one WGMMA (K = 32) into each accumulator; a, b: (MMA, 1, K / 32).

    None accumulates onto another: the FP8 accumulator keeps fewer bits than fp32. Each block of 128
    is a group of its own for `wait_group`.
    """
    warpgroup.fence()
    mma.set(warpgroup.Field.ACCUMULATE, False)
    for k in range(len(accs)):
        a_k, b_k = a[None, None, a_first + k], b[None, None, b_first + k]
        cute.gemm(mma, accs[k], a_k, b_k, accs[k])
        if k % BLOCK_MMAS == BLOCK_MMAS - 1:
            warpgroup.commit_group()


def sum_of(accs, i: int) -> Float32:
    """Element i of the fp32 sum over the WGMMAs of a scale's features, and over the terms."""
    total = _tree([acc[i] for acc in accs])
    if cute.size(accs[0]) == 2 * VALUES:
        rest = _tree([acc[VALUES + i] for acc in accs])
        total = total + rest * Float32(1.0 / RESIDUAL)
    return total


def _tree(items: list):
    """(a + b) + (c + d), a + b or a."""
    while len(items) > 1:
        items = [a + b for a, b in zip(items[::2], items[1::2], strict=True)]
    return items[0]


class Segment(NamedTuple):
    """Consecutive blocks of a product whose operands are ready at the same time.

    before() is called before its first WGMMA, after() when its operands have been read.
    """

    a: cute.Tensor
    a_first: int  # K / 32 in a
    b: cute.Tensor
    b_first: Int32  # K / 32 in b
    blocks: int
    before: Callable[[], None]
    after: Callable[[], None]


class Chain(NamedTuple):
    """A sum of products over segments, blocks and scales in order.

    factors_of(block) gives for each scale of a block the factors of the four elements; it is called
    while the products run.
    """

    total: cute.Tensor  # fp32 [4], added to
    segments: list[Segment]
    factors_of: Callable[[int], list[list[Float32]]]


def add_products(mma, accs, chains: list[Chain], release_first: bool = False):
    """Add A x B over the segments of every chain to its total.

    As many segments at once as there are accumulators for, of one chain after the other. The first
    blocks are added up while the last ones still run, or, with `release_first`, all behind the
    last one's end, so that the operands are free as early as can be.
    """
    room = len(accs) // BLOCK_MMAS
    queue = [(c, cut) for c in chains for segment in c.segments for cut in _cut(segment, room)]
    done = dict.fromkeys(map(id, chains), 0)  # blocks of each chain
    for batch in _batches(queue, room):
        blocks = []  # (chain, segment, block of the chain) of each
        for chain, segment in batch:
            segment.before()
            start = BLOCK_MMAS * len(blocks)
            own = accs[start : start + BLOCK_MMAS * segment.blocks]
            issue(mma, own, segment.a, segment.a_first, segment.b, segment.b_first)
            first = done[id(chain)]
            blocks += [(chain, segment, first + i) for i in range(segment.blocks)]
            done[id(chain)] = first + segment.blocks
        factors = [chain.factors_of(block) for chain, _, block in blocks]
        for i, (chain, segment, _) in enumerate(blocks):
            warpgroup.wait_group(0 if release_first else len(blocks) - 1 - i)
            if release_first and i == 0:
                for _, each in batch:
                    each.after()
            elif not release_first and (i + 1 == len(blocks) or blocks[i + 1][1] is not segment):
                segment.after()
            _add_block(chain.total, accs[BLOCK_MMAS * i : BLOCK_MMAS * (i + 1)], factors[i])


def _batches(
    queue: list[tuple[Chain, Segment]], room: int
) -> Iterator[list[tuple[Chain, Segment]]]:
    """Runs of segments of at most `room` blocks."""
    batch: list[tuple[Chain, Segment]] = []
    for chain, segment in queue:
        if sum(each.blocks for _, each in batch) + segment.blocks > room:
            yield batch
            batch = []
        batch.append((chain, segment))
    yield batch


def _cut(segment: Segment, blocks: int) -> list[Segment]:
    """A segment in pieces of at most `blocks` blocks."""
    pieces = []
    for start in range(0, segment.blocks, blocks):
        count = min(blocks, segment.blocks - start)
        pieces.append(
            segment._replace(
                a_first=segment.a_first + BLOCK_MMAS * start,
                b_first=segment.b_first + BLOCK_MMAS * start,
                blocks=count,
                before=segment.before if start == 0 else _nothing,
                after=segment.after if start + count == segment.blocks else _nothing,
            )
        )
    return pieces


def _nothing() -> None:
    pass


def _add_block(total: cute.Tensor, accs, scales):
    """Add a block of 128, whose WGMMAs share len(scales) scales, to `total`."""
    width = BLOCK_MMAS // len(scales)
    for s, factors in enumerate(scales):
        for i in range(VALUES):
            part = sum_of(accs[width * s : width * (s + 1)], i)
            total[i] = total[i] + part * factors[i]
