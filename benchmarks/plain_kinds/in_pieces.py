"""Code that reads a number, so that it runs in eager PyTorch, and what it does with its compiled submodules."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.utils.checkpoint import checkpoint

from plain_kinds.registry import floats, mlp, plain

ROWS, WIDTH = 4, 6


class _Pieces(nn.Module):
    """Two networks; what is between them is eager, because it reads a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(WIDTH, 5, WIDTH), mlp(WIDTH, 4, WIDTH)

    def read(self, h: Tensor) -> Tensor:
        return h / 2 if h.abs().max().item() > 1e4 else h


@plain(x=floats(ROWS, WIDTH))
class PiecesOfSeveralCalls(_Pieces):
    """One submodule is called twice, the other on parts, with and without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.read(self.first(self.first(x)))
        with torch.no_grad():
            scale = self.second(h).norm()
        return torch.cat([self.second(part) for part in h.split(2)]) * scale


@plain(x=floats(ROWS, WIDTH))
class FunctionalPiece(_Pieces):
    """MAML: a submodule is called with other weights by functional_call."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.read(self.first(x))
        weights = {n: p * 0.5 for n, p in self.second.named_parameters()}
        return functional_call(self.second, weights, (h,)) + self.second(h)


@plain(x=floats(ROWS, WIDTH))
class CopiedPiece(_Pieces):
    """A copy of a submodule is changed and called: the submodule itself must not answer."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.read(self.first(x))
        other = copy.deepcopy(self.first)
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(0.5)
        return self.second(h) + other(h)


@plain(x=floats(ROWS, WIDTH))
class VmappedPiece(_Pieces):
    """torch.vmap and the Jacobian of a submodule."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.read(self.first(x))
        return vmap(self.second)(h), vmap(jacrev(self.second))(h).square().sum((1, 2))


@plain(x=floats(ROWS, WIDTH))
class DifferentiatedPiece(_Pieces):
    """WGAN-GP: the gradient of a submodule by its input is part of the loss."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.read(self.first(x))
        with torch.enable_grad():
            mixed = h.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.second(mixed).sum(), mixed, create_graph=True)
        return self.second(h), (slope.norm(dim=-1) - 1).square()


@plain(x=floats(ROWS, WIDTH))
class GradientOfPiece(_Pieces):
    """The same without second derivatives: an adversarial step on the input."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.read(x)
        with torch.enable_grad():
            near = h.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.first(near).square().sum(), near)
        return self.second(self.first(h + 0.1 * slope.sign()))


class _Same(nn.Module):
    """Returns its input, or a view of it."""

    def __init__(self, *, view: bool) -> None:
        super().__init__()
        self.inner, self.view = mlp(WIDTH, WIDTH), view

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x[:, :3] if self.view else x), self.inner(x.exp() if self.view else x.clone())


@plain(x=floats(ROWS, WIDTH))
class ViewOfAPieceChanged(_Pieces):
    """A view that a submodule returns of its input is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.same = _Same(view=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.read(x * 2).exp()
        part, inner = self.same(h.clone())
        part.add_(3.0)
        return part * h[:, :3] + inner[:, :3]


@plain(x=floats(ROWS, WIDTH))
class InputOfAPieceChanged(_Pieces):
    """A submodule returns its input, which is changed in place, and computes with a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.same = _Same(view=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.read(x.detach() * 2)
        same, inner = self.same(h)
        same.add_(1.0)
        return h * inner.detach() + inner


class _Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x += self.inner(x.clone())
        return x


@plain(x=floats(ROWS, WIDTH))
class PieceThatWrites(_Pieces):
    """A submodule changes its input in place, which a view of it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = _Writes()

    def forward(self, x: Tensor) -> Tensor:
        h = self.read(self.first(x))
        part = h[:, :2]
        self.writes(h)
        return self.second(h.clone()) + part.sum()


@plain(x=floats(ROWS, WIDTH))
class PieceUnderAutocast(_Pieces):
    def forward(self, x: Tensor) -> Tensor:
        h = self.read(self.first(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = self.second(h)
        return low.float() + self.second(h)


@plain(x=floats(ROWS, WIDTH))
class HookedPieces(_Pieces):
    """Hooks of submodules: forward, before it, backward, and of an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.first.register_forward_pre_hook(lambda m, args: (args[0].sin(),))
        self.first.register_forward_hook(self._counted)
        self.second.register_full_backward_hook(lambda m, given, wanted: (given[0] * 2,))
        self.second[0].register_forward_hook(lambda m, args, out: out + 1)

    def _counted(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.count += 1
        return output * self.count

    def forward(self, x: Tensor) -> Tensor:
        h = self.read(self.first(x))
        if h.requires_grad:
            h.register_hook(lambda grad: grad * 0.5)
        return self.second(h)


@plain(x=floats(ROWS, WIDTH))
class CheckpointedPieces(_Pieces):
    """Checkpoints around a submodule, and around a function that calls two."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.read(checkpoint(self.first, x, use_reentrant=False))
        return h + checkpoint(lambda v: self.second(self.first(v)), h, use_reentrant=False)


@plain(x=floats(ROWS, WIDTH))
class ReentrantPieces(_Pieces):
    """A reentrant checkpoint, which runs without gradients first."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.read(self.first(x))
        return h + checkpoint(self.second, h, use_reentrant=True)


@plain(draws=True, x=floats(16, WIDTH))
class CheckpointedDropout(_Pieces):
    """What is checkpointed drops numbers: backward must drop the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first.append(nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.read(self.first(x))
        return self.second(h + checkpoint(self.first, h, use_reentrant=False))


@plain(x=floats(ROWS, WIDTH))
class NormsInPieces(nn.Module):
    """BatchNorm within a submodule, and between submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 5), nn.BatchNorm1d(5), nn.ReLU())
        self.norm = nn.BatchNorm1d(5, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.body(x))
        return h * 2 if h.sum().item() > 0 else h


class _Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(WIDTH, 5, 3), mlp(3, 5, WIDTH)
        self.scale = nn.Parameter(torch.ones(3))

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x) * self.scale

    def decode(self, h: Tensor) -> Tensor:
        return self.decoder(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


@plain(x=floats(ROWS, WIDTH))
class OtherMethodsOfPieces(nn.Module):
    """Methods of a submodule besides forward, and forward without a call."""

    def __init__(self) -> None:
        super().__init__()
        self.coder = _Coder()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.coder.encode(x)
        h = h / 2 if h.abs().max().item() > 1e4 else h
        return self.coder.decode(h), self.coder.forward(x)


@plain(x=floats(ROWS, WIDTH))
class SharedBetweenPieces(nn.Module):
    """Two submodules share a weight, which eager code reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(WIDTH, WIDTH, WIDTH), mlp(WIDTH, WIDTH, WIDTH)
        self.second[0].weight = self.first[0].weight
        self.own = self.first[0].weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h / 2 if h.abs().max().item() > 1e4 else h
        return self.second(h) @ self.own


@plain(x=floats(ROWS, WIDTH))
class PieceCaught(_Pieces):
    """An error of a submodule is caught, and another is called."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.read(self.first(x))
        try:
            return self.second(h[:, :3])
        except RuntimeError:
            return self.second(h)
