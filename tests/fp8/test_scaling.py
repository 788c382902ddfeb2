"""The state of delayed scaling: what an update does, when it is kept, and how ranks agree on it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from thunder_memsave.config import Fp8Config
from thunder_memsave.fp8.recipe import Recipe, recipe_of
from thunder_memsave.fp8.scaling import (
    GRAD,
    INPUT,
    WEIGHT,
    ScalingState,
    reduce_amax,
    update_scales,
)

RECIPE = recipe_of(Fp8Config(amax_history_len=3))
INF = float("inf")


def with_amax(inputs: float, weight: float, grad: float, recipe: Recipe = RECIPE) -> ScalingState:
    state = ScalingState(recipe)
    record(state, inputs, weight, grad)
    return state


def record(state: ScalingState, inputs: float, weight: float, grad: float) -> None:
    state.forward_amax_history[0, INPUT] = inputs
    state.forward_amax_history[0, WEIGHT] = weight
    state.backward_amax_history[0, GRAD] = grad


def scales(state: ScalingState) -> list[float]:
    return [*state.forward_scale.tolist(), *state.backward_scale.tolist()]


def same(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_state_begins_without_amax_and_with_scales_of_1() -> None:
    state = ScalingState(RECIPE)
    assert {name: (tuple(t.shape), t.dtype) for name, t in state.state_dict().items()} == {
        "forward_amax_history": ((3, 2), torch.float32),
        "forward_scale": ((2,), torch.float32),
        "backward_amax_history": ((3, 1), torch.float32),
        "backward_scale": ((1,), torch.float32),
    }
    assert scales(state) == [1, 1, 1]
    assert not any(parameter.requires_grad for parameter in state.parameters())


def test_scales_map_the_largest_amax_of_the_window_to_the_largest_number() -> None:
    state = with_amax(7.0, 2.0, 4.0)
    state.update()
    assert scales(state) == [64, 224, 14336]  # 448 / 7, 448 / 2, 57344 / 4
    assert state.forward_amax_history.tolist() == [[0, 0], [0, 0], [7, 2]]
    record(state, 3.5, 4.0, 1.0)
    state.update()
    assert scales(state) == [64, 112, 14336]
    for _ in range(3):
        record(state, 3.5, 1.0, 1.0)
        state.update()
    assert scales(state) == [128, 448, 57344]  # what was larger has left the window


def test_most_recent_looks_at_the_last_step_only_and_a_margin_leaves_room() -> None:
    recipe = recipe_of(Fp8Config(amax_compute_algo="most_recent", margin=1))
    state = with_amax(7.0, 7.0, 7.0, recipe)
    state.update()
    record(state, 1.0, 2.0, 4.0)
    state.update()
    assert scales(state) == [224, 112, 7168]


@pytest.mark.parametrize("amax", [0.0, INF])
def test_an_amax_that_says_nothing_leaves_the_scale(amax: float) -> None:
    state = with_amax(7.0, 7.0, 7.0, recipe_of(Fp8Config(amax_history_len=1)))
    state.update()
    before = scales(state)
    record(state, amax, amax, amax)
    state.update()
    assert scales(state) == before


def test_a_scale_that_float32_cannot_hold_is_its_largest_number() -> None:
    state = with_amax(1e-45, 1e-40, 1.0)
    state.update()
    assert scales(state)[:2] == [torch.finfo(torch.float32).max] * 2


def test_many_states_are_updated_as_each_alone() -> None:
    states = [with_amax(1.0 + n, 0.3 * n, 7.0 / (n + 1)) for n in range(4)]
    alone = copy.deepcopy(states)
    for _ in range(3):
        update_scales(states)
        for state in alone:
            state.update()
        assert all(same(one, other) for one, other in zip(states, alone, strict=True))
    update_scales([])


def test_ranks_agree_on_the_largest_amax_in_one_collective() -> None:
    states = [with_amax(1.0, 5.0, 2.0), with_amax(8.0, 0.0, 1.0)]
    sent: list[Tensor] = []

    def all_reduce_max(amax: Tensor) -> None:
        sent.append(amax.clone())
        amax.copy_(torch.maximum(amax, torch.tensor([3.0, 3.0, 3.0, 3.0, 3.0, 3.0])))

    reduce_amax(states, all_reduce_max)
    reduce_amax([], all_reduce_max)
    (amax,) = sent
    assert amax.tolist() == [1, 5, 8, 0, 2, 1]
    assert states[0].forward_amax_history[0].tolist() == [3, 5]
    assert states[1].forward_amax_history[0].tolist() == [8, 3]
    assert [state.backward_amax_history[0].item() for state in states] == [3, 3]
    assert not states[0].forward_amax_history[1:].any()


def test_no_cast_of_the_model_casts_the_state() -> None:
    linear, state = nn.Linear(16, 16), with_amax(1.1, 2.2, 3.3)
    state.update()
    before = copy.deepcopy(state)
    nn.ModuleList([linear, state]).bfloat16().half().to(torch.float64)
    assert linear.weight.dtype == torch.float64
    assert same(state, before)
    assert state.forward_scale.dtype == torch.float32


def test_a_state_that_was_made_on_meta_can_begin() -> None:
    with torch.device("meta"):
        state = ScalingState(RECIPE)
    assert state.forward_scale.is_meta
    state.to_empty(device="cpu").reset_parameters()
    assert same(state, ScalingState(RECIPE))
    assert ScalingState(RECIPE, device=torch.device("meta")).backward_scale.is_meta


def test_a_state_is_float32_whatever_the_default_dtype() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        state = ScalingState(RECIPE)
        state.update()
    finally:
        torch.set_default_dtype(torch.float32)
    assert {t.dtype for t in state.buffers()} == {torch.float32}


def test_a_state_resumes_bit_by_bit() -> None:
    state = with_amax(1.1, 2.2, 3.3)
    state.update()
    resumed = ScalingState(RECIPE)
    resumed.load_state_dict(state.state_dict())
    for each in (state, resumed):
        record(each, 0.7, 0.6, 0.5)
        each.update()
    assert same(state, resumed)
