"""Optimizers use one kernel for all shards, as they do for plain parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils

from thunder_memsave.compat import foreach_subclasses
from thunder_memsave.sharding.sharded_parameter import ShardedParameter, mark_sharded


class Subclass(nn.Parameter):
    """A type that is in no list of torch."""


def sharded() -> ShardedParameter:
    return mark_sharded(
        nn.Parameter(torch.ones(2, 3)),
        unsharded_shape=torch.Size((4, 3)),
        first_row=0,
        num_real_rows=2,
        parameter_name="w",
    )


@pytest.fixture
def foreach_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply torch's CUDA preference on the CPU."""
    monkeypatch.setattr(torch_optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])


def default_of(p: nn.Parameter) -> tuple[bool, bool]:
    return torch_optimizer._default_to_fused_or_foreach([p], differentiable=False)


@pytest.mark.usefixtures("foreach_by_default")
def test_torch_itself_chooses_foreach_for_exact_types_only() -> None:
    """The canary: when this fails, `foreach_subclasses` can be deleted."""
    assert foreach_subclasses.is_needed()
    assert default_of(nn.Parameter(torch.ones(2))) == (False, True)
    assert default_of(Subclass(torch.ones(2))) == (False, False)


@pytest.mark.usefixtures("foreach_by_default")
def test_foreach_is_the_default_for_sharded_parameters() -> None:
    assert default_of(sharded()) == (False, True)


@pytest.mark.usefixtures("foreach_by_default")
def test_an_optimizer_over_shards_steps_through_foreach(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    upstream = torch._foreach_addcdiv_

    def counted(*args: Any) -> None:
        calls.append("foreach")
        upstream(*args)

    monkeypatch.setattr(torch, "_foreach_addcdiv_", counted)
    p = sharded()
    optimizer = torch.optim.AdamW([p])
    p.grad = torch.ones(2, 3)
    optimizer.step()
    assert calls == ["foreach"]


def test_the_lists_are_those_that_torchs_own_subclass_is_in() -> None:
    sharded()
    lists: list[list[Any]] = [
        torch_optimizer._foreach_supported_types,
        _foreach_utils._foreach_supported_types,
    ]
    for types in lists:
        assert DTensor in types
        assert types.count(ShardedParameter) == 1
