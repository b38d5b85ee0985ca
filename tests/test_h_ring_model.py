"""Every interleaving of the h slots in one CTA: chunk c lies in slot c mod SLOTS, twice used.

The rows of all chunks form one list, of which loader i has every LOADERS-th from i on. Loaders
stage their rows in order, one or two at a time, and arrive on the chunks, the first row of a chunk
also for the places that the chunk leaves empty; from chunk SLOTS on they wait first for the one
release of every slot. Two consumers take the groups in turn, one chunk each here: wait for all
arrivals, read every row, release the slot.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import pytest
from model_checker import DONE, Process, Verdict, Violation, explore, put

from cute_moe.kernels.moe.memory import LOADER_WARPS
from cute_moe.kernels.moe.spec import GROUP, MAX_TOKENS, MoeSpec

CHUNK = 8  # rows of a chunk in the kernel
LOADERS, SLOTS, PLACES = 2, 2, 2
FULL = (2, 2, 2, 2)  # rows of each chunk
# rows[slot][place]: whose chunk's row lies there; arrived[chunk]; freed[slot]: releases. The
# barrier of a slot shows only the parity of its releases: after two, a wait for the first is stuck.
Shared = tuple[tuple[tuple[int, ...], ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Rules:
    """The protocol; each change of a default is a way to break it."""

    waits_for_free: bool = True
    releases_after_reading: bool = True
    waits_for_all_arrivals: bool = True
    reads: bool = True  # False: a CTA without down columns, whose consumers only release


SOUND = Rules()


def loader(rules: Rules, number: int, sizes: Sequence[int]) -> Process:
    """Local state: (own rows staged, end of those taken together, arrivals of them that are due).

    It takes one or two rows at a time, whichever have turned up; waits for the slots of all of
    them, stores, and arrives.
    """
    listed = [(c, place) for c, size in enumerate(sizes) for place in range(size)]
    own = listed[number::LOADERS]

    def step(shared: Shared, state: tuple) -> Iterable[tuple[Shared, object]]:
        rows, arrived, freed = shared
        done, end, stored = state
        if done == end:
            for count in (1, 2):
                if done + count <= len(own):
                    yield shared, (done, done + count, False)
        elif stored:
            for c, place in own[done:end]:
                arrivals = 1 + (PLACES - sizes[c] if place == 0 else 0)
                arrived = put(arrived, c, arrived[c] + arrivals)
            yield (rows, arrived, freed), (end, end, False) if end < len(own) else DONE
        elif not rules.waits_for_free or all(
            c < SLOTS or freed[c % SLOTS] == 1 for c, _ in own[done:end]
        ):
            for c, place in own[done:end]:
                rows = put(rows, c % SLOTS, put(rows[c % SLOTS], place, c))
            yield (rows, arrived, freed), (done, end, True)

    return Process(f"loader {number}", (0, 0, False), step)


def consumer(rules: Rules, half: int, sizes: Sequence[int]) -> Process:
    """Local state: (chunk, rows read, whether the slot is released)."""
    chunks = len(sizes)

    def advance(chunk: int) -> object:
        return (chunk + 2, 0, False) if chunk + 2 < chunks else DONE

    def step(shared: Shared, state: tuple) -> Iterable[tuple[Shared, object]]:
        rows, arrived, freed = shared
        chunk, read, released = state
        slot = chunk % SLOTS
        if not rules.reads:
            yield (rows, arrived, put(freed, slot, freed[slot] + 1)), advance(chunk)
            return
        needed = PLACES if rules.waits_for_all_arrivals else 1
        if arrived[chunk] < needed:
            return
        size = sizes[chunk]
        if not released and (read == size or not rules.releases_after_reading):
            after = rows, arrived, put(freed, slot, freed[slot] + 1)
            yield after, advance(chunk) if read == size else (chunk, read, True)
        elif read < size:
            if rows[slot][read] != chunk:
                raise Violation(f"chunk {chunk}: read a row of chunk {rows[slot][read]}")
            done = read + 1 == size and released
            yield shared, advance(chunk) if done else (chunk, read + 1, released)

    return Process(f"consumer {half}", (half, 0, False), step)


def check(rules: Rules, sizes: Sequence[int] = FULL) -> Verdict:
    start = (((-1,) * PLACES,) * SLOTS, (0,) * len(sizes), (0,) * SLOTS)
    processes = [loader(rules, i, sizes) for i in range(LOADERS)]
    processes += [consumer(rules, half, sizes) for half in range(2)]
    return explore([start], processes)


@pytest.mark.parametrize("sizes", [FULL[:2], FULL[:3], FULL, (1, 2, 2, 1), (1, 2, 2, 2)])
def test_every_row_is_read_before_its_slot_is_used_again(sizes) -> None:
    verdict = check(SOUND, sizes)
    assert verdict.proven, verdict


@pytest.mark.parametrize(
    "rules",
    [
        Rules(waits_for_free=False),
        Rules(releases_after_reading=False),
        Rules(waits_for_all_arrivals=False),
    ],
)
def test_broken_rule_is_caught(rules) -> None:
    verdict = check(rules)
    assert verdict.unsafe and "read a row" in verdict.unsafe, verdict


def test_releases_that_nobody_waited_for_are_caught() -> None:
    """Consumers that do not read run ahead; the loaders then wait for a parity that is over.

    So in a CTA without down columns nobody loads h.
    """
    verdict = check(Rules(reads=False))
    assert verdict.stuck, verdict


def test_a_third_use_of_a_slot_is_caught() -> None:
    """One release is waited for, so a slot must not be used more than twice."""
    verdict = check(SOUND, (2,) * 3 * SLOTS)
    assert verdict.unsafe, verdict


def test_rows_taken_together_must_not_be_a_ring_apart() -> None:
    """Else the second one waits for a slot that is released only after the first one's chunk."""
    verdict = check(SOUND, (1, 1, 1))
    assert verdict.stuck, verdict


def test_in_the_kernel_no_group_waits_for_rows_behind_it() -> None:
    """A warp takes rows i and i + 8 together, and so holds row i back until the slot of row i + 8
    is free: the group that frees it must end in front of row i. Here for all sizes of three groups
    in a row; nine rows touch no more, since all groups but the last have at least GROUP rows.
    """
    slots = MoeSpec(activations="bf16").h_slots
    most = GROUP * MAX_TOKENS
    furthest = 0
    for groups in (1, 2, 3):
        for sizes in product(*[range(GROUP, most + 1)] * (groups - 1), range(1, most + 1)):
            rows: list[int] = []  # the chunk of each
            for size in sizes:
                first = rows[-1] + 1 if rows else 0
                rows += [first + i // CHUNK for i in range(size)]
            apart = (b - a for a, b in zip(rows, rows[LOADER_WARPS:], strict=False))
            furthest = max(furthest, *apart, 0)
    chunks_of_a_group = most // CHUNK
    assert furthest == 3 and furthest + chunks_of_a_group - 1 < slots
