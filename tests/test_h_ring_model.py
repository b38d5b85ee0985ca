"""Every interleaving of the slots of h in one CTA: one ring, in the order of all chunks' slices.

The rows of a slot are *items* of one list, of which loader i has i, i + LOADERS, ... A loader takes
some items that have turned up, all of them less than a ring behind the first; waits for their slots
to be free, stores, arrives on their slots, and then on those up to its next item in which it has
none. So each loader arrives on every slot once. The consumers take the groups in turn; if slots
are used again, both wait for and release every slot, else a group's owner alone waits.

Slots, loaders and items are few here; arrivals are those of a `MoeSpec`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import pytest
from kernel_counts import arrivals, h_ring, rings
from model_checker import DONE, Process, Verdict, Violation, explore, put

from cute_moe.kernels.moe import memory
from cute_moe.kernels.moe.spec import CHUNK_ROWS, HALVES, MoeSpec

LOADERS = 2
# rows[slot][place]: whose row lies there; arrived[slot], freed[slot]: arrivals so far.
Shared = tuple[tuple[tuple[int, ...], ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Rules:
    """The protocol, one thing a flag; each change is a way to break it."""

    loader_arrivals: int
    ready_arrivals: int  # for each loader, that make a slot ready
    warps: int  # that arrive for a consumer
    free_arrivals: int  # that free a slot
    slots: int = 2
    together: int = 2  # items that a loader takes at once, at most
    reused: bool = True  # False: nobody waits for free slots, nobody releases any
    apart: int = 0  # a batch is a ring, and so much, long at most
    waits_for_free: bool = True
    own_first: bool = True  # False: passes the slots up to the next item, then arrives on its own
    passes: bool = True
    waits_for_ready: bool = True
    both_wait: bool = True
    both_release: bool = True
    releases_after_reading: bool = True

    def is_free(self, turn: int, freed: Sequence[int]) -> bool:
        """A wait for an empty slot: only the parity of releases shows."""
        phases = freed[turn % self.slots] // self.free_arrivals
        return phases % 2 == turn // self.slots % 2

    def is_ready(self, turn: int, arrived: Sequence[int]) -> bool:
        phases = arrived[turn % self.slots] // (self.ready_arrivals * LOADERS)
        return phases % 2 != turn // self.slots % 2


def rules(spec: MoeSpec, **options) -> Rules:
    return Rules(**h_ring(spec), **options)


SOUND = rules(MoeSpec(activations="bf16"))
# Rows of each slot: full ones, and rows that some loader has none of.
CASES = [(2, 2, 2, 2, 2), (1, 1, 1, 1, 1), (2, 1, 1, 2), (1, 2, 1, 1, 2), (1,), (2, 2, 1)]


def batches(rules: Rules, own: Sequence[tuple[int, int]], start: int) -> Iterable[int]:
    """Ends of the batches of a loader's items that may start at `start`."""
    for end in range(start + 1, min(start + rules.together, len(own)) + 1):
        if not rules.reused or own[end - 1][0] - own[start][0] < rules.slots + rules.apart:
            yield end


def to_pass(rules: Rules, own: Sequence[tuple[int, int]], turns: int) -> list[tuple[int, ...]]:
    """Slots that a loader passes after each batch end (index: its next item), in order.

    Where no slot is used twice, all are passed at the start.
    """
    has = [turn for turn, _ in own] + [turns]
    gaps = [range(a + 1, b) for a, b in zip([-1, *has], has, strict=False)]
    if not rules.passes:
        gaps = [range(0)] * len(gaps)
    if not rules.reused:
        return [tuple(t for gap in gaps for t in gap)] + [()] * (len(gaps) - 1)
    return [tuple(gap) for gap in gaps]


def loader(rules: Rules, number: int, sizes: Sequence[int]) -> Process:
    """Local state: (items done, end of the batch, slots of it to wait for, ops left)."""
    items = [(turn, place) for turn, size in enumerate(sizes) for place in range(size)]
    own = items[number::LOADERS]
    gaps = to_pass(rules, own, len(sizes))

    def arrive(shared: Shared, turn: int) -> Shared:
        rows, arrived, freed = shared
        slot = turn % rules.slots
        return rows, put(arrived, slot, arrived[slot] + rules.loader_arrivals), freed

    def program(start: int, end: int) -> tuple:
        """Of a batch, from where its rows are there."""
        turns = [turn for turn, _ in own[start:end]]
        must_wait = rules.reused and rules.waits_for_free
        waits = range(turns[0], turns[-1] + 1) if must_wait else ()
        fill = [("fill", turn) for turn in turns]
        # Between the items of a batch the slots are known to be free.
        inner = [("pass", t) for gap in gaps[start + 1 : end] for t in gap]
        passes = inner + [op for t in gaps[end] for op in (("wait", t), ("pass", t))]
        last = fill + passes if rules.own_first else passes + fill
        return (*(("wait", t) for t in waits), ("store", start, end), *last)

    first = tuple(op for t in gaps[0] for op in (("wait", t), ("pass", t)))

    def step(shared: Shared, state: tuple) -> Iterable[tuple[Shared, object]]:
        done, ops = state
        rows, arrived, freed = shared
        if not ops:
            if done == len(own):
                yield shared, DONE
            for end in batches(rules, own, done):
                yield shared, (end, program(done, end))
            return
        op, rest = ops[0], (done, ops[1:])
        if op[0] == "wait":
            if not rules.reused or rules.is_free(op[1], freed):
                yield shared, rest
        elif op[0] == "store":
            for turn, place in own[op[1] : op[2]]:
                slot = turn % rules.slots
                rows = put(rows, slot, put(rows[slot], place, turn))
            yield (rows, arrived, freed), rest
        else:
            yield arrive(shared, op[1]), rest

    return Process(f"loader {number}", (0, first), step)


