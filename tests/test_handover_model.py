"""Every interleaving of the h hand-over: data words that are their own ready flags.

Shared memory is h[BUFFERS][WORDS] and a table of epoch words, all zeroed once. A CTA reads the
epoch word of its index; the parity p of that chooses the buffer. Then it does, in any order: store
its words of h[p] (never zero), clear its share of h[1 - p], poll words of h[p] until they are not
zero and use them, store the next epoch to every epoch word that it owns. With a grid of G, CTA c
owns c, c + G, c + 2G, ... A launch begins when all of the one before is done and visible.

Words and CTAs are few here; how many buffers there are, and whether epoch words are left over by
every grid, comes from `MoeSpec`. The model keeps of a word only whether it is empty, of this launch
or older, so that few states stand for any number of launches: each check covers every sequence of
its launch kinds.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import pytest
from kernel_counts import handover
from model_checker import DONE, Process, Verdict, Violation, explore, explore_launches, put

from cute_moe.kernels.moe.spec import MAX_GRID, MoeSpec

GRIDS = (1, 2, 3)
WORDS = 2  # Per buffer.
COUNTS = handover(MoeSpec())
BUFFERS = COUNTS["buffers"]
# Where the kernel has a word without a CTA, so has the model.
EPOCHS = max(GRIDS) + min(COUNTS["spare_epochs"], 1)
EMPTY, STALE, FRESH = 0, 1, 2  # FRESH + n: stored by launch n of those that run together.

Buffers = tuple[tuple[int, ...], ...]
Shared = tuple[Buffers, tuple[int, ...]]  # h, and the parities of the epoch words.
ZEROED: Shared = (((EMPTY,) * WORDS,) * BUFFERS, (0,) * EPOCHS)


@dataclass(frozen=True)
class Rules:
    """The protocol; each change of a default is a way to break it."""

    buffer_in_use: Callable[[int], int] = field(default=lambda epoch: epoch)
    cleared_buffer: Callable[[int], int | None] = field(default=lambda epoch: 1 - epoch)
    owned_epochs: Callable[[int, int], Iterable[int]] = field(
        default=lambda cta, grid: range(cta, EPOCHS, grid)
    )
    reads_epoch_before_storing_it: bool = True
    polls_every_word: bool = True
    zero_is_a_value: bool = False


SOUND = Rules()


@dataclass(frozen=True)
class Launch:
    """One kind of launch: grid size, which words of h it has, and which launch it is."""

    grid: int
    active: tuple[int, ...] = tuple(range(WORDS))
    number: int = 0

    def writer(self, word: int) -> int:
        return word % self.grid

    def clearer(self, word: int) -> int:
        """Not the writer where the grid has two, so that the shares do not coincide."""
        return (word + 1) % self.grid


def put_word(shared: Shared, buffer: int, word: int, value: int) -> Shared:
    h, epochs = shared
    return put(h, buffer, put(h[buffer], word, value)), epochs


def use(launch: Launch, value: int) -> None:
    """A reader takes a word: it must be what this launch has stored."""
    if value != FRESH + launch.number:
        name = {EMPTY: "an empty word", STALE: "a word of an earlier launch"}
        raise Violation(f"launch {launch.number} used {name.get(value, 'a word of another')}")


# One action of a CTA: (shared, epoch) -> shared after it, or None while it must wait.
Action = Callable[[Shared, int], Shared | None]


def store_word(rules: Rules, launch: Launch, word: int) -> Action:
    value = EMPTY if rules.zero_is_a_value else FRESH + launch.number
    return lambda shared, epoch: put_word(shared, rules.buffer_in_use(epoch), word, value)


def clear_word(rules: Rules, word: int) -> Action:
    def clear(shared: Shared, epoch: int) -> Shared:
        buffer = rules.cleared_buffer(epoch)
        return shared if buffer is None else put_word(shared, buffer, word, EMPTY)

    return clear


def read_word(rules: Rules, launch: Launch, word: int) -> Action:
    polled = word if rules.polls_every_word else launch.active[0]

    def read(shared: Shared, epoch: int) -> Shared | None:
        buffer = shared[0][rules.buffer_in_use(epoch)]
        if buffer[polled] == EMPTY:
            return None
        use(launch, buffer[word])
        return shared

    return read


def store_epoch(word: int) -> Action:
    return lambda shared, epoch: (shared[0], put(shared[1], word, 1 - epoch))


def actions_of(rules: Rules, launch: Launch, cta: int) -> list[Action]:
    """What the CTA does once it knows its epoch; in any order."""
    actions = [
        store_word(rules, launch, word) for word in launch.active if launch.writer(word) == cta
    ]
    actions += [clear_word(rules, word) for word in range(WORDS) if launch.clearer(word) == cta]
    actions += [read_word(rules, launch, word) for word in launch.active]
    return actions + [store_epoch(word) for word in rules.owned_epochs(cta, launch.grid)]


def cta_process(rules: Rules, launch: Launch, cta: int) -> Process:
    """A CTA; its local state is (epoch or None, bit mask of pending actions)."""
    actions = actions_of(rules, launch, cta)
    everything = (1 << len(actions)) - 1
    own_epoch = 1 << len(actions) - len(list(rules.owned_epochs(cta, launch.grid)))

    def step(shared: Shared, state: tuple) -> Iterable[tuple[Shared, object]]:
        epoch, pending = state
        if epoch is None:
            yield shared, (shared[1][cta], pending)
            if not rules.reads_epoch_before_storing_it and pending == everything:
                # Another warp of this CTA, which has read the epoch, stores the next one.
                after = store_epoch(cta)(shared, shared[1][cta])
                yield after, (None, pending & ~own_epoch)
            return
        for i, action in enumerate(actions):
            if pending >> i & 1:
                after = action(shared, epoch)
                if after is not None:
                    left = pending & ~(1 << i)
                    yield after, (epoch, left) if left else DONE

    return Process(f"CTA {cta}", (None, everything), step)


def launch_from(rules: Rules, launch: Launch) -> Callable[[Iterable[Shared]], Verdict]:
    """All interleavings of one launch, from each of some shared states."""
    processes = [cta_process(rules, launch, cta) for cta in range(launch.grid)]
    return lambda initial: explore(initial, processes)


def age(shared: Shared) -> Shared:
    """The kernel boundary: what was stored is now of an earlier launch."""
    h, epochs = shared
    return tuple(tuple(min(word, STALE) for word in buffer) for buffer in h), epochs


def any_launches(rules: Rules, launches: Sequence[Launch]) -> Verdict:
    """Every sequence of these launches, of any length."""
    return explore_launches([ZEROED], [launch_from(rules, kind) for kind in launches], age)


def test_no_grid_outgrows_its_epoch_words() -> None:
    assert handover(MoeSpec(grid=MAX_GRID))["spare_epochs"] >= 0
    with pytest.raises(ValueError, match="^grid: expected"):
        MoeSpec(grid=MAX_GRID + 1)


SAME_GRID = [Launch(2), Launch(2, active=(1,)), Launch(2, active=())]
ALL_KINDS = [Launch(grid, active) for grid, active in product(GRIDS, [(0, 1), (0,), ()])]


def test_same_grid() -> None:
    verdict = any_launches(SOUND, SAME_GRID)
    assert verdict.proven, verdict


def test_changing_grids() -> None:
    """1 to 3 CTAs and any set of words from launch to launch; epoch words always agree."""
    verdict = any_launches(SOUND, ALL_KINDS)
    assert verdict.proven, verdict
    for h, epochs in verdict.ends:
        assert len(set(epochs)) == 1
        assert set(h[epochs[0]]) == {EMPTY}, "the next launch's buffer is not clear"


def test_ends_do_not_depend_on_the_history() -> None:
    """After any launches both parities occur, each with any leftover in the other buffer."""
    ends = any_launches(SOUND, ALL_KINDS).ends
    assert {epochs[0] for _, epochs in ends} == {0, 1}
    assert len(ends) == 6


BROKEN = {
    "clears the buffer in use": (replace(SOUND, cleared_buffer=lambda epoch: epoch), "stuck"),
    "clears nothing": (replace(SOUND, cleared_buffer=lambda epoch: None), "earlier launch"),
    "one buffer, cleared in use": (
        replace(SOUND, buffer_in_use=lambda epoch: 0, cleared_buffer=lambda epoch: 0),
        "stuck",
    ),
    "one buffer, never cleared": (
        replace(SOUND, buffer_in_use=lambda epoch: 0, cleared_buffer=lambda epoch: None),
        "earlier launch",
    ),
    "stores zeros": (replace(SOUND, zero_is_a_value=True), "stuck"),
    "polls one word, uses all": (replace(SOUND, polls_every_word=False), "empty word"),
    "stores the epoch before all warps have read it": (
        replace(SOUND, reads_epoch_before_storing_it=False),
        "stuck",
    ),
    "CTA 0 stores all epochs": (
        replace(SOUND, owned_epochs=lambda cta, grid: () if cta else range(EPOCHS)),
        "stuck",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rule_is_caught(name: str) -> None:
    """Each rule is needed even when the grid never changes."""
    rules, expected = BROKEN[name]
    verdict = any_launches(rules, SAME_GRID)
    if expected == "stuck":
        assert verdict.stuck, verdict
    else:
        assert verdict.unsafe and expected in verdict.unsafe, verdict


def test_epochs_of_absent_ctas_are_needed() -> None:
    """Own word only: sound while the grid stays, wrong once a larger grid follows a smaller one."""
    rules = replace(SOUND, owned_epochs=lambda cta, grid: (cta,))
    assert any_launches(rules, SAME_GRID).proven
    assert any_launches(rules, [Launch(3)]).proven
    assert not any_launches(rules, [Launch(2), Launch(3)]).proven


def test_overlapping_launches_are_caught() -> None:
    """The kernel boundary is needed: two launches at once mix up their buffers."""
    launches = [Launch(2), Launch(2, number=1)]
    processes = [cta_process(SOUND, launch, cta) for launch in launches for cta in range(2)]
    assert not explore([ZEROED], processes).proven
