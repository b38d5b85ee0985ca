"""Shape, options and geometry of the one-launch MoE kernel: the compile key. Pure Python.

Symbols: E experts, K hidden features, N intermediate features, k = top_k, M tokens (at most
MAX_TOKENS). A pair is a (token, slot). The weights are dealt out in two ways:

- Up: a *unit* is `unit_rows` rows of w13 (half of them gate rows, half the up rows of the same
  features) of one expert, by all of K. Units go to the CTAs in turn.
- Down: a CTA owns blocks of `columns` output columns, for all experts. `group` experts are stacked
  in the 64 rows of one WGMMA; their pairs fill *chunks* of CHUNK_ROWS, the N of a WGMMA. The
  features of h are cut into *steps* of one ring stage and *slices* of one slot of h.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from cute_moe.kernels.device.options import check_bool, check_choice, check_int
from cute_moe.kernels.device.sizes import SMEM_LIMIT, ceil_div, round_up

MAX_TOKENS = 8  # of one launch at most: columns of x in a WGMMA
CHUNK_ROWS = 8  # pairs of one chunk: columns of h in a WGMMA
MMA_ROWS = 64  # weight rows of one WGMMA
ATOM_ROWS = 8  # rows of a swizzled shared-memory atom of 128 bytes each
BLOCK = 128  # features of an atom; the largest block that shares a scale
STAGE_BYTES = 16 * 1024
MAX_STAGES = 6
SMALL_GROUP = 24 * 1024  # bytes of a group that the stream brings faster than one is worked off
IN_FLIGHT = 64 * 1024  # bytes of a CTA's copies that keep the DRAM busy
MAX_TOP_K = 16
MAX_EXPERTS = 1024
MAX_GRID = 256  # epoch words kept in the scratchpad
SCALE_BATCHES = 3  # batches of groups whose down scales shared memory holds
BATCH_SCALES = 256  # of a batch of several groups, at most: 8 loads a lane
MAX_SLOTS = 16  # of h
HALVES = 2  # consumer warpgroups; groups go to them in turn
SCALE_BYTES = {"float32": 4, "bfloat16": 2, "float8_e8m0fnu": 1}
EVENTS = (  # of a traced launch, by role; see perf/stamps.py
    "start",
    "lists",
    "scales",
    "x_ready",
    "first_copy",
    "up_issued",
    "down_issued",
    "landed",
    "first_tile",
    "up_done_0",
    "up_done_1",
    "h_first",
    "h_ready",
    "down_start",
    "h_go",
    "first_product",
    "down_done_0",
    "down_done_1",
    "end",
)


@dataclass(frozen=True)
class MoeSpec:
    """One compiled variant; the options go by their names in `cute_moe.mono_moe`.

    routing: "logits": the kernel selects and weighs; "ids": ids and weights are given.
    scale_block: features of N that share a weight scale; scale_block_hidden: those of K.
    """

    num_experts: int = 256
    hidden: int = 2048
    intermediate: int = 512
    top_k: int = 8
    routing: str = "logits"
    scoring_func: str = "softmax"
    renormalize: bool = True
    routing_out: bool = False  # the chosen ids and weights are results too
    logits_dtype: str = "bfloat16"
    ids_dtype: str = "int32"
    weights_dtype: str = "float32"
    mapped_experts: int = 0  # ids that an expert map takes; 0: the ids are those of the weights
    scales_up_dtype: str = "float32"
    scales_down_dtype: str = "float32"
    scale_block: int = 128
    scale_block_hidden: int = 128
    interleave_up: bool = True  # from gate rows then up rows; False: they come interleaved by 8
    activations: str = "fp8"  # "bf16": x and h as two e4m3 terms, which hold all bits of bf16
    programmatic: bool = False  # launched before the kernel ahead has ended
    grid: int = 132
    unit_rows: int = 0  # of an up unit; 0: chosen by the shape
    group_run: int = 0  # groups in a row that a warpgroup takes at once, 1 or 2; 0: by the shape
    stages: int = 0  # of the ring; 0: chosen by what shared memory holds, as are `slice_steps`
    slice_steps: int = 0  # ring steps of one slice: a slot of h holds up to four blocks of 128
    trace: tuple[str, ...] = ()  # events to stamp, normally none

    def __post_init__(self) -> None:
        check_shape(self.num_experts, self.hidden, self.intermediate, self.top_k)
        check_choice("routing", self.routing, ("logits", "ids"))
        check_choice("scoring_func", self.scoring_func, ("softmax", "sigmoid"))
        check_choice("logits_dtype", self.logits_dtype, ("bfloat16", "float32"))
        check_choice("ids_dtype", self.ids_dtype, ("int32", "int64"))
        check_choice("weights_dtype", self.weights_dtype, ("float32", "bfloat16"))
        check_choice("scales_up_dtype", self.scales_up_dtype, tuple(SCALE_BYTES))
        check_choice("scales_down_dtype", self.scales_down_dtype, tuple(SCALE_BYTES))
        check_choice("activations", self.activations, ("fp8", "bf16"))
        if self.routing == "logits" and self.top_k > self.num_experts:
            raise ValueError(f"top_k: expected 1..{self.num_experts}, got {self.top_k}")
        if self.scale_block not in (128, 64, 32) or self.intermediate % self.scale_block:
            raise ValueError(
                f"scale_block: expected 128, 64 or 32, a divisor of {self.intermediate}, "
                f"got {self.scale_block}"
            )
        if self.scale_block_hidden not in (BLOCK, self.scale_block):
            raise ValueError(
                f"scale_block_hidden: expected {BLOCK} or {self.scale_block}, "
                f"got {self.scale_block_hidden}"
            )
        check_int("grid", self.grid, 1, MAX_GRID)
        for name in ("renormalize", "interleave_up", "programmatic", "routing_out"):
            check_bool(name, getattr(self, name))
        if self.group_run not in (0, 1, 2):
            raise ValueError(f"group_run: expected 0, 1 or 2, got {self.group_run}")
        if self.unit_rows not in (0, 16, 32, 64):
            raise ValueError(f"unit_rows: expected 0, 16, 32 or 64, got {self.unit_rows}")
        self._choose_ring()

    def _choose_ring(self) -> None:
        """Set `stages` and `slice_steps` where they are 0. Raises ValueError if nothing fits.

        Four stages come first, then six slots of h, then more stages.
        """
        every_slice = [d for d in range(1, 4 // self.step_blocks + 1) if self.steps % d == 0]
        best = (0, 0, 0, 0)
        for stages in (self.stages,) if self.stages else range(2, MAX_STAGES + 1):
            for steps in (self.slice_steps,) if self.slice_steps else every_slice:
                slots = self._slots_with(stages, steps)
                held = self.max_own_blocks * steps * self.step_stages
                if slots and held <= stages and stages % self.step_stages == 0:
                    best = max(best, (min(stages, 4), min(slots, 6), stages, steps))
        if not best[0]:
            raise ValueError(
                f"grid: too few CTAs for their shared memory, got {self.grid} with "
                f"hidden={self.hidden}, intermediate={self.intermediate}, top_k={self.top_k}, "
                f"activations={self.activations!r}"
            )
        object.__setattr__(self, "stages", best[2])
        object.__setattr__(self, "slice_steps", best[3])

    # Sizes that several phases share.

    @property
    def terms(self) -> int:
        """e4m3 values that an activation is the sum of."""
        return 2 if self.activations == "bf16" else 1

    @property
    def pairs(self) -> int:
        """(token, slot) pairs of the largest batch; pair = token * top_k + slot."""
        return MAX_TOKENS * self.top_k

    @property
    def max_active(self) -> int:
        """Most experts that a batch can have."""
        return min(self.pairs, self.num_experts)

    @property
    def k_blocks(self) -> int:
        """128-feature blocks of the hidden size."""
        return self.hidden // BLOCK

    @property
    def h_block(self) -> int:
        """Features of h that share a scale: those of a block of down weights."""
        return self.scale_block

    # Up units.

    @cached_property
    def rows(self) -> int:
        """Rows of an up unit: fewer where a token has so few units that CTAs would have none."""
        if self.unit_rows:
            return self.unit_rows
        for rows in (64, 32):
            if 10 * self.top_k * 2 * self.intermediate >= 9 * self.grid * rows:
                return rows
        return 16

    @property
    def unit_features(self) -> int:
        """Features of h that an up unit makes."""
        return self.rows // 2

    @property
    def units_per_expert(self) -> int:
        """Up units of one expert."""
        return self.intermediate // self.unit_features

    @cached_property
    def stage_blocks(self) -> int:
        """128-feature blocks of a unit in one ring stage: as many as fit and divide K."""
        return _largest_divisor(self.k_blocks, STAGE_BYTES // (self.rows * BLOCK))

    @property
    def unit_stages(self) -> int:
        """Ring stages of one up unit."""
        return self.k_blocks // self.stage_blocks

    @property
    def up_stage_bytes(self) -> int:
        """Weight bytes of one stage of an up unit."""
        return self.rows * BLOCK * self.stage_blocks

    @property
    def unit_scales(self) -> int:
        """Scales of one gate or up row over K."""
        return self.hidden // self.scale_block_hidden

    @property
    def unit_scale_bytes(self) -> int:
        """Bytes of `unit_scales`."""
        return self.unit_scales * SCALE_BYTES[self.scales_up_dtype]

    @property
    def unit_scale_slots(self) -> int:
        """Units whose scales shared memory holds: an even number, those of the ring and two.

        Units are streamed in pairs behind the first one. The scales of unit n + slots are copied
        once a step `stages` before its pair is free again, and that is no earlier than the first
        step of the next pair of the warpgroup that had unit n and that has then fenced its reads.
        """
        return self._scale_slots(self.stages)

    def _scale_slots(self, stages: int) -> int:
        return 2 + 2 * ceil_div(stages, 2 * self.unit_stages)

    def first_unit(self, cta):
        """First up unit of a CTA (int or run-time value); the others follow `grid` apart.

        Backwards, so that CTAs that own fewer columns are the first to get a unit more.
        """
        return self.grid - 1 - cta

    # Down columns, groups, steps and slices.

    @cached_property
    def max_own_blocks(self) -> int:
        """Most column blocks that one CTA owns."""
        blocks = 1
        while self._columns_with(blocks) > MMA_ROWS:
            blocks += 1
        return blocks

    @cached_property
    def columns(self) -> int:
        """Output columns of one column block."""
        return self._columns_with(self.max_own_blocks)

    def _columns_with(self, blocks: int) -> int:
        return ATOM_ROWS * ceil_div(self.hidden // ATOM_ROWS, self.grid * blocks)

    @property
    def column_blocks(self) -> int:
        """Column blocks of the hidden size; the last one may be narrower."""
        return ceil_div(self.hidden, self.columns)

    @property
    def column_atoms(self) -> int:
        """Eight-column atoms of a column block."""
        return self.columns // ATOM_ROWS

    @cached_property
    def group(self) -> int:
        """Experts stacked in one down WGMMA: a power of two."""
        return 1 << (MMA_ROWS // self.columns).bit_length() - 1

    @property
    def max_groups(self) -> int:
        """Groups of `max_active` experts."""
        return ceil_div(self.max_active, self.group)

    @property
    def h_blocks(self) -> int:
        """128-feature blocks of the intermediate size; the last one may be partial."""
        return ceil_div(self.intermediate, BLOCK)

    @property
    def whole_blocks(self) -> bool:
        """Whether one box can hold several blocks of down weights of an expert."""
        return self.intermediate % BLOCK == 0

    @cached_property
    def _step_shape(self) -> tuple[int, int]:
        """(ring stages of a step, its blocks of 128).

        A step takes two stages, next to each other, where one has room for no more than two blocks
        and enough bytes are in flight all the same: longer pieces of a row suit the DRAM better.
        """
        shapes = []
        for stages in (1, 2):
            most = min(4, stages * STAGE_BYTES // (self.group * self.columns * BLOCK))
            fill = {f: self.h_blocks / ceil_div(self.h_blocks, f) for f in range(1, most + 1)}
            blocks = max(fill, key=fill.__getitem__)
            in_flight = fill[blocks] * self.group * self.columns * BLOCK * MAX_STAGES // stages
            shapes.append((stages, blocks, in_flight))
        single, double = shapes
        pairs_up = self.unit_stages % 2 == 0
        gains = single[1] <= 2 < double[1] and double[2] >= IN_FLIGHT
        return double[:2] if pairs_up and gains else single[:2]

    @property
    def step_stages(self) -> int:
        """Ring stages of a step, next to each other."""
        return self._step_shape[0]

    @property
    def step_blocks(self) -> int:
        """128-feature blocks of a step: those that fill its stages best."""
        return self._step_shape[1]

    @property
    def steps(self) -> int:
        """Steps of one group and column block; the last one may be padded with zeros."""
        return ceil_div(self.h_blocks, self.step_blocks)

    @property
    def slices(self) -> int:
        """Slices of one chunk."""
        return self.steps // self.slice_steps

    @property
    def slice_blocks(self) -> int:
        """128-feature blocks of a slice."""
        return self.slice_steps * self.step_blocks

    @property
    def down_box_bytes(self) -> int:
        """Bytes of one expert's part of a step."""
        return self.columns * BLOCK * self.step_blocks

    @property
    def weights_in_registers(self) -> bool:
        """Whether a warpgroup can hold the down weights of a group and column block."""
        return self.steps * self.step_blocks <= 4 and self.h_block > 32

    @property
    def slice_h_scales(self) -> int:
        """Scales of one row of h in a slice."""
        return self.slice_blocks * BLOCK // self.h_block

    @property
    def down_scale_rows(self) -> int:
        """Blocks of scales that the columns of a column block can lie in."""
        return (self.columns - ATOM_ROWS) // self.scale_block_hidden + (
            1 if self.scale_block_hidden % self.columns == 0 else 2
        )

    @property
    def row_down_scales(self) -> int:
        """Down scales of one output column, padded to whole steps."""
        return self.steps * self.step_blocks * BLOCK // self.h_block

    @property
    def expert_down_scales(self) -> int:
        """Down scales of one expert and column block, padded to whole slices."""
        return self.down_scale_rows * self.row_down_scales

    @property
    def group_down_scales(self) -> int:
        """Down scales of one group, for all column blocks of a CTA."""
        return self.max_own_blocks * self.group * self.expert_down_scales

    @property
    def scale_batch(self) -> int:
        """Groups whose down scales are loaded at a time."""
        return max(1, min(8, self.max_groups, BATCH_SCALES // self.group_down_scales))

    @cached_property
    def max_chunks(self) -> int:
        """Most chunks that the pairs of a batch can fill.

        n groups have at least `group` pairs each, but for the last one. What is left makes a
        second chunk of a group with nine pairs, and then one more with every eight.
        """
        most = 1
        for groups in range(1, self.max_groups + 1):
            left = self.pairs - self.group * (groups - 1) - 1
            second = CHUNK_ROWS + 1 - self.group
            seconds = min(groups, left // second)
            most = max(most, groups + seconds + (left - seconds * second) // CHUNK_ROWS)
        return most

    @property
    def h_slots(self) -> int:
        """Slots of h in shared memory."""
        return self._slots_with(self.stages, self.slice_steps)

    @property
    def slots_reused(self) -> bool:
        """Whether a batch can have more slices of chunks than there are slots."""
        return self.max_chunks * self.slices > self.h_slots

    @property
    def h_words(self) -> int:
        """32-bit words (two bf16) of one parity of the h buffer."""
        return h_words_of(self.intermediate, self.top_k)

    @cached_property
    def groups_at_once(self) -> int:
        """Groups in a row that a warpgroup takes together, where each of them has one chunk.

        Two where a group has few bytes: its waits, products and sums follow each other, which takes
        longer than the stream needs for so few. Both must fit the ring and the accumulators.
        """
        held = 2 * self.steps * self.step_stages * self.max_own_blocks
        fits = (
            self.slices == 1
            and self.max_own_blocks == 1
            and held <= self.stages
            and self.slice_blocks * self.terms <= 3
            and self.h_slots >= 2
            and self.scale_batch % 2 == 0
        )
        if self.group_run:
            return self.group_run if fits else 1
        small = self.steps * self.group * self.down_box_bytes < SMALL_GROUP
        return 2 if fits and small else 1

    # Memory: one table each; the kernel's views and offsets and the host's layout follow from it.

    def _tables(
        self, stages: int, slots: int, slice_steps: int
    ) -> tuple[tuple[str, str, int], ...]:
        unit_slots = self._scale_slots(stages)
        slot_features = slice_steps * self.step_blocks * BLOCK
        return (
            ("ring", "e4m3", stages * STAGE_BYTES),
            ("x", "e4m3", MAX_TOKENS * self.terms * self.hidden),
            ("h", "e4m3", slots * CHUNK_ROWS * self.terms * slot_features),
            ("barriers", "int64", 2 * (stages + slots + SCALE_BATCHES) + 3),
            ("up_scale", "uint8", unit_slots * 2 * round_up(self.unit_scale_bytes, 16)),
            ("x_scale", "float32", self.k_blocks * MAX_TOKENS),
            ("h_scale", "float32", slots * CHUNK_ROWS * slot_features // self.h_block),
            ("down_scale", "float32", SCALE_BATCHES * self.scale_batch * self.group_down_scales),
            ("partial", "float32", self.max_own_blocks * self.pairs * self.columns),
            ("weight", "float32", self.pairs),
            ("pick", "int32", self.pairs),
            ("count", "int32", self.num_experts),
            ("index", "int32", self.num_experts),
            ("experts", "int32", self.max_active + self.group),
            ("pair_of", "int32", self.max_active * MAX_TOKENS),
            ("first_place", "int32", self.max_active + 32),
            ("group_rows", "int32", self.max_groups + 32),
            ("group_chunks", "int32", self.max_groups + 32),
            ("chunk_rows", "int32", self.max_chunks * CHUNK_ROWS),
            ("rows", "int32", self.pairs),
            ("meta", "int32", 4),
        )

    @property
    def shared_regions(self) -> tuple[tuple[str, str, int], ...]:
        """(name, type, elements) of shared memory, in order; each 16-byte aligned or better."""
        return self._tables(self.stages, self.h_slots, self.slice_steps)

    def _bytes_with(self, stages: int, slots: int, slice_steps: int) -> int:
        total = 0
        for _, kind, count in self._tables(stages, slots, slice_steps):
            align = 1024 if kind == "e4m3" else 16
            total = round_up(total, align) + count * _TYPE_BYTES[kind]
        return round_up(total, 16)

    def _slots_with(self, stages: int, slice_steps: int) -> int:
        """Slots of h that fit beside `stages` stages: no more than are ever in use at once."""
        wanted = min(MAX_SLOTS, self.max_chunks * self.steps // slice_steps)
        for slots in range(wanted, 0, -1):
            if self._bytes_with(stages, slots, slice_steps) <= SMEM_LIMIT:
                return slots
        return 0

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA; the compile checks compare it with the kernel's."""
        return self._bytes_with(self.stages, self.h_slots, self.slice_steps)

    @property
    def scratch_regions(self) -> tuple[tuple[str, int], ...]:
        """(name, bytes) of the scratchpad; all zeroed once, then kept in order by the kernel."""
        regions = scratch_regions_of(self.intermediate, self.top_k)
        return (*regions, ("trace", 8 * self.grid * len(self.trace))) if self.trace else regions


_TYPE_BYTES = {"e4m3": 1, "uint8": 1, "int32": 4, "float32": 4, "int64": 8}


def h_words_of(intermediate: int, top_k: int) -> int:
    """32-bit words (two bf16) of one parity of the h buffer."""
    return MAX_TOKENS * top_k * intermediate // 2


def scratch_regions_of(intermediate: int, top_k: int) -> tuple[tuple[str, int], ...]:
    """(name, bytes) of the scratchpad of every kernel with these sizes that is not traced.

    Two shapes whose h is equally large share a layout: each launch clears all of the other parity.
    """
    return ("h", 2 * 4 * h_words_of(intermediate, top_k)), ("epoch", 4 * MAX_GRID)


def check_shape(num_experts: int, hidden: int, intermediate: int, top_k: int) -> None:
    """Raise TypeError or ValueError, naming the argument, for a shape that no kernel takes."""
    check_int("num_experts", num_experts, 1, MAX_EXPERTS)
    check_int("hidden", hidden, 512, 8192)
    check_int("intermediate", intermediate, 32, 16384)
    check_int("top_k", top_k, 1, MAX_TOP_K)
    for name, value, step in (("hidden", hidden, BLOCK), ("intermediate", intermediate, 32)):
        if value % step:
            raise ValueError(f"{name}: expected a multiple of {step}, got {value}")


def _largest_divisor(value: int, most: int) -> int:
    """The largest divisor of `value` that is at most `most`, which is at least 1."""
    return next(d for d in range(min(value, most), 0, -1) if value % d == 0)