def consumer(rules: Rules, half: int, sizes: Sequence[int], chunks: int) -> Process:
    """Local state: what is left to do. A group has `chunks` slots."""
    program: list[tuple] = []
    for turn in range(len(sizes)):
        is_own = turn // chunks % HALVES == half
        wait = [("wait", turn)] if rules.waits_for_ready else []
        release = [("release", turn)] if rules.reused else []
        if is_own:
            read = [("read", turn)]
            late = rules.releases_after_reading
            program += [*wait, *read, *release] if late else [*wait, *release, *read]
        elif rules.reused:
            program += (wait if rules.both_wait else []) + (release if rules.both_release else [])

    def step(shared: Shared, ops: tuple) -> Iterable[tuple[Shared, object]]:
        rows, arrived, freed = shared
        (what, turn), rest = ops[0], ops[1:] or DONE
        slot = turn % rules.slots
        if what == "wait":
            if rules.is_ready(turn, arrived):
                yield shared, rest
        elif what == "release":
            yield (rows, arrived, put(freed, slot, freed[slot] + rules.warps)), rest
        else:
            found = rows[slot][: sizes[turn]]
            if set(found) != {turn}:
                raise Violation(f"slot of {turn}: read rows of {found}")
            yield shared, rest

    return Process(f"consumer {half}", tuple(program) or DONE, step)


def check(rules: Rules, sizes: Sequence[int], chunks: int = 1) -> Verdict:
    empty = (0,) * rules.slots
    start = (((-1,) * LOADERS,) * rules.slots, empty, empty)
    processes = [loader(rules, i, sizes) for i in range(LOADERS)]
    processes += [consumer(rules, half, sizes, chunks) for half in range(HALVES)]
    return explore([start], processes)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_every_row_is_read_before_its_slot_is_used_again(sizes, slots, chunks) -> None:
    verdict = check(replace(SOUND, slots=slots), sizes, chunks)
    assert verdict.proven, verdict


@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_slots_for_all_are_used_once(sizes) -> None:
    """With enough slots nobody waits for a free one, and nobody has to."""
    verdict = check(replace(SOUND, slots=len(sizes), reused=False), sizes)
    assert verdict.proven, verdict


def test_three_items_at_once() -> None:
    verdict = check(replace(SOUND, together=3, slots=3), (1,) * 7)
    assert verdict.proven, verdict


ONES = (1,) * 6
TWOS = (2,) * 5
BROKEN = {
    # With one row a slot, a loader's items are two slots apart, a ring of two.
    "batch a ring apart": (replace(SOUND, apart=1), ONES, "stuck"),
    "passes up to the next item first": (
        replace(SOUND, own_first=False, slots=1),
        ONES,
        "stuck",
    ),
    "does not pass": (replace(SOUND, passes=False), ONES, "stuck"),
    "owner alone releases": (replace(SOUND, both_release=False), TWOS, "stuck"),
    "owner alone releases, and is enough": (
        replace(SOUND, both_release=False, both_wait=False, free_arrivals=SOUND.warps, slots=1),
        TWOS,
        "unsafe",
    ),
    "one release is enough": (replace(SOUND, free_arrivals=SOUND.warps), TWOS, "unsafe"),
    "the other one does not wait": (replace(SOUND, both_wait=False), TWOS, "unsafe"),
    "stores unasked": (replace(SOUND, waits_for_free=False), TWOS, "unsafe"),
    "releases early": (replace(SOUND, releases_after_reading=False), TWOS, "unsafe"),
    "reads unasked": (replace(SOUND, waits_for_ready=False), TWOS, "unsafe"),
    "one loader makes it ready": (
        replace(SOUND, ready_arrivals=SOUND.loader_arrivals // LOADERS),
        TWOS,
        "unsafe",
    ),
    "more arrivals than loaders have": (
        replace(SOUND, ready_arrivals=SOUND.loader_arrivals + 1),
        TWOS,
        "stuck",
    ),
    "used again unsaid": (replace(SOUND, reused=False), TWOS, "unsafe"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rule_is_caught(name) -> None:
    broken, sizes, fault = BROKEN[name]
    verdict = check(broken, sizes)
    assert getattr(verdict, fault), verdict


def test_what_is_broken_is_sound_otherwise() -> None:
    for slots in (1, 2):
        assert check(replace(SOUND, slots=slots), ONES).proven
        assert check(replace(SOUND, slots=slots), TWOS).proven


def test_a_count_of_the_kernel_is_a_count_of_the_model(monkeypatch) -> None:
    monkeypatch.setattr(memory, "CONSUMER_WARPS", memory.CONSUMER_WARPS // HALVES)
    assert check(rules(MoeSpec(activations="bf16")), TWOS).unsafe


def test_a_loader_has_one_item_in_a_slot_at_most() -> None:
    """It arrives once on every slot."""
    assert CHUNK_ROWS <= memory.LOADER_WARPS


@pytest.mark.parametrize("activations", ["fp8", "bf16"])
def test_every_mbarrier_is_initialised_once(activations) -> None:
    spec = MoeSpec(activations=activations)
    weights, h_slots, scale_slots, *single = rings(spec)
    counts = arrivals(spec)
    for ring, reused in ((weights, True), (h_slots, spec.slots_reused), (scale_slots, True)):
        assert {counts.pop((ring.full + s).index) for s in range(ring.stages)} == {ring.writers}
        if reused:
            assert {counts.pop((ring.empty + s).index) for s in range(ring.stages)} == {
                ring.readers
            }
    assert [counts.pop(bar.index) for bar in single] == [memory.WARP, 1, 1] and not counts
    assert {n: c for n, _, c in spec.shared_regions}["barriers"] == single[-1].index + 1
