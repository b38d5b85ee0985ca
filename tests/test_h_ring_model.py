"""Every interleaving of the h slots in one CTA: chunk c lies in slot c mod SLOTS, twice used.

The rows of all chunks form one list, of which loader i has every LOADERS-th from i on. Loaders
stage their rows in order, one or more at a time, and arrive on the chunks, the first row of a chunk
also for the places that the chunk leaves empty; from chunk SLOTS on they wait first for the one
release of every slot. Two consumers take the groups in turn, one chunk each here: wait for all
arrivals, read every row, release the slot.

Slots, loaders and rows are few here. How often a slot is used, the places of a chunk, rows taken
at a time, and what arrives at the barriers are those of a `MoeSpec`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import pytest
from kernel_counts import CHUNK, CONSUMERS, h_ring
from model_checker import DONE, Process, Verdict, Violation, explore, put

from cute_moe.kernels.moe import memory
from cute_moe.kernels.moe.spec import GROUP, MAX_CHUNKS, MAX_TOKENS, MoeSpec

LOADERS, SLOTS = 2, 2
# rows[slot][place]: whose chunk's row lies there; arrived[chunk]; freed[slot]: arrivals so far.
Shared = tuple[tuple[tuple[int, ...], ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Rules:
    """The sizes, and the protocol: each change of a flag is a way to break it."""

    uses: int  # of a slot
    places: int
    row_arrivals: int  # of a row, or of a place left empty
    ready_arrivals: int  # that make a chunk ready
    free_arrivals: int  # that free a slot
    warps: int  # that arrive for a consumer
    together: int  # rows that a loader takes at once, at most
    waits_for_free: bool = True
    releases_after_reading: bool = True
    waits_for_arrivals: bool = True
    reads: bool = True  # False: a CTA without down columns, whose consumers only release

    def is_free(self, chunk: int, freed: tuple[int, ...]) -> bool:
        """A wait for the first release of the chunk's slot: only the parity of releases shows."""
        return chunk < SLOTS or freed[chunk % SLOTS] // self.free_arrivals % 2 == 1


SPEC = MoeSpec(activations="bf16")
SOUND = Rules(**h_ring(SPEC))
FULL = (2,) * SOUND.uses * SLOTS  # rows of each chunk


def loader(rules: Rules, number: int, sizes: Sequence[int]) -> Process:
    """Local state: (own rows staged, end of those taken together, arrivals of them that are due).

    It takes the rows that have turned up, waits for the slots of all of them, stores, and arrives.
    """
    listed = [(c, place) for c, size in enumerate(sizes) for place in range(size)]
    own = listed[number::LOADERS]

    def step(shared: Shared, state: tuple) -> Iterable[tuple[Shared, object]]:
        rows, arrived, freed = shared
        done, end, stored = state
        if done == end:
            for count in range(1, rules.together + 1):
                if done + count <= len(own):
                    yield shared, (done, done + count, False)
        elif stored:
            for c, place in own[done:end]:
                places = 1 + (rules.places - sizes[c] if place == 0 else 0)
                arrived = put(arrived, c, arrived[c] + places * rules.row_arrivals)
            yield (rows, arrived, freed), (end, end, False) if end < len(own) else DONE
        elif not rules.waits_for_free or all(rules.is_free(c, freed) for c, _ in own[done:end]):
            for c, place in own[done:end]:
                rows = put(rows, c % SLOTS, put(rows[c % SLOTS], place, c))
            yield (rows, arrived, freed), (done, end, True)

    return Process(f"loader {number}", (0, 0, False), step)


def consumer(rules: Rules, half: int, sizes: Sequence[int]) -> Process:
    """Local state: (chunk, rows read, whether the slot is released)."""
    chunks = len(sizes)

    def advance(chunk: int) -> object:
        return (chunk + CONSUMERS, 0, False) if chunk + CONSUMERS < chunks else DONE

    def step(shared: Shared, state: tuple) -> Iterable[tuple[Shared, object]]:
        rows, arrived, freed = shared
        chunk, read, released = state
        slot = chunk % SLOTS
        after = rows, arrived, put(freed, slot, freed[slot] + rules.warps)
        if not rules.reads:
            yield after, advance(chunk)
            return
        if rules.waits_for_arrivals and arrived[chunk] // rules.ready_arrivals % 2 == 0:
            return
        size = sizes[chunk]
        if not released and (read == size or not rules.releases_after_reading):
            yield after, advance(chunk) if read == size else (chunk, read, True)
        elif read < size:
            if rows[slot][read] != chunk:
                raise Violation(f"chunk {chunk}: read a row of chunk {rows[slot][read]}")
            done = read + 1 == size and released
            yield shared, advance(chunk) if done else (chunk, read + 1, released)

    return Process(f"consumer {half}", (half, 0, False), step)


