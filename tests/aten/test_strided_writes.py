"""Writes to a tensor that is not contiguous, and dropout of it, give the numbers of eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.errors import CompileError


class Dropped(nn.Module):
    """Drops numbers of a linear layer's results, seen otherwise."""

    def __init__(self, see: Callable[[Tensor], Tensor], dropout: nn.Module) -> None:
        super().__init__()
        self.linear, self.see, self.dropout = nn.Linear(8, 8), see, dropout

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.dropout(self.see(self.linear(x)))
        return found


@pytest.mark.parametrize(
    "see",
    [
        lambda x: x.transpose(0, 1),
        lambda x: x.unflatten(2, (2, 4)).permute(2, 3, 0, 1),
        lambda x: x.unsqueeze(1).transpose(0, 3),
        lambda x: x[:, :, ::2],
        lambda x: x[:, :1].expand(-1, 5, -1),
        lambda x: x,
    ],
    ids=["transposed", "permuted", "dims of one", "every second", "expanded", "contiguous"],
)
@pytest.mark.parametrize(
    "dropout",
    [nn.Dropout(0.3), nn.FeatureAlphaDropout(0.3), nn.RReLU()],
    ids=lambda d: type(d).__name__,
)
def test_the_numbers_are_eagers(see: Callable[[Tensor], Tensor], dropout: nn.Module) -> None:
    torch.manual_seed(0)
    model = Dropped(see, dropout)
    assert_eagers(model, torch.randn(2, 5, 8))


def test_an_encoder_of_pytorch_has_eagers_numbers() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    assert_eagers(nn.TransformerEncoder(layer, 2), torch.randn(2, 5, 8))


def test_draws_by_a_function_are_eagers() -> None:
    class Drawn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x).transpose(0, 1)
            return y * torch.bernoulli(y.detach(), 0.3) + torch.rand_like(y) * torch.randn_like(y)

    torch.manual_seed(0)
    assert_eagers(Drawn(), torch.randn(2, 5, 8))


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "masked_fill_": lambda v, x: v.masked_fill_(x > 0.1, 0.25),
    "masked_fill_ by rows": lambda v, x: v.masked_fill_(x[:, :1] > 0.1, torch.tensor(0.25)),
    "numbers at a mask": lambda v, x: v.__setitem__(x[..., 0] > 0.1, 0.25),
    "index_add_": lambda v, x: v.index_add_(1, torch.tensor([0, 2]), x[:, :2]),
    "index_copy_": lambda v, x: v.index_copy_(1, torch.tensor([0, 2]), x[:, :2]),
    "scatter_": lambda v, x: v.scatter_(1, torch.zeros(2, 1, 8, dtype=torch.long), x[:, :1]),
    "masked_scatter_": lambda v, x: v.masked_scatter_(x > 0, x),
    "tril_": lambda v, x: v.tril_(),
    "cumsum_": lambda v, x: v.cumsum_(1),
    "renorm_": lambda v, x: v.renorm_(2, 0, 1.0),
    "mul_": lambda v, x: v.mul_(x),
    "pow_": lambda v, x: v.pow_(2.0),
    "unsqueeze_ and squeeze_": lambda v, x: v.unsqueeze_(0).squeeze_(0),
    "copy_": lambda v, x: v.copy_(x),
}


class Written(nn.Module):
    """Writes to the results of a linear layer where they are transposed, and takes a view that needs their strides."""

    def __init__(self, write: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(8, 8), write

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.transpose(0, 1)).transpose(0, 1)
        self.write(y, x)
        return y.transpose(0, 1).view(-1, 8)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_keep_strides(write: Callable[[Tensor, Tensor], object]) -> None:
    torch.manual_seed(0)
    assert_eagers(Written(write), torch.randn(2, 5, 8))


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "fill_ writes to a view by expand": lambda y: y.new_zeros(8).expand(3, 8).fill_(2.0),
    "_foreach_mul_ writes to a view": lambda y: torch._foreach_mul_([y.transpose(0, 1)], 2.0),
}


@pytest.mark.parametrize("message", REFUSED)
def test_writes_that_would_be_wrong_are_refused(message: str) -> None:
    """PyTorch's functionalization adds up what is written, and its traced gradient leaves the write out."""

    class Refused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            REFUSED[message](y)
            return y

    with pytest.raises(CompileError, match=message):
        CompiledModule(Refused())(torch.randn(2, 5, 8))


def assert_eagers(model: nn.Module, x: Tensor) -> None:
    found = []
    for call in (model.train(), CompiledModule(model)):
        model.zero_grad()
        torch.manual_seed(1)
        y = call(x)
        y.square().sum().backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([y.detach(), torch.get_rng_state(), *grads])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[0][0] == 0, found[1][0] == 0)
