"""Rows of the benchmark, and what stands for CUDA graphs and streams in tests without a GPU."""

from collections.abc import Callable, Mapping, Sequence

import protocol
import pytest
import torch

from cute_moe.shapes import DEFAULT_SHAPE

MB = 1 << 20


def make_row(contestant: str, us: float, tokens: int | None = 2, **changes: object) -> protocol.Row:
    """A cold row of the MoE layer with 16 experts; `changes` are other fields of Row."""
    fields = dict(op="moe", contestant=contestant, tokens=tokens, case=None, routing="uniform",
                  cache="cold", us=us, spread_us=(us - 0.1, us + 0.2), bytes=16 * 3 * MB,
                  experts=16.0, reuse_bytes=300 * MB, check="ok",
                  shape=None if tokens is None else DEFAULT_SHAPE)  # fmt: skip
    return protocol.Row(**{**fields, **changes})


def example_rows() -> list[protocol.Row]:
    """One M with every kind of row, and a row with a case."""
    case = dict(case="empty kernel", routing="none", check="none")
    return [
        make_row("cute_moe", 15.0, of_floor=1.25),
        make_row("floor", 12.0),
        make_row("cute_moe", 11.0, cache="warm"),
        make_row("cute_moe", 25.0, cache="eager"),
        make_row("empty", 2.0, None, **case),
    ]


class Streams:
    """torch's current stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.seen = "before", []
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "set_stream", self.set)

    def set(self, stream: str) -> None:
        self.current = stream


class FakeGraph:
    """A captured graph that replays its launches, or, as on a wrong stream, nothing."""

    def __init__(self, launches: Sequence[Callable[[], object]], empty: bool = False) -> None:
        self.launches = () if empty else launches
        for launch in launches:
            launch()

    def replay(self) -> None:
        for launch in self.launches:
            launch()


def fake_interleave(
    works: Mapping[str, Callable[[], object]], replays: int
) -> dict[str, list[float]]:
    """Runs each once; the times are 24, 25, ... µs."""
    for work in works.values():
        work()
    return {name: [24.0 + turn for turn in range(replays)] for name in works}
