"""Rows of the benchmark for the tests of its arithmetic and its report."""

import protocol

MB = 1 << 20


def make_row(contestant: str, us: float, tokens: int | None = 2, **changes: object) -> protocol.Row:
    """A cold row of the MoE layer with 16 experts; `changes` are other fields of Row."""
    fields = dict(op="moe", contestant=contestant, tokens=tokens, case=None, routing="uniform",
                  cache="cold", us=us, spread_us=(us - 0.1, us + 0.2), bytes=16 * 3 * MB,
                  experts=16.0, reuse_bytes=300 * MB, check="ok")  # fmt: skip
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
