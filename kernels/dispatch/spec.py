"""Compile keys and launch plans of the row permutations; sizes such as T, H and k are run-time.

Rows are moved as vectors of `vector` bytes (1, 2, 4, 8 or 16); dtypes go by torch's names.
"""

from dataclasses import dataclass

from cute_moe.kernels.device.sizes import SMEM_LIMIT, ceil_div, power_of_two, round_up

MAX_SIZE = 1 << 30  # tokens, rows, and bytes of a row: with room for a step in 32 bits
MAX_IDS = 1 << 24  # tokens * top_k of a sort
MAX_GRID_Y = 65535
WARP = 32
LINE = 128
MAX_EXPERTS = 4096
MAX_CHUNK_ITEMS = 2048  # pairs whose rows a CTA of the sort keeps, to copy the tokens
# What the ring leaves, so that a counting CTA for up to 128 experts fits beside it: the 1 KB that
# any CTA takes, and the counters.
COUNT_BYTES = 2048
RANK_WORDS = 32768  # at most as many counters for all ranking warps of a CTA
ALONE_ITEMS = 8192  # up to so many ids every CTA counts all of them


@dataclass(frozen=True)
class DispatchSpec:
    """Dispatch: CTAs of up to `threads` threads, each row by (some of) one CTA."""

    vector: int
    expert_dtype: str = "int32"
    slot_dtype: str = "int32"
    offset_dtype: str = "int32"
    threads: int = 256
    window_rows: int = 1 << 16  # rows whose state a zeroing CTA keeps in shared memory at a time

    @property
    def smem_bytes(self) -> int:
        """One bit a row of the window, and three counters (a multiple of 16 bytes)."""
        return self.window_rows // 8 + 16


@dataclass(frozen=True)
class CountSpec:
    """The first of two launches of the sort: how often each expert occurs in every chunk.

    With 256 threads and up to 128 experts a CTA fits an SM beside one of the second launch, which
    reads rows meanwhile.
    """

    capacity: int
    id_dtype: str
    threads: int = 1024

    @property
    def smem_bytes(self) -> int:
        """One counter for every expert and one for dropped ids."""
        return 4 * (self.capacity + 1)


