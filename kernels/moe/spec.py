"""Shape, options and geometry of the one-launch MoE kernel: the compile key. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

from cute_moe.kernels.device.options import check_bool, check_choice, check_int
from cute_moe.kernels.device.sizes import SMEM_LIMIT, ceil_div, round_up

MAX_TOKENS = 8
MAX_TOP_K = 8
BLOCK = 128  # features that share one quantisation scale
STAGE_BYTES = 16 * 1024
UNIT_ROWS = 64  # rows of one up unit: 32 gate and 32 up rows, interleaved by 8
DOWN_COLS = 16  # output columns of one down column block
GROUP = 4  # experts stacked in one down WGMMA
PAIRS = MAX_TOKENS * MAX_TOP_K  # (token, slot) pairs
MAX_CHUNKS = 16  # a full group has at least 4 pairs, so 64 pairs fill at most 16 chunks of 8
MAX_GRID = 256  # epoch words kept in the scratchpad
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
    """One compiled variant; the options go by their names in `cute_moe.mono_moe`."""

    num_experts: int = 256
    hidden: int = 2048
    intermediate: int = 512
    top_k: int = 8
    scoring_func: str = "softmax"
    renormalize: bool = True
    logits_dtype: str = "bfloat16"
    scales_up_dtype: str = "float32"
    scales_down_dtype: str = "float32"
    interleave_up: bool = True  # from gate rows then up rows; False: they come interleaved by 8
    activations: str = "fp8"  # "bf16": x and h as two e4m3 terms, which hold all bits of bf16
    programmatic: bool = False  # launched before the kernel ahead has ended
    grid: int = 132
    stages: int = 0  # of the ring; 0: as many as shared memory holds, up to 6
    trace: tuple[str, ...] = ()  # events to stamp, normally none

    def __post_init__(self) -> None:
        if (self.num_experts, self.hidden, self.intermediate) != (256, 2048, 512):
            raise ValueError(
                "num_experts, hidden, intermediate: expected 256, 2048, 512, got "
                f"{self.num_experts}, {self.hidden}, {self.intermediate}"
            )
        check_int("top_k", self.top_k, 1, MAX_TOP_K)
        check_choice("scoring_func", self.scoring_func, ("softmax", "sigmoid"))
        check_choice("activations", self.activations, ("fp8", "bf16"))
        for name in ("renormalize", "interleave_up", "programmatic"):
            check_bool(name, getattr(self, name))
        check_int("grid", self.grid, 1, MAX_GRID)
        if self.stages % 2:
            raise ValueError(f"stages: expected an even number, got {self.stages}")
        for stages in (2, 4, 6) if self.stages == 0 else ():
            if self._bytes_with(stages) <= SMEM_LIMIT:
                object.__setattr__(self, "stages", stages)
        if self.smem_bytes > SMEM_LIMIT or self.stages == 0:
            raise ValueError(
                f"grid: too few CTAs for their shared memory, got {self.grid} with "
                f"activations={self.activations!r}"
            )

    @property
    def terms(self) -> int:
        """e4m3 values that an activation is the sum of."""
        return 2 if self.activations == "bf16" else 1

    @property
    def h_slots(self) -> int:
        """Chunks of h that shared memory holds at once."""
        return MAX_CHUNKS // self.terms

    @property
    def k_blocks(self) -> int:
        """128-feature blocks of the hidden size."""
        return self.hidden // BLOCK

    @property
    def h_blocks(self) -> int:
        """128-feature blocks of the intermediate size."""
        return self.intermediate // BLOCK

    @property
    def units_per_expert(self) -> int:
        """Up units of 64 rows in one expert."""
        return 2 * self.intermediate // UNIT_ROWS

    @property
    def unit_stages(self) -> int:
        """Ring stages of one up unit: 64 rows x 256 features of FP8 a stage."""
        return UNIT_ROWS * self.hidden // STAGE_BYTES

    @property
    def max_own_units(self) -> int:
        """Most up units that one CTA can get: every pair its own expert."""
        return ceil_div(PAIRS * self.units_per_expert, self.grid)

    @property
    def unit_scale_bytes(self) -> int:
        """Scales of the gate or the up rows of one up unit."""
        return self.k_blocks * (4 if self.scales_up_dtype == "float32" else 2)

    @property
    def column_blocks(self) -> int:
        """Down column blocks of 16 output columns."""
        return self.hidden // DOWN_COLS

    @property
    def max_own_columns(self) -> int:
        """Most column blocks that one CTA owns."""
        return ceil_div(self.column_blocks, self.grid)

    @property
    def two_groups_fit(self) -> bool:
        """Whether the ring holds the down weights of two groups: these then land without any h."""
        return 2 * 2 * self.max_own_columns <= self.stages

    @property
    def h_words(self) -> int:
        """32-bit words (two bf16) of one parity of the h buffer."""
        return PAIRS * self.intermediate // 2

    def first_unit(self, cta: int) -> int:
        """First up unit of a CTA (int or run-time value); the others follow `grid` apart.

        Backwards, so that CTAs with one column block less are the first to get a unit more.
        """
        return self.grid - 1 - cta

    def up_units_of(self, cta: int, active: int) -> range:
        """Up units of one CTA; unit u is part u % units_per_expert of an active expert."""
        return range(self.first_unit(cta), active * self.units_per_expert, self.grid)

    def column_blocks_of(self, cta: int) -> range:
        """Down column blocks of one CTA, for all active experts."""
        return range(cta, self.column_blocks, self.grid)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA; the compile checks compare it with the kernel's."""
        return self._bytes_with(self.stages)

    def _bytes_with(self, stages: int) -> int:
        tiles = stages * STAGE_BYTES + self.terms * 8 * self.hidden
        tiles += self.h_slots * self.terms * 8 * self.intermediate
        words = (
            self.k_blocks * 8
            + MAX_CHUNKS * self.h_blocks * 8
            + self.max_own_columns * PAIRS * self.h_blocks
            + self.max_own_columns * PAIRS * DOWN_COLS  # partial
            + PAIRS * 2  # weight, pick
            + 2 * self.num_experts  # mask, index
            + PAIRS * (1 + 8 + 3)  # experts, slot_of, pos_base, row_base, rows
            + round_up(PAIRS + 1, 4)  # chunk_base
            + MAX_CHUNKS * 8  # chunk_rows
            + 4  # meta
        )
        barriers = 8 * (2 * stages + MAX_CHUNKS + self.h_slots + 4)
        unit_scales = self.max_own_units * 2 * self.unit_scale_bytes
        return round_up(tiles + round_up(barriers, 16) + unit_scales + 4 * words, 16)

    @property
    def scratch_regions(self) -> tuple[tuple[str, int], ...]:
        """(name, bytes) of the scratchpad; all zeroed once, then kept in order by the kernel."""
        regions = (("h", 2 * 4 * self.h_words), ("epoch", 4 * MAX_GRID))
        return (*regions, ("trace", 8 * self.grid * len(self.trace))) if self.trace else regions
