"""Which CTA reads which weights: every byte of every active expert once, for any SM count."""

from collections import Counter

import pytest

from cute_moe.kernels.moe.spec import DOWN_COLS, GROUP, PAIRS, UNIT_ROWS, MoeSpec

GRIDS = (132, 128, 114, 78, 16, 9)
ACTIVE = (1, 2, 8, 15, 16, 31, 57, PAIRS)  # distinct experts, from one hot one to all pairs


def rows_read(spec: MoeSpec, active: int) -> tuple[Counter, Counter]:
    """How often each (expert index, row) of w_up and of w_down is read by the whole grid."""
    up, down = Counter(), Counter()
    for cta in range(spec.grid):
        for unit in spec.up_units_of(cta, active):
            expert, part = divmod(unit, spec.units_per_expert)
            # 32 gate rows and the 32 up rows of the same features.
            for row in range(UNIT_ROWS // 2):
                feature = part * UNIT_ROWS // 2 + row
                up[expert, feature] += 1
                up[expert, spec.intermediate + feature] += 1
        for block in spec.column_blocks_of(cta):
            for expert in range(active):
                for column in range(DOWN_COLS):
                    down[expert, block * DOWN_COLS + column] += 1
    return up, down


def bytes_of(spec: MoeSpec, cta: int, active: int) -> int:
    """Weight bytes that one CTA reads."""
    units = len(spec.up_units_of(cta, active)) * UNIT_ROWS * spec.hidden
    columns = len(spec.column_blocks_of(cta)) * DOWN_COLS * spec.intermediate * active
    return units + columns


@pytest.mark.parametrize("active", ACTIVE)
@pytest.mark.parametrize("grid", GRIDS)
def test_every_row_is_read_once(grid, active) -> None:
    spec = MoeSpec(grid=grid)
    up, down = rows_read(spec, active)
    assert set(up) == {(e, r) for e in range(active) for r in range(2 * spec.intermediate)}
    assert set(down) == {(e, c) for e in range(active) for c in range(spec.hidden)}
    assert set(up.values()) == set(down.values()) == {1}
    assert max(len(spec.up_units_of(c, active)) for c in range(grid)) <= spec.max_own_units
    assert max(len(spec.column_blocks_of(c)) for c in range(grid)) == spec.max_own_columns


@pytest.mark.parametrize("grid", GRIDS)
def test_balance(grid) -> None:
    """No two CTAs are more than one unit and one column block apart; `pytest -s` prints how even
    that is."""
    spec = MoeSpec(grid=grid)
    worst = {}
    for active in ACTIVE:
        share = [bytes_of(spec, cta, active) for cta in range(grid)]
        worst[active] = f"{max(share) * grid / sum(share):.3f}"
        assert max(share) - min(share) <= (
            UNIT_ROWS * spec.hidden + DOWN_COLS * spec.intermediate * active
        )
    print(f"\n{grid} SMs, busiest CTA over the mean by active experts: {worst}", end="")


@pytest.mark.parametrize("activations", ["fp8", "bf16"])
def test_too_few_ctas_are_refused(activations) -> None:
    with pytest.raises(ValueError, match="^grid: too few"):
        MoeSpec(grid=4, activations=activations)


def copies_without_h(spec: MoeSpec, cta: int, active: int) -> tuple[int, int]:
    """(copies that a CTA can issue while no h is there, all of its copies), in ring steps.

    A step needs the stage of the step `spec.stages` before it. Consumers free the stages of up
    steps by themselves; those of down steps count as if each had to wait for h.
    """
    groups = -(-active // GROUP)
    up = len(spec.up_units_of(cta, active)) * spec.unit_stages
    down = 2 * groups * len(spec.column_blocks_of(cta))
    return min(up + down, up + spec.stages), up + down


@pytest.mark.parametrize("grid", (*GRIDS, 64, 131))
@pytest.mark.parametrize("activations", ["fp8", "bf16"])
def test_the_weights_of_two_groups_land_without_h(grid, activations) -> None:
    """Loaders with two groups at most wait for all weights first, where this is said to be safe."""
    try:
        spec = MoeSpec(grid=grid, activations=activations)
    except ValueError as error:
        pytest.skip(str(error))
    counts = [copies_without_h(spec, c, a) for c in range(grid) for a in range(1, 2 * GROUP + 1)]
    assert spec.two_groups_fit == all(issued == copies for issued, copies in counts)
    assert spec.two_groups_fit == (grid >= 128)