@dataclass(frozen=True)
class SortSpec:
    """Ranks of expert ids, and with `vector` > 0 the copies of rows.

    `capacity`: a power of two, at least the number of experts. `alone`: every CTA counts all ids
    itself; otherwise it reads the table of the counting launch. `bulk`: rows go through a ring in
    shared memory by bulk copies, which needs 16-byte vectors.
    """

    capacity: int
    id_dtype: str
    alone: bool
    threads: int
    vector: int = 0
    bulk: bool = False

    @property
    def buckets(self) -> int:
        """Experts, and one bucket for dropped ids."""
        return self.capacity + 1

    @property
    def rank_warps(self) -> int:
        """Warps that rank; each has a counter for every bucket."""
        most = 8 if self.bulk else 32
        return min(self.threads // WARP, most, RANK_WORDS // self.capacity)

    @property
    def table_bytes(self) -> int:
        """Counters of the warps, three tables of buckets, and the rows of a chunk."""
        tables = round_up(4 * self.rank_warps * self.buckets, 16) + 2 * round_up(
            4 * self.buckets, 16
        )
        if not self.vector:
            return tables + 4 * self.buckets
        return tables + round_up(4 * self.buckets, 16) + 4 * MAX_CHUNK_ITEMS

    @property
    def stages(self) -> int:
        """Most stages of the ring, each with a barrier of 8 bytes."""
        return 64 if self.bulk else 0

    @property
    def ring_bytes(self) -> int:
        """The whole lines of shared memory behind tables and barriers."""
        return (SMEM_LIMIT - COUNT_BYTES) // LINE * LINE - self._ring_start if self.bulk else 0

    @property
    def smem_bytes(self) -> int:
        """All of it."""
        return self._ring_start + self.ring_bytes if self.bulk else self.table_bytes

    @property
    def _ring_start(self) -> int:
        return round_up(self.table_bytes + 8 * self.stages, LINE)


@dataclass(frozen=True)
class CombineSpec:
    """Combine: `dtype` of the rows, dtypes of weights and indices, `batch` slots in flight."""

    vector: int
    dtype: str
    weight_dtype: str
    expert_dtype: str
    slot_dtype: str
    offset_dtype: str
    threads: int = 256
    batch: int = 4
    smem_bytes: int = 0


def row_lanes(vectors: int, threads: int) -> int:
    """Threads for a row of `vectors` vectors: a divisor or a multiple of a warp, up to `threads`.

    The fewest that make no more passes over the row than `threads` would.
    """
    if vectors <= WARP // 2:
        return power_of_two(vectors)
    passes = ceil_div(vectors, threads)
    return round_up(ceil_div(vectors, passes), WARP)


@dataclass(frozen=True)
class RowPlan:
    """CTAs of lanes x rows threads; `extra`: zeroing CTAs of dispatch, column parts of combine."""

    lanes: int
    rows: int
    extra: int


def plan_dispatch(
    spec: DispatchSpec, tokens: int, rows: int, row_bytes: int, sm_count: int
) -> RowPlan:
    """The grid of a dispatch of `tokens` tokens into `rows` rows.

    With no more rows than tokens all rows are filled as a rule, and there are no zeroing CTAs.
    """
    lanes = row_lanes(row_bytes // spec.vector, spec.threads)
    zeroing = 0
    if rows > tokens:
        zeroing = max(8, min(sm_count, (rows - tokens) * row_bytes >> 16))
    return RowPlan(lanes, spec.threads // lanes, zeroing)


def plan_combine(spec: CombineSpec, tokens: int, row_bytes: int, sm_count: int) -> RowPlan:
    """The grid of a combine into `tokens` rows; few tokens share out their columns."""
    vectors = row_bytes // spec.vector
    lanes = row_lanes(vectors, spec.threads)
    rows = spec.threads // lanes
    parts = 1
    if tokens < 4 * sm_count * rows:
        lanes = min(lanes, 128)
        rows, parts = 128 // lanes, min(ceil_div(vectors, lanes), MAX_GRID_Y)
    return RowPlan(lanes, rows, parts)


@dataclass(frozen=True)
class SortPlan:
    """chunks x parts CTAs; tokens (with rows to copy, else ids) are dealt out evenly to the chunks,
    the columns of rows to the parts."""

    spec: SortSpec
    chunks: int
    parts: int


def plan_sort(
    tokens: int, top_k: int, num_experts: int, id_dtype: str, vector: int, row_bytes: int,
    sm_count: int,
) -> SortPlan:  # fmt: skip
    """Variant and grid for 1 .. MAX_IDS ids, tokens * top_k; `vector` 0: there are no rows to copy.

    With rows, top_k is at most MAX_CHUNK_ITEMS.
    """
    items = tokens * top_k
    capacity = max(64, power_of_two(num_experts))
    alone = items <= (ALONE_ITEMS // 2 if vector else ALONE_ITEMS)
    if not vector:
        threads = 256 if items <= 1024 else 1024
        chunks = 32 if items <= 65536 else 128
        spec = SortSpec(capacity, id_dtype, alone, threads)
        return SortPlan(spec, min(chunks, items), 1)
    bulk = not alone and vector == 16 and row_bytes >= 1024
    chunks = max(min(tokens, sm_count), ceil_div(tokens, MAX_CHUNK_ITEMS // top_k))
    vectors = row_bytes // vector
    parts = max(1, min(sm_count // chunks, vectors // WARP))
    # A CTA numbers its vectors in 32 bits.
    parts = max(parts, (ceil_div(tokens, chunks) * vectors >> 30) + 1)
    threads = 256 if alone else 1024
    spec = SortSpec(capacity, id_dtype, alone, threads, vector, bulk)
    return SortPlan(spec, chunks, 1 if bulk else parts)
