"""What the lists of the MoE kernel must be, from the picks, in plain Python."""

from __future__ import annotations

from dataclasses import dataclass, field

CHUNK = 8


@dataclass
class Lists:
    """experts: in order of first appearance. Groups: (first, number) of rows and of chunks.

    rows: (pair that h is stored under, place, chunk) of each row; chunk_rows: by chunk, the (pair,
    expert in its group) of each place; pair_of: by expert and token, where h is stored.
    """

    experts: list[int] = field(default_factory=list)
    group_rows: list[tuple[int, int]] = field(default_factory=list)
    group_chunks: list[tuple[int, int]] = field(default_factory=list)
    rows: list[tuple[int, int, int]] = field(default_factory=list)
    chunk_rows: list[list[tuple[int, int]]] = field(default_factory=list)
    pair_of: dict[tuple[int, int], int] = field(default_factory=dict)


def lists_of(picks: list[int], top_k: int, group: int) -> Lists:
    """The lists of picks [pair], of which negative ones are skipped."""
    found = Lists()
    for pair, expert in enumerate(picks):
        if expert >= 0:
            if expert not in found.experts:
                found.experts.append(expert)
            found.pair_of.setdefault((found.experts.index(expert), pair // top_k), pair)
    for first in range(0, len(found.experts), group):
        members = found.experts[first : first + group]
        pairs = [(i, p) for i, e in enumerate(members) for p, pick in enumerate(picks) if pick == e]
        chunks = [pairs[i : i + CHUNK] for i in range(0, len(pairs), CHUNK)]
        found.group_rows.append((len(found.rows), len(pairs)))
        found.group_chunks.append((len(found.chunk_rows), len(chunks)))
        for chunk in chunks:
            number = len(found.chunk_rows)
            for place, (i, pair) in enumerate(chunk):
                source = found.pair_of[first + i, pair // top_k]
                found.rows.append((source, place, number))
            found.chunk_rows.append([(pair, i) for i, pair in chunk])
    return found


def items_of(lists: Lists, slices: int) -> list[tuple[tuple[int, int, int], int, int]]:
    """(row, slice, slot) of every item of h, in the order in which slots are filled."""
    items = []
    for (first, count), (first_chunk, chunks) in zip(
        lists.group_rows, lists.group_chunks, strict=True
    ):
        for slice_ in range(slices):
            for row in lists.rows[first : first + count]:
                turn = first_chunk * slices + slice_ * chunks + row[2] - first_chunk
                items.append((row, slice_, turn))
    return items
