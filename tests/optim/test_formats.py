"""States in fewer bits: zero is exact, blocks end with rows, and what is above 0 stays above 0."""

from __future__ import annotations

from typing import Literal, get_args

import pytest
import torch
from torch import Tensor

from thunder_memsave.optim import tables
from thunder_memsave.optim.formats import Format, Place, State, layout, read, write

EightBits = Literal["int8", "fp8"]
EIGHT_BITS = get_args(EightBits)
AVERAGE = State(name="m", is_signed=True)
SQUARE = State(name="v", is_signed=False)


def stored_of(
    state: State, values: Tensor, states: Format, *, first_row: int = 0
) -> dict[str, Tensor]:
    stored = {
        key: torch.zeros(shape, dtype=dtype)
        for key, (shape, dtype) in layout(state, states, values.shape).items()
    }
    if states == "float32":
        stored[state.name].copy_(values)
    write(state, values.clone(), stored, states, Place(first_row=first_row, key=1))
    return stored


def round_trip(state: State, values: Tensor, states: Format) -> Tensor:
    return read(state, stored_of(state, values, states), states)


def spread(*shape: int, decades: float = 4) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(shape) * 10 ** (-decades * torch.rand(shape))


@pytest.mark.parametrize("states", EIGHT_BITS)
def test_zero_is_exact_and_bytes_of_zeros_are_zeros(states: EightBits) -> None:
    values = torch.zeros(3, 300)
    values[1, 7] = 2.0
    for state in (AVERAGE, SQUARE):
        stored = stored_of(state, values, states)
        assert torch.equal(read(state, stored, states) != 0, values != 0)
        assert not stored[state.name][[0, 2]].any()
        assert not stored[state.scales][[0, 2]].any()


@pytest.mark.parametrize(("states", "error"), [("int8", 0.022), ("fp8", 0.065)])
def test_numbers_are_near_within_two_decades(states: EightBits, error: float) -> None:
    """The error of the nearest of their numbers, beside the largest of a block; a root is one of two, and squared."""
    values = spread(16, 512, decades=1).abs()
    scale = values.view(16, 2, 256).amax(-1, keepdim=True).expand(-1, -1, 256).reshape(16, 512)
    for state, found in ((AVERAGE, values), (SQUARE, values.square())):
        apart = (round_trip(state, found, states) - found).abs()
        of_what = scale if state.is_signed else scale.square()
        assert (apart <= (1 if state.is_signed else 4.5) * error * of_what).all()


@pytest.mark.parametrize("states", EIGHT_BITS)
def test_nothing_above_zero_becomes_zero(states: EightBits) -> None:
    """A second moment of 0 beside a first one that is not would make its update explode."""
    square = torch.full((2, 256), 1e-20)
    square[:, 0] = 1.0
    square[1, 1:] = 0.0
    found = round_trip(SQUARE, square, states)
    assert torch.equal(found > 0, square > 0)
    assert found[0, 1] < 1e-10


@pytest.mark.parametrize("states", EIGHT_BITS)
@pytest.mark.parametrize("num_columns", [8, 255, 256, 257, 600])
@pytest.mark.parametrize("state", [AVERAGE, SQUARE])
def test_blocks_are_those_of_each_row_alone(
    state: State, states: EightBits, num_columns: int
) -> None:
    values = spread(7, num_columns).abs()
    whole = stored_of(state, values, states)
    for row in range(7):
        alone = stored_of(state, values[row : row + 1], states, first_row=row)
        for key, value in alone.items():
            assert torch.equal(value, whole[key][row : row + 1])
    assert whole[state.scales].shape == (7, -(-num_columns // 256))


@pytest.mark.parametrize("states", EIGHT_BITS)
def test_what_was_stored_is_stored_again_as_it_is(states: EightBits) -> None:
    for state in (AVERAGE, SQUARE):
        values = spread(5, 300) if state.is_signed else spread(5, 300).square()
        once = round_trip(state, values, states)
        # A root and its square are rounded.
        torch.testing.assert_close(round_trip(state, once, states), once, rtol=4e-7, atol=0)


@pytest.mark.parametrize("states", EIGHT_BITS)
@pytest.mark.parametrize("shape", [(), (5,), (5, 7), (5, 1, 7)])
def test_states_of_short_rows_are_float32(states: EightBits, shape: tuple[int, ...]) -> None:
    found = layout(AVERAGE, states, torch.Size(shape))
    assert found == {"m": (torch.Size(shape), torch.float32)}


def test_tables_have_seven_decades_and_zero_first() -> None:
    for table, least in ((tables.SIGNED, 5.5e-7), (tables.UNSIGNED, 3.25e-7)):
        numbers = table.numbers
        assert numbers.unique().numel() == 256
        assert numbers[0] == 0
        assert numbers.max() == 1
        assert numbers.min() == (-1 if table.first_code else 0)
        assert numbers.abs()[1:].min() == pytest.approx(least)
    assert (tables.SIGNED.numbers < 0).sum() == tables.SIGNED.first_code == 127


@pytest.mark.parametrize(("states", "error"), [("bfloat16", 0.01), ("int8", 0.02), ("fp8", 0.05)])
@pytest.mark.parametrize("factor", [0.999, 1.001])
def test_a_second_moment_decays_and_grows_slowly(
    states: Format, error: float, factor: float
) -> None:
    """Its nearest number stays the same: 0.999 of a bfloat16 number rounds to itself. One of a block is another."""
    square = torch.ones(64, 256)
    stored = stored_of(SQUARE, square, states)
    for step in range(700):
        square = read(SQUARE, stored, states).clone() * factor
        square[:, 0] = 2.0
        write(SQUARE, square, stored, states, Place(first_row=0, key=step * 7919))
    found = read(SQUARE, stored, states)[:, 1:].mean()
    assert found == pytest.approx(factor**700, rel=error)
