"""A warp in plain Python: device code from its text, lane by lane, with the warp's own operations.

Lanes run one after the other, in a random order, from one operation of the whole warp to the next;
code whose result depends on that order lacks a `sync_warp`.
"""

from __future__ import annotations

import ast
import random
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace

LANES = 32


class Warp:
    """32 lanes; `cute`, `cutlass` and `Int32` are what their code sees under these names."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.here = threading.local()
        self.go = [threading.Semaphore(0) for _ in range(LANES)]
        self.back = threading.Semaphore(0)
        self.asked: list[tuple | None] = [None] * LANES
        self.given: list[tuple | None] = [None] * LANES
        arch = SimpleNamespace(
            lane_idx=lambda: self.here.lane,
            sync_warp=lambda: self.together("sync", None),
            match_sync=lambda mask, value, kind: self.mask(value, "match"),
            vote_ballot_sync=lambda value: self.mask(bool(value), "ballot"),
            shuffle_sync_up=lambda value, offset, mask_and_clamp: self.shuffle_up(value, offset),
            shuffle_sync=lambda value, offset: self.together("shuffle", value)[offset],
            popc=lambda word: (word & 0xFFFFFFFF).bit_count(),
            mbarrier_arrive=lambda bar: None,
        )
        self.names = {
            "cute": SimpleNamespace(arch=arch, make_rmem_tensor=lambda size, kind: [0] * size),
            "cutlass": SimpleNamespace(
                const_expr=lambda value: value, range_constexpr=range, min=min, max=max
            ),
            "Int32": int,
            "Boolean": bool,
        }

    def together(self, what: str, value: object) -> list:
        """Give a value and get those of all lanes."""
        lane = self.here.lane
        self.asked[lane] = (what, value)
        self.back.release()
        self.go[lane].acquire()
        assert {kind for kind, _ in self.given} == {what}, "lanes diverge"
        return [of for _, of in self.given]

    def mask(self, value: object, what: str) -> int:
        """Lanes with this value (match), or with a true one (ballot)."""
        wanted = value if what == "match" else True
        return sum(1 << i for i, v in enumerate(self.together(what, value)) if v == wanted)

    def shuffle_up(self, value: int, offset: int) -> int:
        lane = self.here.lane
        values = self.together("shuffle up", value)
        return values[lane - offset] if lane >= offset else value

    def run(self, function: Callable[[], object]) -> list:
        """What `function()` returns in each lane."""
        results: list = [None] * LANES

        def life(lane: int) -> None:
            self.here.lane = lane
            self.go[lane].acquire()
            try:
                results[lane] = function()
            except Exception as error:
                results[lane] = error
            self.asked[lane] = ("end", None)
            self.back.release()

        threads = [threading.Thread(target=life, args=(i,), daemon=True) for i in range(LANES)]
        for thread in threads:
            thread.start()
        while True:
            for lane in self.draw.sample(range(LANES), LANES):
                self.go[lane].release()
                self.back.acquire()
            failed = [r for r in results if isinstance(r, Exception)]
            if failed:
                raise failed[0]
            self.given = list(self.asked)
            if {what for what, _ in self.given} == {"end"}:
                return results


def plain_functions(
    module: ModuleType, names: Iterable[str], **meanings: object
) -> SimpleNamespace:
    """Functions of a module from its text, undecorated, where some names have other meanings."""
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    wanted = set(names)
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in wanted]
    assert {n.name for n in found} == wanted
    for function in found:
        function.decorator_list = []
    space = vars(module) | meanings
    code = compile(ast.Module(found, []), str(module.__file__), "exec", flags=ANNOTATIONS)
    exec(code, space)
    return SimpleNamespace(**{name: space[name] for name in wanted})


ANNOTATIONS = annotations.compiler_flag
