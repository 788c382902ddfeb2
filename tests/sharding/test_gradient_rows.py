"""A sharded parameter's gradient keeps its identity; arithmetic on it is by rows, and the rest is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from thunder_memsave.sharding.row_errors import ShardedParameterError
from thunder_memsave.sharding.sharded_parameter import (
    GradientRows,
    ShardedParameter,
    mark_sharded,
    refuse_rows,
)

ROWS = torch.tensor([[3.0, 4.0], [0.0, 0.0]])


def gather(numbers: Tensor) -> Tensor:
    """Both ranks hold the same rows."""
    return torch.stack([numbers, numbers])


def sharded(gather: Callable[[Tensor], Tensor] | None = gather) -> ShardedParameter:
    """Rows 0 and 1 of four, with the gradient `ROWS`."""
    p = mark_sharded(
        nn.Parameter(torch.ones(2, 2)),
        unsharded_shape=torch.Size((4, 2)),
        first_row=0,
        num_real_rows=2,
        parameter_name="w",
        gather=gather,
    )
    p.grad = ROWS.clone()
    return p


def grad_of(p: nn.Parameter) -> GradientRows:
    assert isinstance(p.grad, GradientRows)
    return p.grad


@pytest.mark.parametrize(
    "use",
    [
        lambda g: g.norm(dim=0),
        lambda g: g.sum(0),
        lambda g: g.norm("nuc"),
        lambda g: torch.linalg.matrix_norm(g),
        lambda g: torch.linalg.norm(g, 2),
        lambda g: g.median(),
        lambda g: g.std(),
        lambda g: g.view(-1),
        lambda g: g[0],
        lambda g: g.tolist(),
        lambda g: g.numpy(),
        lambda g: g @ torch.ones(2, 2),
        lambda g: g.__setitem__(0, 1.0),
        lambda g: torch.cat([g, g]),
        lambda g: torch.equal(g, torch.ones(4, 2)),
        lambda g: g.detach().clone().argmax(),
        lambda g: refuse_rows(g, operation="all_reduce"),
    ],
)
def test_other_reductions_are_refused(use: Callable[[Tensor], Any]) -> None:
    with pytest.raises(
        ShardedParameterError,
        match=r"\(\) was asked to use the gradient of 'w' of shape \(4, 2\).* 2 of its 4 rows.*"
        r"fabric.clip_gradients clips all gradients.*`p.grad.to_local\(\)`",
    ):
        use(grad_of(sharded()))


def test_a_gradient_whose_ranks_are_not_known_is_not_reduced() -> None:
    p = pickle.loads(pickle.dumps(sharded()))
    p.grad = ROWS.clone()
    for grads in ([p.grad], [ROWS, p.grad], [grad_of(sharded()), p.grad]):
        with pytest.raises(ShardedParameterError, match=r"norm\(\) was asked to use the gradient"):
            nn.utils.get_total_norm(grads)


def test_gradients_of_sharded_and_replicated_parameters_have_one_norm() -> None:
    grads = [grad_of(sharded()), torch.tensor([1.0, 1.0])]
    assert nn.utils.get_total_norm(grads) == torch.tensor(25.0 + 25.0 + 2.0).sqrt()


def test_the_gradient_is_one_object_that_autograd_adds_to() -> None:
    p = sharded()
    p.grad = given = ROWS.clone()
    assert p.grad is given
    with torch._C.DisableTorchFunctionSubclass():  # as in a compiled backward
        torch.autograd.backward([p], [torch.full((2, 2), 1.0)])
    with torch._C.DisableTorchFunctionSubclass():
        loss = (p * 2).sum()
    with FlopCounterMode(display=False):  # a dispatch mode
        loss.backward()
    assert p.grad is given
    assert torch.equal(grad_of(p).to_local(), ROWS + 3)
    del p.grad
    assert p.grad is None


def test_arithmetic_by_rows_gives_gradients_again() -> None:
    p = sharded()
    grad = grad_of(p)
    grad.mul_(2).add_(1).clamp_(max=8)
    grad[grad > 7] = 0.0
    assert grad.to_local().tolist() == [[7.0, 0.0], [1.0, 1.0]]
    for made in (grad * 2, grad.clone().double(), grad.data, torch._foreach_neg([grad])[0]):
        assert type(made) is GradientRows
    with torch.no_grad():
        assert type(grad.add(p, alpha=0.1)) is GradientRows
        assert type(torch._foreach_add([grad], [p], alpha=0.1)[0]) is GradientRows
    state = torch.zeros(2, 2)
    assert type(state.lerp_(grad, 0.1)) is Tensor
    p.grad = p.detach() * 2
    assert grad_of(p).sum() == 16


def test_the_rows_themselves_are_plain() -> None:
    grad = grad_of(sharded())
    for plain in (grad.to_local(), pickle.loads(pickle.dumps(grad)), torch.zeros_like(grad)):
        assert type(plain) is Tensor
    grad.to_local()[0, 0] = 7.0
    assert grad.max() == 7.0
    assert grad.data_ptr() == grad.to_local().data_ptr()


def test_what_autograd_grad_gives_of_a_sharded_parameter_is_its_gradient() -> None:
    p = sharded()
    x = torch.ones(2, 2, requires_grad=True)
    with torch._C.DisableTorchFunctionSubclass():
        loss = (p * x).sum()
    of_p, of_x = torch.autograd.grad(loss, [p, x])
    assert type(of_p) is GradientRows
    assert of_p.sum() == 8
    assert type(of_x) is Tensor


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Rprop, torch.optim.NAdam])
def test_optimizers_step_as_on_plain_tensors(kind: Any, foreach: bool) -> None:
    options = {"momentum": 0.9, "nesterov": True} if kind is torch.optim.SGD else {}
    p, plain = sharded(), nn.Parameter(torch.ones(2, 2))
    optimizers = [kind([t], lr=0.1, foreach=foreach, **options) for t in (p, plain)]
    for sign in (1.0, -1.0, 1.0):
        p.grad, plain.grad = ROWS * sign, ROWS * sign
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(p.data, plain.data)
