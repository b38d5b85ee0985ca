"""Cross-CTA barriers in global memory: sense reversal on one 32-bit slot per barrier.

A slot is zeroed once, before its first use ever, and maintains itself from then on. In a round of
N arrivals the seed CTA adds 0x80000000 - (N - 1) and the others add 1. Together that is 0x80000000:
bit 31 (the sense) flips when the last CTA arrives, and the low bits are zero again. Every CTA
learns the old sense from its own add and waits until the slot's sense differs. The slot does not
depend on N from one round to the next, so members, N and seed may change from launch to launch.

Two rules keep rounds on a slot apart, also within the split form. (1) A CTA arrives for a round
only when it knows that the round before is complete, or its arrival counts for that one. (2) No
round completes while a CTA still waits for the one before, or that CTA misses the flip. Both hold
by themselves when the same CTAs take part in all rounds of a launch on the slot and each waits for
each. Members may change within a launch after any ordering between the old and the new ones.

All CTAs of a round must be resident at once (cooperative launch), and a launch must complete every
round that it begins. A wait that lasts POLL_LIMIT polls traps instead of hanging.

Happens-before: what any calling thread of a CTA did before it arrived is visible to all calling
threads of every CTA that has waited for the round, by plain loads as well. TMA needs a proxy
fence on top. docs/sync.md has the argument; tests/test_barrier_model.py explores the protocol.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

SLOT_BYTES = 128  # One L2 line per slot: barriers in use at the same time do not share a line.
SLOT_WORDS = SLOT_BYTES // 4
SENSE_BIT = -(1 << 31)  # Bit 31 of an Int32.
# A poll is a round trip to L2, well over 0.1 us: the limit is many seconds of waiting.
POLL_LIMIT = 1 << 26


@dataclass(frozen=True)
class Threads:
    """The threads of a CTA that call a barrier together: `count` of them from `first` on.

    Both are multiples of 32; `named_barrier` (1..15) is theirs alone. The default is all threads.
    """

    first: int = 0
    count: int | None = None
    named_barrier: int = 0

    def __post_init__(self) -> None:
        whole_cta = self.count is None
        if whole_cta and (self.first, self.named_barrier) != (0, 0):
            raise ValueError(f"count: expected a number of threads, got None in {self}")
        named = 0 < self.named_barrier < 16
        if not whole_cta and (self.count % 32 or self.first % 32 or not named):
            raise ValueError(f"expected whole warps and a named barrier of 1..15, got {self}")


ALL_THREADS = Threads()


def sync_group(threads: Threads) -> None:
    """Barrier among the calling threads of this CTA."""
    if threads.count is None:
        cute.arch.sync_threads()
    else:
        cute.arch.barrier(barrier_id=threads.named_barrier, number_of_threads=threads.count)


def seed_increment(arrival_count: int | Int32) -> int | Int32:
    """What the seed of a round of `arrival_count` CTAs adds: 0x80000000 - (arrival_count - 1).

    As an Int32: adding the top bit is the same as flipping it.
    """
    return (1 - arrival_count) ^ SENSE_BIT


@cute.jit
def increment_of(arrival_count: Int32, is_seed: Boolean) -> Int32:
    """What a CTA adds to the slot when it arrives."""
    increment = Int32(1)
    if is_seed:
        increment = Int32(seed_increment(arrival_count))
    return increment


@cute.jit
def arrive(slot: cute.Pointer, arrival_count: Int32, is_seed: Boolean):
    """Arrive at `slot`'s current round and return a ticket for `wait`; one thread per CTA calls.

    Releases this thread's writes, and those that it has observed (a CTA barrier before the call
    makes them the whole CTA's). Exactly one of the round's `arrival_count` CTAs is the seed. A
    ticket must be waited for before the CTA arrives at `slot` again.
    """
    increment = increment_of(arrival_count, is_seed)
    # acq_rel: the last CTA to arrive sees the flip in its own result and does not poll at all.
    before = cute.arch.atomic_add(slot, increment, sem="acq_rel", scope="gpu")
    return before, before + increment


@cute.jit
def signal(slot: cute.Pointer, arrival_count: Int32, is_seed: Boolean):
    """`arrive` without a ticket, for CTAs that never wait or that use `wait_parity`.

    Nothing comes back from memory, so it is cheaper than `arrive`. At the next arrival the CTA
    must know that this round is complete, for example by `wait_parity` or the kernel boundary.
    """
    increment = increment_of(arrival_count, is_seed)
    cute.arch.red(slot, increment, op="add", dtype="s32", sem="release", scope="gpu")


@cute.jit
def wait(slot: cute.Pointer, ticket):
    """Wait until the round of `ticket` (from this CTA's `arrive`) is complete; one thread calls.

    Acquires for that thread what all CTAs released. A CTA barrier after it passes this on to the
    other threads.
    """
    before, seen = ticket
    spin_until_flipped(slot, before, seen)


@cute.jit
def wait_parity(slot: cute.Pointer, rounds: Int32):
    """Wait, without having arrived, until `slot` has seen `rounds` complete rounds since zeroed.

    One thread calls; only bit 0 of `rounds` counts. Ordering as for `wait`. The slot shows the
    parity of its number of rounds, so the caller must know that rounds - 1 are complete already
    (by the kernel boundary, or because it waited for the round before) and that the one after
    cannot complete before this call returns (no launch has more rounds on the slot, or this CTA
    must arrive for that one). With one round per launch, `rounds` is the launch epoch plus 1,
    provided that every launch does a round on every slot: an idle slot is kept in step by one
    `signal` with arrival_count 1 from its seed. The slot's own sense is no substitute for the
    epoch: when it is read, the round may be over already.
    """
    before = (rounds ^ 1) << 31
    spin_until_flipped(slot, before, before)


@cute.jit
def spin_until_flipped(slot: cute.Pointer, before: Int32, seen: Int32):
    """Poll until the sense of `slot` differs from that of `before`; `seen` is the last value."""
    polls = Int32(0)
    while (seen ^ before) >= 0 and polls < POLL_LIMIT:
        # As inline PTX the load is a compiler barrier too; cute.arch.load(sem="acquire") is none.
        seen = cute.arch.inline_ptx(
            "ld.acquire.gpu.global.b32 {$w0}, [{$r0}];",
            write_only_types=[Int32],
            read_only_args=[slot],
        )
        polls += 1
    if (seen ^ before) >= 0:
        cute.arch.inline_ptx("trap;")


@cute.jit
def partial_barrier(
    slots: cute.Pointer,
    index: Int32,
    arrival_count: Int32,
    seed_cta: Int32,
    threads: cutlass.Constexpr = ALL_THREADS,
):
    """Barrier among `arrival_count` CTAs on slot `index` of `slots`; all `threads` call it.

    `slots` is an Int32 pointer, SLOT_BYTES per slot. `seed_cta` is the block index of one member.
    Only members may call it. With one member nothing is ordered beyond the CTA, and the slot is
    left alone: use `arrive` and `signal` on slots that other CTAs watch with `wait_parity`.
    """
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    sync_group(threads)
    if tid == threads.first and arrival_count != 1:
        slot = slots + index * SLOT_WORDS
        wait(slot, arrive(slot, arrival_count, cta == seed_cta))
    sync_group(threads)


@cute.jit
def grid_barrier(slots: cute.Pointer, threads: cutlass.Constexpr = ALL_THREADS):
    """Barrier among all CTAs of a one-dimensional grid on the first slot of `slots`."""
    grid, _, _ = cute.arch.grid_dim()
    partial_barrier(slots, Int32(0), grid, Int32(0), threads)


@cute.jit
def expert_barrier(
    slots: cute.Pointer, up_grid: cutlass.Constexpr, threads: cutlass.Constexpr = ALL_THREADS
):
    """Barrier among the `up_grid` consecutive CTAs that share an expert group, one slot each."""
    cta, _, _ = cute.arch.block_idx()
    group = cta // up_grid
    partial_barrier(slots, group, up_grid, group * up_grid, threads)


@cute.jit
def colstripe_barrier(
    slots: cute.Pointer,
    down_grid: cutlass.Constexpr,
    down_groups: cutlass.Constexpr,
    threads: cutlass.Constexpr = ALL_THREADS,
):
    """Barrier among the `down_groups` CTAs with equal block index modulo `down_grid`."""
    cta, _, _ = cute.arch.block_idx()
    stripe = cta % down_grid
    partial_barrier(slots, stripe, down_groups, stripe, threads)
