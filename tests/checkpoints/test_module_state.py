"""Named state of a module in one process: twins, checks, and values that are not tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from thunder_memsave.checkpoints import (
    StateMismatchError,
    load_raw,
    load_state_dict,
    local_state_dict,
    unsharded_state_dict,
)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.emb.weight


def test_twins_are_present_and_shared() -> None:
    net = Tied()
    for state in (unsharded_state_dict(net, None), local_state_dict(net)):
        assert list(state) == ["emb.weight", "head.weight"]
        assert state["emb.weight"].data_ptr() == state["head.weight"].data_ptr()
    copied = unsharded_state_dict(net, None)["emb.weight"]
    assert copied.data_ptr() != net.emb.weight.data_ptr()


@pytest.mark.parametrize("stored", ["emb.weight", "head.weight"])
def test_one_of_two_twins_is_enough(stored: str) -> None:
    net = Tied()
    load_state_dict(net, {stored: torch.ones(3, 2)})
    assert torch.equal(net.head.weight, torch.ones(3, 2))


def test_all_problems_are_listed_and_nothing_is_changed() -> None:
    net = nn.Linear(2, 3)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    given = {"weight": torch.zeros(4, 2), "other": torch.zeros(1)}
    with pytest.raises(StateMismatchError, match=r"does not fit Linear in 3 places; nothing was"):
        load_state_dict(net, given)
    with pytest.raises(StateMismatchError, match=r"weight: shape \(4, 2\) in the file, \(3, 2\)"):
        load_state_dict(net, given, strict=False)
    fits = {"bias": torch.zeros(3), "weight": torch.zeros(4, 2)}
    with pytest.raises(StateMismatchError):
        load_state_dict(net, fits)
    assert all(torch.equal(net.state_dict()[name], t) for name, t in before.items())


def test_many_problems_are_cut_short() -> None:
    net = nn.ModuleList(nn.Linear(1, 1) for _ in range(15))
    with pytest.raises(StateMismatchError, match=r"in 30 places(.|\n)*and 10 more"):
        load_state_dict(net, {})


def test_strict_off_skips_names_and_converts_dtypes() -> None:
    net = nn.Linear(2, 3)
    bias = net.bias.clone()
    load_state_dict(net, {"weight": torch.ones(3, 2).double(), "x": torch.ones(1)}, strict=False)
    assert torch.equal(net.weight, torch.ones(3, 2))
    assert net.weight.dtype is torch.float32
    assert torch.equal(net.bias, bias)
    with pytest.raises(StateMismatchError, match=r"weight: dtype torch.float64 in the file, torc"):
        load_state_dict(net, {"weight": torch.ones(3, 2).double(), "bias": bias})


def test_a_module_on_meta_is_refused_rather_than_filled_with_nothing() -> None:
    net = nn.Linear(2, 1, device="meta")
    with pytest.raises(StateMismatchError, match=r"weight: on the meta device in the model; mat"):
        load_state_dict(net, {"weight": torch.ones(1, 2), "bias": torch.ones(1)})


def test_state_that_is_no_tensor_is_named() -> None:
    class Extra(nn.Module):
        def get_extra_state(self) -> Any:
            return {"scale": 1}

        def set_extra_state(self, state: Any) -> None: ...

    with pytest.raises(ValueError, match=r"'0._extra_state' is saved by its module as a dict"):
        unsharded_state_dict(nn.Sequential(Extra()), None)


def test_an_optimizer_cannot_be_loaded_raw() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    with pytest.raises(ValueError, match=r"a SGD was to be loaded from a raw file; its state has"):
        load_raw("x.pt", optimizer, data_parallel=None)
