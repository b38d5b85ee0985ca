"""Which CTA reads which weights: every byte of every active expert once, for every shape.

By what the kernel calls: units, columns, and the views, boxes and tiles of the weights, which are
evaluated here with tuples in the compiler's place.
"""

import itertools
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from moe_shapes import SHAPES, spec_of

from cute_moe.kernels.device.sizes import SMEM_LIMIT
from cute_moe.kernels.moe import stream
from cute_moe.kernels.moe.spec import (
    ATOM_ROWS,
    CHUNK_ROWS,
    MAX_SLOTS,
    MMA_ROWS,
    STAGE_BYTES,
    MoeSpec,
)

GRIDS = (132, 114, 78)
TOKENS = (1, 2, 3, 8)


def actives(spec: MoeSpec) -> set[int]:
    """Numbers of distinct experts: of one token, of many, with all tokens on the same and apart."""
    counts = {1, spec.top_k, spec.top_k + 1, spec.max_active - 1, spec.max_active}
    counts |= {tokens * spec.top_k for tokens in TOKENS} | {spec.group, spec.group + 1}
    return {min(max(count, 1), spec.max_active) for count in counts}


def units_of(spec: MoeSpec, cta: int, active: int) -> range:
    """Up units of a CTA."""
    return range(spec.first_unit(cta), active * spec.units_per_expert, spec.grid)


def blocks_of(spec: MoeSpec, cta: int) -> range:
    """Column blocks of a CTA."""
    return range(cta, spec.column_blocks, spec.grid)


def view_of(make, spec: MoeSpec, monkeypatch):
    """(shape, strides) of the view that TMA has of weights."""
    fake = SimpleNamespace(
        make_layout=lambda shape, stride: (shape, stride), make_tensor=lambda _, layout: layout
    )
    with monkeypatch.context() as patch:
        patch.setattr(stream, "cute", fake)
        return make(SimpleNamespace(iterator=None), spec)


def positions(shape, strides, box, tile) -> tuple[np.ndarray, np.ndarray]:
    """(offset of every element of a tile in its tensor, whether it is inside), in one dimension."""
    if not isinstance(shape, tuple):
        shape, strides, box, tile = (shape,), (strides,), (box,), (tile,)
    offsets, inside = np.zeros(1, np.int64), np.ones(1, bool)
    for size, stride, count, number in zip(shape, strides, box, tile, strict=True):
        at = np.arange(number * count, (number + 1) * count)
        offsets = (offsets[:, None] + at * stride).ravel()
        inside = (inside[:, None] & (at < size)).ravel()
    return offsets, inside


def boxes(view, box, tiles) -> tuple[np.ndarray, np.ndarray]:
    """(offset, how often it is read) of each run of 32 bytes; runs lie in a row of weights."""
    found = []
    for tile in tiles:
        offsets, inside = np.zeros(1, np.int64), np.ones(1, bool)
        for dimension in zip(*view, box, tile, strict=True):
            more, fits = positions(*dimension)
            offsets = (offsets[:, None] + more).ravel()
            inside = (inside[:, None] & fits).ravel()
        found.append(offsets[inside & (offsets % 32 == 0)])
    return np.unique(np.concatenate(found), return_counts=True)


def check_whole(found, first: int, size: int) -> None:
    """All runs from `first` on, each once."""
    offsets, counts = found
    assert (counts == 1).all()
    assert np.array_equal(offsets, np.arange(first, first + size, 32))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_unit_and_column_has_one_owner(name, grid) -> None:
    spec = spec_of(name, grid=grid)
    for active in actives(spec):
        units = Counter(u for cta in range(grid) for u in units_of(spec, cta, active))
        assert units == Counter(range(active * spec.units_per_expert))
    owned = [blocks_of(spec, cta) for cta in range(grid)]
    columns = Counter(
        block * spec.columns + i
        for blocks in owned
        for block in blocks
        for i in range(spec.columns)
        if block * spec.columns + i < spec.hidden
    )
    assert columns == Counter(range(spec.hidden))
    assert max(len(blocks) for blocks in owned) == spec.max_own_blocks


