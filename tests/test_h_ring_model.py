"""Every interleaving of the h slots in one CTA: chunk c lies in slot c mod SLOTS, twice used.

Loaders stage their row of every chunk in order, one or two at a time, and arrive on the chunks;
from chunk SLOTS on they wait first for the one release of every slot. Two consumers take the
groups in turn, one chunk each here: wait until all loaders have arrived, read every row, release
the slot.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from model_checker import DONE, Process, Verdict, Violation, explore

LOADERS, SLOTS = 2, 2
# rows[slot][loader]: whose chunk's row lies there; arrived[chunk]; freed[slot]: releases. The
# barrier of a slot shows only the parity of its releases: after two, a wait for the first is stuck.
Shared = tuple[tuple[tuple[int, ...], ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Rules:
    """The protocol; each change of a default is a way to break it."""

    waits_for_free: bool = True
    releases_after_reading: bool = True
    waits_for_all_loaders: bool = True
    reads: bool = True  # False: a CTA without down columns, whose consumers only release


SOUND = Rules()


def put(values: tuple, index: int, value: object) -> tuple:
    return (*values[:index], value, *values[index + 1 :])


def loader(rules: Rules, number: int, chunks: int) -> Process:
    """Local state: (next chunk, end of those taken together, whether their rows are stored).

    It takes one or two chunks at a time, whichever have turned up.
    """

    def step(shared: Shared, state: tuple) -> Iterable[tuple[Shared, object]]:
        rows, arrived, freed = shared
        chunk, end, stored = state
        if chunk == end:
            for count in (1, 2):
                if chunk + count <= chunks:
                    yield shared, (chunk, chunk + count, False)
        elif stored:
            after = rows, put(arrived, chunk, arrived[chunk] + 1), freed
            yield after, (chunk + 1, end, chunk + 1 < end) if chunk + 1 < chunks else DONE
        elif not rules.waits_for_free or all(
            c < SLOTS or freed[c % SLOTS] == 1 for c in range(chunk, end)
        ):
            for c in range(chunk, end):
                rows = put(rows, c % SLOTS, put(rows[c % SLOTS], number, c))
            yield (rows, arrived, freed), (chunk, end, True)

    return Process(f"loader {number}", (0, 0, False), step)


def consumer(rules: Rules, half: int, chunks: int) -> Process:
    """Local state: (chunk, rows read, whether the slot is released)."""

    def advance(chunk: int) -> object:
        return (chunk + 2, 0, False) if chunk + 2 < chunks else DONE

    def step(shared: Shared, state: tuple) -> Iterable[tuple[Shared, object]]:
        rows, arrived, freed = shared
        chunk, read, released = state
        slot = chunk % SLOTS
        if not rules.reads:
            yield (rows, arrived, put(freed, slot, freed[slot] + 1)), advance(chunk)
            return
        needed = LOADERS if rules.waits_for_all_loaders else 1
        if arrived[chunk] < needed:
            return
        if not released and (read == LOADERS or not rules.releases_after_reading):
            after = rows, arrived, put(freed, slot, freed[slot] + 1)
            yield after, advance(chunk) if read == LOADERS else (chunk, read, True)
        elif read < LOADERS:
            if rows[slot][read] != chunk:
                raise Violation(f"chunk {chunk}: read a row of chunk {rows[slot][read]}")
            done = read + 1 == LOADERS and released
            yield shared, advance(chunk) if done else (chunk, read + 1, released)

    return Process(f"consumer {half}", (half, 0, False), step)


def check(rules: Rules, chunks: int = 2 * SLOTS) -> Verdict:
    start = (((-1,) * LOADERS,) * SLOTS, (0,) * chunks, (0,) * SLOTS)
    processes = [loader(rules, i, chunks) for i in range(LOADERS)]
    processes += [consumer(rules, half, chunks) for half in range(2)]
    return explore([start], processes)


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_every_row_is_read_before_its_slot_is_used_again(chunks) -> None:
    verdict = check(SOUND, chunks)
    assert verdict.proven, verdict


@pytest.mark.parametrize(
    "rules",
    [
        Rules(waits_for_free=False),
        Rules(releases_after_reading=False),
        Rules(waits_for_all_loaders=False),
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
    verdict = check(SOUND, 3 * SLOTS)
    assert verdict.unsafe, verdict