def check(rules: Rules, sizes: Sequence[int] = FULL) -> Verdict:
    start = (((-1,) * rules.places,) * SLOTS, (0,) * len(sizes), (0,) * SLOTS)
    processes = [loader(rules, i, sizes) for i in range(LOADERS)]
    processes += [consumer(rules, half, sizes) for half in range(CONSUMERS)]
    return explore([start], processes)


@pytest.mark.parametrize("sizes", [FULL[:2], FULL[:3], FULL, (1, 2, 2, 1), (1, 2, 2, 2)])
def test_every_row_is_read_before_its_slot_is_used_again(sizes) -> None:
    verdict = check(SOUND, sizes)
    assert verdict.proven, verdict


def test_slots_for_all_chunks_are_used_once() -> None:
    """With FP8 activations nobody waits for a free slot, and nobody has to."""
    spec = MoeSpec()
    assert spec.h_slots == MAX_CHUNKS
    once = replace(Rules(**h_ring(spec)), waits_for_free=False)
    verdict = check(once, FULL[: SLOTS * once.uses])
    assert verdict.proven, verdict


BROKEN = {
    "stores unasked": (replace(SOUND, waits_for_free=False), "read a row"),
    "early release": (replace(SOUND, releases_after_reading=False), "read a row"),
    "reads unasked": (replace(SOUND, waits_for_arrivals=False), "read a row"),
    "one row makes it ready": (replace(SOUND, ready_arrivals=SOUND.row_arrivals), "read a row"),
    "ready before all rows are": (
        replace(SOUND, ready_arrivals=SOUND.ready_arrivals - SOUND.row_arrivals),
        "read a row",
    ),
    "more places than there are": (replace(SOUND, places=SOUND.places - 1), "stuck"),
    "no release is whole": (replace(SOUND, free_arrivals=2 * SOUND.warps), "stuck"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rule_is_caught(name) -> None:
    broken, fault = BROKEN[name]
    verdict = check(broken)
    if fault == "stuck":
        assert verdict.stuck, verdict
    else:
        assert verdict.unsafe and fault in verdict.unsafe, verdict


def test_a_count_of_the_kernel_is_a_count_of_the_model(monkeypatch) -> None:
    monkeypatch.setattr(memory, "LOADER_WARPS", memory.LOADER_WARPS + 1)
    verdict = check(Rules(**h_ring(SPEC)))
    assert verdict.stuck, verdict


def test_releases_that_nobody_waited_for_are_caught() -> None:
    """Consumers that do not read run ahead; the loaders then wait for a parity that is over.

    So in a CTA without down columns nobody loads h.
    """
    verdict = check(replace(SOUND, reads=False))
    assert verdict.stuck, verdict


def test_a_third_use_of_a_slot_is_caught() -> None:
    """One release is waited for, so a slot must not be used more than twice."""
    assert SOUND.uses == 2
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
    slots = SPEC.h_slots
    most = GROUP * MAX_TOKENS
    furthest = 0
    for groups in (1, 2, 3):
        for sizes in product(*[range(GROUP, most + 1)] * (groups - 1), range(1, most + 1)):
            rows: list[int] = []  # the chunk of each
            for size in sizes:
                first = rows[-1] + 1 if rows else 0
                rows += [first + i // CHUNK for i in range(size)]
            apart = (b - a for a, b in zip(rows, rows[memory.LOADER_WARPS :], strict=False))
            furthest = max(furthest, *apart, 0)
    chunks_of_a_group = most // CHUNK
    assert furthest == 3 and furthest + chunks_of_a_group - 1 < slots
