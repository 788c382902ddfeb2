"""Code that one graph cannot express is refused with the user's line and what to do, and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.errors import CaptureError, CompileError

Code = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Counts its calls, draws a mask, and then runs the code."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("count").add_(1)
        return self.code(self, F.dropout(self.linear(x), 0.5, training=True))


def times_item(_: Net, y: Tensor) -> Tensor:
    return y * y.sum().item()


def branch_on_item(_: Net, y: Tensor) -> Tensor:
    return y if y.sum().item() > 0 else -y


def branch(_: Net, y: Tensor) -> Tensor:
    return y if y.sum() > 0 else -y


def nonzero(_: Net, y: Tensor) -> Tensor:
    return y[torch.nonzero(y[:, 0])[:, 0]]


def boolean_mask(_: Net, y: Tensor) -> Tensor:
    return y[y > 0]


def sizes(_: Net, y: Tensor) -> Tensor:
    return y[: int(y.sum())]


def renormalise(net: Net, y: Tensor) -> Tensor:
    return F.embedding(y.long(), net.linear.weight, max_norm=0.5)


def changed_weight(net: Net, y: Tensor) -> Tensor:
    with torch.no_grad():
        net.linear.weight.div_(2)
    return net.linear(y)


REFUSALS: dict[Code, tuple[type[Exception], str]] = {
    times_item: (CompileError, "reads a number from a tensor.* Compute with the tensor itself"),
    branch_on_item: (CaptureError, "depends on the numbers in a tensor.* torch.where"),
    branch: (CaptureError, "depends on the numbers in a tensor.* torch.where"),
    nonzero: (CompileError, "nonzero.* the shape of its result depends on numbers.* torch.where"),
    boolean_mask: (CompileError, "the shape of its result depends on numbers.* a mask"),
    sizes: (CompileError, "reads a number from a tensor.* Compute with the tensor itself"),
    renormalise: (CompileError, "max_norm, which changes its weight in place.*torch.renorm"),
    changed_weight: (CompileError, "changes the parameter 'linear.weight' in place.*summon_full"),
}


@pytest.mark.parametrize("code", REFUSALS, ids=lambda code: code.__name__)
@pytest.mark.parametrize("is_training", [True, False], ids=["training", "no_grad"])
def test_the_line_and_the_reason_are_named_and_nothing_changes(
    code: Code, is_training: bool
) -> None:
    error, reason = REFUSALS[code]
    torch.manual_seed(0)
    net = Net(code)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    generator = torch.get_rng_state()
    compiled = CompiledModule(net)
    with torch.set_grad_enabled(is_training), pytest.raises(error) as caught:
        compiled(torch.ones(3, 4))
    assert_names(caught.value, code, reason)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)


def assert_names(error: Exception, code: Code, reason: str) -> None:
    assert re.search(reason, str(error)), str(error)
    first = code.__code__.co_firstlineno
    lines = [f"{Path(__file__).name}:{first + i} in {code.__name__}" for i in range(1, 4)]
    assert any(line in str(error) for line in lines), str(error)


def test_the_advice_for_max_norm_gives_what_max_norm_gives() -> None:
    torch.manual_seed(0)
    of_torch = nn.Embedding(6, 4, max_norm=0.5)
    advised = nn.Embedding.from_pretrained(of_torch.weight.detach().clone(), freeze=False)
    advised.weight.data.copy_(torch.renorm(advised.weight.data, 2.0, 0, 0.5))
    rows = torch.arange(6)
    torch.testing.assert_close(CompiledModule(advised)(rows), of_torch(rows))
