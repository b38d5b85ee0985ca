"""Every interleaving of the barrier protocols, on a model of the slots.

The model's seed increment is the one that the device code uses. A CTA is a list of atomic
operations on the slots; safety is "nobody is past its wait for a round before all members have
arrived at that round". The last tests break a rule each and must be caught.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product

import pytest
from model_checker import DONE, Process, Verdict, explore, explore_launches

from cute_moe.kernels.device.barrier import SENSE_BIT, seed_increment

MASK = 0xFFFFFFFF
SENSE = SENSE_BIT & MASK
CALLS = 7

Memory = tuple[int, ...]
# (slots, private memory of the CTA) -> the same after the operation, or None while it must wait.
Operation = Callable[[Memory, Memory], tuple[Memory, Memory] | None]


def put(values: Memory, index: int, value: int) -> Memory:
    """`values` with one entry replaced, as an unsigned 32-bit word."""
    return (*values[:index], value & MASK, *values[index + 1 :])


class Grid:
    """The programs of some CTAs, and which program positions mean "arrived" and "has left"."""

    def __init__(self, ctas: int, slots: int) -> None:
        self.programs: list[list[Operation]] = [[] for _ in range(ctas)]
        self.slots = slots
        self.arrived: dict[object, dict[int, int]] = defaultdict(dict)
        self.left: dict[object, dict[int, int]] = defaultdict(dict)

    def add(self, cta: int, operation: Operation) -> None:
        self.programs[cta].append(operation)

    def note_arrival(self, cta: int, name: object) -> None:
        self.arrived[name][cta] = len(self.programs[cta])

    def note_exit(self, cta: int, name: object) -> None:
        self.left[name][cta] = len(self.programs[cta])

    def explore(self, initial: Sequence[Memory]) -> Verdict:
        """All interleavings from each state of the slots in `initial`."""
        start = (0, (0,) * self.slots)
        processes = [
            Process(f"CTA {cta}", start if program else DONE, self._stepper(program))
            for cta, program in enumerate(self.programs)
        ]
        return explore(initial, processes, self._invariant())

    @staticmethod
    def _stepper(program: list[Operation]) -> Callable:
        def step(slots: Memory, local: tuple[int, Memory]) -> list:
            position, memory = local
            result = program[position](slots, memory)
            if result is None:
                return []
            slots, memory = result
            position += 1
            return [(slots, DONE if position == len(program) else (position, memory))]

        return step

    def _invariant(self) -> Callable:
        """A CTA past its wait for a round needs every member of it past its arrival."""
        rules = [
            (cta, left, member, arrived)
            for name, exits in self.left.items()
            for cta, left in exits.items()
            for member, arrived in self.arrived[name].items()
        ]

        def check(slots: Memory, places: tuple) -> str | None:
            at = [MASK if place == DONE else place[0] for place in places]
            for cta, left, member, arrived in rules:
                if at[cta] >= left and at[member] < arrived:
                    return f"CTA {cta} left (operation {left}) before CTA {member} arrived"
            return None

        return check


# Sense reversal: what kernels/device/barrier.py does.


def arrive(grid: Grid, cta: int, slot: int, count: int, seed: int, name: object) -> None:
    """`arrive` and `signal`: the add, and the old value as the ticket."""
    increment = seed_increment(count) if cta == seed else 1

    def add(slots: Memory, memory: Memory) -> tuple[Memory, Memory]:
        return put(slots, slot, slots[slot] + increment), put(memory, slot, slots[slot])

    grid.add(cta, add)
    grid.note_arrival(cta, name)


def wait(grid: Grid, cta: int, slot: int, name: object) -> None:
    """`wait`: until the sense differs from that of the ticket."""

    def poll(slots: Memory, memory: Memory) -> tuple[Memory, Memory] | None:
        flipped = (slots[slot] ^ memory[slot]) & SENSE
        return (slots, put(memory, slot, 0)) if flipped else None

    grid.add(cta, poll)
    grid.note_exit(cta, name)


def wait_parity(
    grid: Grid, cta: int, slot: int, rounds: int, name: object, epoch: int | None = None
) -> None:
    """`wait_parity` for `rounds`, plus the shared word number `epoch` if there is one."""

    def poll(slots: Memory, memory: Memory) -> tuple[Memory, Memory] | None:
        total = rounds + (slots[epoch] if epoch is not None else 0)
        return (slots, put(memory, slot, 0)) if slots[slot] >> 31 == total & 1 else None

    grid.add(cta, poll)
    grid.note_exit(cta, name)


def full(grid: Grid, ctas: Sequence[int], slot: int, seed: int, name: object) -> None:
    """`partial_barrier` among `ctas`; one CTA alone leaves the slot as it is."""
    for cta in ctas if len(ctas) > 1 else ():
        arrive(grid, cta, slot, len(ctas), seed, name)
        wait(grid, cta, slot, name)


# The protocol as first described: the seed exchanges, all wait for bit 31, two slots in turn.


def described(grid: Grid, cta: int, call: int, count: int, wait_for_change: bool) -> None:
    """One call; CTA 0 is the seed.

    `wait_for_change`: bit 31 must differ from what the CTA found, or for the seed from its seed.
    """
    slot = call % 2
    seed_value = 0x80000000 - (count - 1)

    def exchange(slots: Memory, memory: Memory) -> tuple[Memory, Memory]:
        return put(slots, slot, seed_value), put(memory, slot, slots[slot])

    def fold_back(slots: Memory, memory: Memory) -> tuple[Memory, Memory]:
        return put(slots, slot, slots[slot] + (memory[slot] & 0x7FFFFFFF)), memory

    def add(slots: Memory, memory: Memory) -> tuple[Memory, Memory]:
        return put(slots, slot, slots[slot] + 1), put(memory, slot, slots[slot])

    def poll(slots: Memory, memory: Memory) -> tuple[Memory, Memory] | None:
        past = memory[slot] if wait_for_change and cta != 0 else 0
        return (slots, put(memory, slot, 0)) if (slots[slot] ^ past) & SENSE else None

    grid.add(cta, exchange if cta == 0 else add)
    grid.note_arrival(cta, call)
    if cta == 0:
        grid.add(cta, fold_back)
    grid.add(cta, poll)
    grid.note_exit(cta, call)


def explore_described(count: int, calls: int, wait_for_change: bool = False) -> Verdict:
    grid = Grid(count, slots=2)
    for call, cta in product(range(calls), range(count)):
        described(grid, cta, call, count, wait_for_change)
    return grid.explore([(0, 0)])


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("seed", ["first", "last", "rotating"])
def test_sense_reversal(count: int, seed: str) -> None:
    """Any N, any seed, from either sense: nobody early, nobody stuck, low bits zero at the end."""
    grid = Grid(count, slots=1)
    for call in range(CALLS):
        seed_cta = {"first": 0, "last": count - 1, "rotating": call % count}[seed]
        full(grid, range(count), 0, seed_cta, call)
    verdict = grid.explore([(0,), (SENSE,)])
    assert verdict.proven, verdict
    assert verdict.ends == {(0,), (SENSE,)}


def test_left_over_state() -> None:
    """Launches of different grids and numbers of calls on one slot, any number in any order."""

    def launch(count: int, calls: int) -> Callable:
        grid = Grid(4, slots=1)
        for call in range(calls):
            full(grid, range(count), 0, (call + 1) % count, call)
        return grid.explore

    launches = [launch(count, calls) for count, calls in [(1, 3), (2, 6), (3, 7), (4, 1), (2, 1)]]
    verdict = explore_launches([(0,)], launches)
    assert verdict.proven, verdict
    assert verdict.ends == {(0,), (SENSE,)}


def test_partial_barriers() -> None:
    """Fixed members per slot, new ones after a barrier over old and new; the last slot unused."""
    calls = [((0, 1), 0), ((2, 3), 1), ((0, 1), 0), ((2, 3), 1), ((2, 3), 1)]
    calls += [((0, 1, 2, 3), 2), ((1, 2), 0), ((0, 1, 3), 1), ((1, 2), 0)]
    grid = Grid(4, slots=4)
    for number, (members, slot) in enumerate(calls):
        full(grid, members, slot, members[number % len(members)], number)
    verdict = grid.explore([(0, SENSE, 0, 0), (SENSE, 0, SENSE, SENSE)])
    assert verdict.proven, verdict
    assert verdict.ends == {(0, SENSE, SENSE, 0), (SENSE, 0, 0, SENSE)}, verdict.ends


@pytest.mark.parametrize("count", [2, 3, 4])
def test_split(count: int) -> None:
    """Arrive on one slot, a whole barrier on another in between, then wait; and that again."""
    grid = Grid(count, slots=2)
    for call, cta in product(range(6), range(count)):
        arrive(grid, cta, 0, count, call % count, ("split", call))
        if call % 3 == 1:
            arrive(grid, cta, 1, count, 0, ("inner", call))
            wait(grid, cta, 1, ("inner", call))
        wait(grid, cta, 0, ("split", call))
    verdict = grid.explore([(0, 0), (SENSE, 0)])
    assert verdict.proven, verdict


EPOCH = 2  # Index of the launch epoch among the shared words of the next model.


def watched_launch(members: Sequence[tuple[int, ...]], idle: str = "signalled") -> Callable:
    """Two slots, three CTAs, one round per slot with members; all CTAs wait for all rounds.

    Who is no member waits by the parity of the launch epoch. CTA 0 keeps an idle slot in step.
    """
    grid = Grid(3, slots=3)
    for cta in range(3):
        for slot in range(2):
            if cta in members[slot]:
                arrive(grid, cta, slot, len(members[slot]), members[slot][-1], slot)
            elif not members[slot] and cta == 0 and idle == "signalled":
                arrive(grid, cta, slot, 1, 0, ("idle", slot))
        for slot in (0, 1) if cta else (1, 0):
            if cta in members[slot] and cta != 1:
                wait(grid, cta, slot, slot)
            elif members[slot]:
                wait_parity(grid, cta, slot, 1, slot, epoch=EPOCH)
    return grid.explore


def next_epoch(slots: Memory) -> Memory:
    return put(slots, EPOCH, slots[EPOCH] ^ 1)


MEMBERS = [((0, 1), (2,)), ((1,), ()), ((), (0, 2)), ((0, 1, 2), (1, 2)), ((), ())]


def test_waiters_that_do_not_arrive() -> None:
    """One round per slot and launch, any member sets, idle slots in step: any launches."""
    launches = [watched_launch(members) for members in MEMBERS]
    verdict = explore_launches([(0, 0, 0)], launches, next_epoch)
    assert verdict.proven, verdict
    assert verdict.ends == {(0, 0, 0), (SENSE, SENSE, 1)}


def rotating_watch(count: int, slots: int) -> Verdict:
    """In every round another CTA watches, by the number of the round; the others arrive."""
    grid = Grid(count, slots)
    for call, cta in product(range(CALLS), range(count)):
        slot = call % slots
        if cta == call % count:
            wait_parity(grid, cta, slot, call // slots + 1, call)
        else:
            arrive(grid, cta, slot, count - 1, (call + 1) % count, call)
            wait(grid, cta, slot, call)
    return grid.explore([(0,) * slots])


@pytest.mark.parametrize("count", [2, 3, 4])
def test_many_rounds_with_watchers(count: int) -> None:
    """With two slots in turn, a round needs all who waited for the last round on its slot."""
    verdict = rotating_watch(count, slots=2)
    assert verdict.proven, verdict


def test_three_slots() -> None:
    """The other sound variant: three slots in turn, the seed clears the next before it arrives."""
    for count in (2, 3, 4):
        grid = Grid(count, slots=3)
        for call, cta in product(range(CALLS), range(count)):
            if cta == 0:
                grid.add(cta, lambda s, m, after=(call + 1) % 3: (put(s, after, 0), m))
            arrive(grid, cta, call % 3, count, 0, call)
            wait_parity(grid, cta, call % 3, 1, call)
        verdict = grid.explore([(0, 0, 0)])
        assert verdict.proven, verdict


# Broken on purpose.


def test_described_protocol_leaves_early() -> None:
    """As written: with N = 2, call 3 meets the marker of call 1 and lets the early CTA through."""
    assert explore_described(2, calls=2).proven
    verdict = explore_described(2, calls=3)
    assert verdict.unsafe and verdict.unsafe.startswith("CTA 1 left"), verdict
    slots, places = verdict.trace[-1][1]
    assert slots[0] == 0x80000001
    assert places[1] == DONE  # CTA 1 is out of call 3 ...
    assert places[0] != DONE and places[0][0] < 7  # ... and CTA 0 has not begun it.
    for count in (3, 4):
        assert explore_described(count, calls=3).unsafe


def test_described_protocol_read_as_a_flip_dead_locks() -> None:
    """If bit 31 must change instead, the exchange and the fold-back can pass unseen."""
    assert explore_described(2, calls=2, wait_for_change=True).proven
    verdict = explore_described(2, calls=3, wait_for_change=True)
    assert verdict.unsafe is None and verdict.stuck, verdict


def test_arriving_twice_without_waiting_is_caught() -> None:
    """An arrival for the next round, before this one is over, counts for this one."""
    grid = Grid(3, slots=1)
    for call in range(2):
        arrive(grid, 0, 0, 3, 2, call)
        for cta in (1, 2):
            arrive(grid, cta, 0, 3, 2, call)
            wait(grid, cta, 0, call)
    assert grid.explore([(0,)]).unsafe


def test_change_of_members_is_caught() -> None:
    """Between rounds on a slot with nothing in between: a newcomer counts for the round before,
    and one who still waits for that round but is no member of the next misses the flip."""
    for newcomers, unsafe in [((1, 2), True), ((0, 1, 2), True), ((0,), False)]:
        grid = Grid(3, slots=1)
        full(grid, (0, 1), 0, 0, "first")
        for cta in newcomers:
            arrive(grid, cta, 0, len(newcomers), newcomers[0], "second")
            wait(grid, cta, 0, "second")
        verdict = grid.explore([(0,)])
        assert bool(verdict.unsafe) == unsafe and bool(verdict.stuck) != unsafe, verdict
    assert rotating_watch(3, slots=1).stuck


def test_two_seeds_or_none_are_caught() -> None:
    """Two seeds overshoot the flip; without a seed it never comes."""
    for increments in ((seed_increment(2), seed_increment(2)), (1, 1)):
        grid = Grid(2, slots=1)
        for call, cta in product(range(3), range(2)):
            seed = cta if increments[cta] != 1 else -1
            arrive(grid, cta, 0, 2, seed, call)
            wait(grid, cta, 0, call)
        assert not grid.explore([(0,)]).proven


def test_idle_slot_out_of_step_is_caught() -> None:
    """Without the lone signal on idle slots, the launch epoch is not the slot's parity."""
    launches = [watched_launch(members, idle="ignored") for members in MEMBERS]
    assert not explore_launches([(0, 0, 0)], launches, next_epoch).proven


def test_watcher_that_samples_the_sense_is_caught() -> None:
    """A parity read from the slot itself may already be that of the finished round."""
    grid = Grid(2, slots=1)
    arrive(grid, 0, 0, 1, 0, 0)
    grid.add(1, lambda slots, memory: (slots, put(memory, 0, slots[0])))
    wait(grid, 1, 0, 0)
    verdict = grid.explore([(0,)])
    assert verdict.unsafe is None and verdict.stuck


def test_watcher_outside_the_next_round_is_caught() -> None:
    """A second round in the launch can flip the sense back before the waiter has looked."""
    grid = Grid(2, slots=1)
    for call in range(2):
        arrive(grid, 0, 0, 1, 0, call)
        wait(grid, 0, 0, call)
    wait_parity(grid, 1, 0, 1, 0)
    assert grid.explore([(0,)]).stuck
    grid = Grid(2, slots=1)
    for call in range(2):
        arrive(grid, 0, 0, 1, 0, call)
        wait(grid, 0, 0, call)
    wait_parity(grid, 1, 0, 2, 1)  # Round 2 awaited without knowing that round 1 is over.
    assert grid.explore([(0,)]).unsafe
