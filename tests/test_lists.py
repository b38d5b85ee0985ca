"""The kernel's lists, its own code run lane by lane, against plain Python."""

import random
from types import SimpleNamespace

import pytest
from moe_lists import Lists, items_of, lists_of
from warp import Warp, plain_functions

from cute_moe.kernels.moe import handover, lists, routing
from cute_moe.kernels.moe.memory import (
    ACTIVE,
    CHUNK_SHIFT,
    CHUNKS,
    COUNT_SHIFT,
    EXPERT_SHIFT,
    FIRST_MASK,
    PAIR_MASK,
    PARITY,
    PLACE_SHIFT,
    ROWS,
)
from cute_moe.kernels.moe.spec import CHUNK_ROWS, MAX_TOKENS, MoeSpec

BUILDERS = ("build_lists", "rank_pairs", "place_groups", "place_pair")
VIEWS = (
    "pick", "count", "index", "experts", "pair_of", "first_place", "group_rows", "group_chunks",
    "chunk_rows", "rows", "meta",
)  # fmt: skip
CLEARED = {"count": 0, "pair_of": -1, "chunk_rows": -1}
JUNK = 0x5A5A5A5A


def built(picks: list[int], spec: MoeSpec, draw: random.Random) -> SimpleNamespace:
    """Shared memory after `build_lists`."""
    sizes = {name: count for name, _, count in spec.shared_regions}
    shared = SimpleNamespace(
        lists=None, **{name: [CLEARED.get(name, JUNK)] * sizes[name] for name in VIEWS}
    )
    shared.pick[: len(picks)] = picks
    warp = Warp(draw)
    code = plain_functions(lists, BUILDERS, **warp.names)
    warp.run(lambda: code.build_lists(len(picks) // spec.top_k, 7, shared, spec))
    return shared


def decoded(shared: SimpleNamespace, spec: MoeSpec) -> Lists:
    """The lists that shared memory holds."""
    active = shared.meta[ACTIVE]
    groups = -(-active // spec.group)

    def both(words: list[int]) -> list[tuple[int, int]]:
        return [(word & FIRST_MASK, word >> COUNT_SHIFT) for word in words[:groups]]

    rows = [
        (row & PAIR_MASK, row >> PLACE_SHIFT & CHUNK_ROWS - 1, row >> CHUNK_SHIFT)
        for row in shared.rows[: shared.meta[ROWS]]
    ]
    chunks = [
        shared.chunk_rows[i * CHUNK_ROWS : (i + 1) * CHUNK_ROWS] for i in range(shared.meta[CHUNKS])
    ]
    pairs = {divmod(i, MAX_TOKENS): pair for i, pair in enumerate(shared.pair_of) if pair >= 0}
    return Lists(
        shared.experts[:active],
        both(shared.group_rows),
        both(shared.group_chunks),
        rows,
        [[(w & PAIR_MASK, w >> EXPERT_SHIFT) for w in chunk if w >= 0] for chunk in chunks],
        pairs,
    )


def picks_of(kind: str, spec: MoeSpec, tokens: int, draw: random.Random) -> list[int]:
    """Picks [pair] of a batch."""
    experts = range(spec.num_experts)
    if kind == "one set":
        return draw.sample(experts, spec.top_k) * tokens
    if kind == "distinct":
        return [e for _ in range(tokens) for e in draw.sample(experts, spec.top_k)]
    if kind == "all skipped":
        return [-1] * (tokens * spec.top_k)
    if kind == "one expert":
        return [draw.choice(experts)] * (tokens * spec.top_k)
    few = draw.sample(experts, min(spec.num_experts, 5))
    found = [draw.choice([-1, *few, *experts]) for _ in range(tokens * spec.top_k)]
    row = draw.randrange(tokens) * spec.top_k
    return found[:row] + [-1] * spec.top_k + found[row + spec.top_k :]


SPECS = {
    "35B": MoeSpec(),
    "groups of two": MoeSpec(128, 4096, 1536, 8, routing="ids"),
    "groups of one, slices": MoeSpec(64, 7168, 2048, 8, routing="ids"),
    "few experts, three slots": MoeSpec(9, 2048, 512, 3, routing="ids"),
    "sixteen slots, groups of eight": MoeSpec(300, 512, 512, 16, routing="ids"),
    "eleven slots, one expert": MoeSpec(1, 2048, 768, 11, routing="ids"),
}


CASES = [
    (name, kind)
    for name, spec in SPECS.items()
    for kind in ("distinct", "one set", "repeated", "one expert", "all skipped")
    # The kernel itself picks no expert twice and skips none.
    if kind in ("distinct", "one set")
    and spec.top_k <= spec.num_experts
    or kind not in ("distinct", "one set")
    and spec.routing == "ids"
]


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("name, kind", CASES)
def test_lists_are_those_of_the_picks(name, kind, tokens) -> None:
    spec = SPECS[name]
    draw = random.Random(f"{name} {kind} {tokens}")
    picks = picks_of(kind, spec, tokens, draw)
    shared = built(picks, spec, draw)
    found, wanted = decoded(shared, spec), lists_of(picks, spec.top_k, spec.group)
    for what in vars(wanted):
        assert getattr(found, what) == getattr(wanted, what), what
    assert shared.meta[PARITY] == 1
    assert shared.meta[CHUNKS] <= spec.max_chunks
    check_items(shared, wanted, spec)
    check_early_experts(picks, wanted, spec, draw)


def check_items(shared: SimpleNamespace, wanted: Lists, spec: MoeSpec) -> None:
    """The loaders find every item of h, in order, and from any group before it."""
    names = Warp(random.Random(0)).names
    code = plain_functions(handover, ["find_item"], **names)
    for number, (row, slice_, turn) in enumerate(items_of(wanted, spec.slices)):
        item = code.find_item(number, 0, shared, spec)
        again = code.find_item(number, item.group, shared, spec)
        fields = item.row & PAIR_MASK, item.row >> PLACE_SHIFT & CHUNK_ROWS - 1
        assert (*fields, item.row >> CHUNK_SHIFT) == row
        assert (item.slice_, item.turn) == (slice_, turn) and again == item


def check_early_experts(picks, wanted: Lists, spec: MoeSpec, draw: random.Random) -> None:
    """What the producer takes from token 0 alone is what the lists have there."""
    if spec.routing != "ids":
        return
    of_token = picks[: spec.top_k]
    known = len({pick for pick in of_token if pick >= 0})
    for rank in draw.sample(range(spec.top_k + 1), 2):
        warp = Warp(draw)
        code = plain_functions(routing, ["early_expert"], **warp.names)

        def find(code=code, warp=warp, rank=rank):
            lane = warp.here.lane
            return code.early_expert(of_token[lane] if lane < spec.top_k else -1, rank, spec)

        (found,) = set(warp.run(find))
        assert found[1] == (rank < known)
        assert not found[1] or found[0] == wanted.experts[rank]