@pytest.mark.parametrize("name", SHAPES)
def test_boxes_of_up_units_hold_every_byte_once(name, monkeypatch) -> None:
    spec = spec_of(name)
    view = view_of(stream.up_view, spec, monkeypatch)
    expert_bytes = 2 * spec.intermediate * spec.hidden
    for expert in (spec.num_experts - 1,):
        tiles = [
            stream.up_tile(expert, 7 * spec.units_per_expert + part, stage, spec)
            for part in range(spec.units_per_expert)
            for stage in range(spec.unit_stages)
        ]
        check_whole(boxes(view, stream.up_box(spec), tiles), expert * expert_bytes, expert_bytes)


def test_a_unit_has_the_gate_and_up_rows_of_its_features(monkeypatch) -> None:
    spec = spec_of("Qwen3.6-35B")
    view = view_of(stream.up_view, spec, monkeypatch)
    for unit in range(spec.units_per_expert):
        offsets, _ = boxes(view, stream.up_box(spec), [stream.up_tile(0, unit, 0, spec)])
        gate = np.arange(unit * spec.unit_features, (unit + 1) * spec.unit_features)
        assert set(offsets // spec.hidden) == {*gate, *(gate + spec.intermediate)}


def test_interleaved_rows_are_read_in_order(monkeypatch) -> None:
    spec = MoeSpec(interleave_up=False)
    view = view_of(stream.up_view, spec, monkeypatch)
    for unit in range(spec.units_per_expert):
        offsets, _ = boxes(view, stream.up_box(spec), [stream.up_tile(3, unit, 0, spec)])
        rows = np.unique(offsets // spec.hidden) - 3 * 2 * spec.intermediate
        assert np.array_equal(rows, np.arange(unit * spec.rows, (unit + 1) * spec.rows))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", SHAPES)
def test_boxes_of_down_steps_hold_every_byte_once(name, grid, monkeypatch) -> None:
    spec = spec_of(name, grid=grid)
    view = view_of(stream.down_view, spec, monkeypatch)
    expert_bytes = spec.intermediate * spec.hidden
    expert = spec.num_experts - 1
    tiles = [
        stream.down_tile(expert, block, step, box, spec)
        for block in range(spec.column_blocks)
        for step in range(spec.steps)
        for box in range(1 if spec.whole_blocks else spec.step_blocks)
    ]
    check_whole(boxes(view, stream.down_box(spec), tiles), expert * expert_bytes, expert_bytes)


def bytes_of(spec: MoeSpec, cta: int, active: int) -> int:
    """Weight bytes that one CTA reads."""
    units = len(units_of(spec, cta, active)) * spec.rows * spec.hidden
    columns = sum(
        min(spec.columns, spec.hidden - block * spec.columns) for block in blocks_of(spec, cta)
    )
    return units + columns * spec.intermediate * active


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", SHAPES)
def test_balance(name, grid) -> None:
    """No two CTAs are more than one unit and one column block apart."""
    spec = spec_of(name, grid=grid)
    for active in actives(spec):
        share = [bytes_of(spec, cta, active) for cta in range(grid)]
        assert sum(share) == 3 * spec.intermediate * spec.hidden * active
        unit, block = spec.rows * spec.hidden, spec.columns * spec.intermediate * active
        assert max(share) - min(share) <= unit + block


@pytest.mark.parametrize("activations", ["fp8", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_shared_memory_holds_every_shape(name, activations) -> None:
    spec = spec_of(name, activations=activations)
    assert spec.smem_bytes <= SMEM_LIMIT
    check_geometry(spec)


def test_too_few_ctas_are_refused() -> None:
    with pytest.raises(ValueError, match="^grid: too few CTAs .* got 1 with hidden=8192"):
        MoeSpec(hidden=8192, grid=1, activations="bf16")


def check_geometry(spec: MoeSpec) -> None:
    """What the kernel takes for granted."""
    assert spec.smem_bytes <= SMEM_LIMIT
    # Up: whole units, whole stages, features of one block of scales.
    assert spec.intermediate % spec.unit_features == 0 == spec.scale_block % spec.unit_features
    assert spec.k_blocks == spec.unit_stages * spec.stage_blocks
    assert spec.up_stage_bytes <= STAGE_BYTES
    # Down: columns of experts in one WGMMA, boxes in their stages, stages next to each other.
    assert spec.columns % ATOM_ROWS == 0 and spec.group * spec.columns <= MMA_ROWS
    assert 32 % spec.group == 0, "a group does not straddle 32 lanes"
    assert spec.group * spec.down_box_bytes <= spec.step_stages * STAGE_BYTES
    assert spec.unit_stages % spec.step_stages == 0 == spec.stages % spec.step_stages
    assert spec.steps * spec.step_blocks >= spec.h_blocks > (spec.steps - 1) * spec.step_blocks
    assert spec.steps == spec.slices * spec.slice_steps
    # A group holds a slice's stages while its chunks pass.
    assert spec.max_own_blocks * spec.slice_steps * spec.step_stages <= spec.stages
    assert spec.max_own_blocks * spec.grid >= spec.column_blocks
    # Slots: those of all slices of all chunks, or some that are used again.
    assert 1 <= spec.h_slots <= MAX_SLOTS
    assert spec.slots_reused or spec.h_slots >= spec.max_chunks * spec.slices
    assert spec.slice_blocks <= 4, "32 lanes hold a slice of a row"
    assert spec.pairs <= 256, "fields of lists"


def random_spec(draw: random.Random) -> MoeSpec | None:
    """Of any legal shape; None where shared memory is too small for it."""
    intermediate = 32 * draw.choice([draw.randint(1, 64), draw.randint(1, 512)])
    block = draw.choice([b for b in (128, 64, 32) if intermediate % b == 0])
    shape = {
        "num_experts": draw.choice([draw.randint(1, 16), draw.randint(1, 1024)]),
        "hidden": 128 * draw.randint(4, 64),
        "intermediate": intermediate,
        "top_k": draw.randint(1, 16),
        "routing": "ids",
        "scale_block": block,
        "scale_block_hidden": draw.choice([128, block]),
        "activations": draw.choice(["fp8", "bf16"]),
        "grid": draw.choice([*GRIDS, 132, draw.randint(60, 256)]),
        "scales_up_dtype": draw.choice(["float32", "bfloat16", "float8_e8m0fnu"]),
    }
    try:
        return MoeSpec(**shape)
    except ValueError as error:
        assert str(error).startswith("grid: too few CTAs"), (shape, error)
        return None


def test_any_legal_shape_has_a_geometry_or_is_refused() -> None:
    draw = random.Random(0)
    specs = [random_spec(draw) for _ in range(400)]
    fits = [spec for spec in specs if spec]
    assert len(fits) > 300
    for spec in fits:
        check_geometry(spec)
        units = Counter(u for c in range(spec.grid) for u in units_of(spec, c, spec.max_active))
        assert units == Counter(range(spec.max_active * spec.units_per_expert))


def chunks_at_most(spec: MoeSpec) -> int:
    """Most chunks of any batch: pairs dealt out to groups, all but the last with an expert each."""
    best = {0: 0}  # pairs used so far: chunks
    most = 0
    for number in range(spec.max_groups):
        last_experts = min(spec.group, spec.max_active - number * spec.group)
        after: dict[int, int] = {}
        for used, chunks in best.items():
            for pairs in range(1, spec.pairs - used + 1):
                count = chunks - (-pairs // CHUNK_ROWS)
                most = max(most, count)
                if pairs >= spec.group == last_experts:
                    after[used + pairs] = max(after.get(used + pairs, 0), count)
        best = after
    return most


@pytest.mark.parametrize(
    "experts, hidden, top_k",
    list(itertools.product((1, 5, 17, 256), (512, 2048, 4096, 7168), (1, 3, 8))),
)
def test_no_batch_has_more_chunks(experts, hidden, top_k) -> None:
    spec = MoeSpec(experts, hidden, 512, top_k, routing="ids")
    assert chunks_at_most(spec) <= spec.max_chunks <= chunks_at_most(spec) + 1
