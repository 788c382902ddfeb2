"""States that no step writes are refused by name, in both kinds of checkpoints, and the optimizer is as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thunder_memsave.checkpoints import StateMismatchError, load_checkpoint, save_checkpoint
from thunder_memsave.checkpoints.manifest import DamagedCheckpointError
from thunder_memsave.optim import AdamW
from thunder_memsave.optim.formats import Format

State = dict[str, Any]


def trained(states: Format) -> tuple[nn.Module, AdamW]:
    torch.manual_seed(0)
    net = nn.Linear(300, 4)
    optimizer = AdamW(net.parameters(), states=states)
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return net, optimizer


def filled(key: str, value: float, index: int = 0) -> Callable[[State], None]:
    """Change one element."""

    def change(state: State) -> None:
        state[key].view(-1)[index] = value

    return change


def replaced(key: str, change: Callable[[Tensor], object]) -> Callable[[State], None]:
    def changed(state: State) -> None:
        state[key] = change(state[key])

    return changed


HUGE = 1e38
WRONG_VALUES: list[tuple[Format, Callable[[State], None], str]] = [
    ("int8", filled("exp_avg_scales", float("nan")), "a scale that is not finite, or too large in"),
    ("int8", filled("exp_avg_sq_scales", HUGE), "not finite, or too large in 'exp_avg_sq'"),
    ("int8", filled("exp_avg_scales", -1.0, 7), "a negative scale in 'exp_avg'"),
    ("int8", filled("step", 1.5), "'step' 1.5, which must be a whole number from 1"),
    ("int8", filled("step", float("inf")), "'step' inf, which must be a whole number"),
    ("int8", filled("step", -3.0), "'step' -3, which must be a whole number"),
    ("fp8", filled("exp_avg", 0x7F, 5), "a code that stands for no number in 'exp_avg'"),
    ("fp8", filled("exp_avg_sq", 0xFF), "a code that stands for no number in 'exp_avg_sq'"),
    ("fp8", filled("exp_avg_sq", 0x85), "a negative value in 'exp_avg_sq'"),
    ("fp8", filled("exp_avg_scales", HUGE), "not finite, or too large in 'exp_avg'"),
    ("bfloat16", filled("exp_avg", float("inf")), "a value that is not finite in 'exp_avg'"),
    ("bfloat16", filled("exp_avg_sq", -1.0), "a negative value in 'exp_avg_sq'"),
    ("float32", filled("exp_avg_sq", float("nan")), "a value that is not finite in 'exp_avg_sq'"),
]
WRONG_LAYOUTS: list[tuple[Callable[[State], None], str]] = [
    (lambda s: s.pop("exp_avg_scales"), "weight (exp_avg_scales): missing: the optimizer has it"),
    (lambda s: s.update(more=torch.zeros(4)), "weight (more): unexpected: the file has it, the op"),
    (replaced("exp_avg", Tensor.float), "shape (4, 300) in torch.float32 in the file, shape (4, 3"),
    (replaced("exp_avg_scales", lambda t: t[:, :1].clone()), "shape (4, 1) in torch.float32 in t"),
    (replaced("exp_avg_sq", lambda t: t.view(300, 4)), "shape (300, 4) in torch.uint8 in the file"),
    (replaced("step", lambda _: 3), "weight (step): a plain value in the file, shape () in torch"),
]


def saved(path: Path, states: Format, format: Any, change: Callable[[State], None]) -> Path:
    net, optimizer = trained(states)
    change(optimizer.state[net.get_parameter("weight")])
    state = {"net": net, "optimizer": optimizer}
    save_checkpoint(path, state, state_dict_type=format, data_parallel=None)
    return path


def refused(path: Path, states: Format, error: type[Exception]) -> str:
    net, optimizer = trained(states)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    with pytest.raises(error) as raised:
        load_checkpoint(path, {"net": net, "optimizer": optimizer}, data_parallel=None)
    for number, values in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[number][key]) for key, value in values.items())
    return str(raised.value)


@pytest.mark.parametrize("format", ["sharded", "full"])
@pytest.mark.parametrize(("states", "change", "expected"), WRONG_VALUES)
def test_values_that_no_step_writes_are_refused_by_name(
    tmp_path: Path, format: str, states: Format, change: Callable[[State], None], expected: str
) -> None:
    message = refused(saved(tmp_path / "c", states, format, change), states, DamagedCheckpointError)
    assert message.startswith("the optimizer's state of 'weight' has")
    assert expected in message
    assert message.endswith("; no save writes that: load another checkpoint.")


@pytest.mark.parametrize("format", ["sharded", "full"])
@pytest.mark.parametrize(("change", "expected"), WRONG_LAYOUTS)
def test_tensors_that_are_others_are_refused_before_anything_changes(
    tmp_path: Path, format: str, change: Callable[[State], None], expected: str
) -> None:
    message = refused(saved(tmp_path / "c", "int8", format, change), "int8", StateMismatchError)
    assert expected in message


def unchanged(_: Mapping[str, Any]) -> None:
    """Leave the state as it is."""


@pytest.mark.parametrize("format", ["sharded", "full"])
def test_another_format_of_states_is_refused_before_anything_changes(
    tmp_path: Path, format: str
) -> None:
    path = saved(tmp_path / "c", "int8", format, unchanged)
    match = "parameter group 0: states in int8 in the file, fp8 in the optimizer"
    assert match in refused(path, "fp8", StateMismatchError)
    net = nn.Linear(300, 4)
    known = torch.optim.AdamW(net.parameters())
    with pytest.raises(StateMismatchError, match=r"int8 in the file, float32 in the optimizer"):
        load_checkpoint(path, {"net": net, "optimizer": known}, data_parallel=None)
    assert not known.state
