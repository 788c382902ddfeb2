"""Operations in place, and state that forward changes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plain_kinds.registry import data, floats, ints, plain

ROWS, WIDTH = 4, 6


@plain(x=floats(2, 3, 6, 6))
class InPlaceActivations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Hardtanh(-0.5, 1.0, inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@plain(x=floats(2, 3, 5))
class ResidualInPlace(nn.Module):
    """A residual that is added in place, then an activation in place, as in torchvision's ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(3, 3, 3, padding=1), nn.Conv1d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu_(self.first(x))
        out = self.second(out)
        out += x
        return out.relu_()


@plain(x=floats(ROWS, WIDTH))
class WrittenColumns(nn.Module):
    """Columns of a fresh tensor are written one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(len(x), 5, dtype=x.dtype)
        out[:, :2] = self.a(x)
        out[:, 2:] = self.b(x).tanh()
        out[0, 0] = 1.0
        return out


@plain(x=floats(ROWS, WIDTH))
class ViewsOfOneValue(nn.Module):
    """Both halves are changed through views, and the whole is read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        left, right = h[:, :3], h[:, 3:]
        left.mul_(2.0)
        right.add_(left)
        return h * x


@plain(x=floats(ROWS, WIDTH))
class TransposedWrite(nn.Module):
    """Through a chain of views: a transpose, a row and a diagonal."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, ROWS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).clone()
        h.t()[1].zero_()
        h.diagonal().add_(3.0)
        h.view(-1)[5:7].mul_(0.5)
        return h.exp()


@plain(x=floats(ROWS, WIDTH))
class WrittenInALoop(nn.Module):
    """Dynamic programming: each row is written from the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        table = torch.zeros(len(x) + 1, WIDTH, dtype=x.dtype)
        for row in range(len(x)):
            table[row + 1] = torch.logaddexp(table[row].clone(), self.linear(x[row]))
        return table[1:]


@plain(x=floats(ROWS, WIDTH))
class FilledMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, ROWS)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.linear(x)
        mask = torch.ones_like(scores, dtype=torch.bool).triu_(1)
        scores.masked_fill_(mask, float("-inf"))
        weights = scores.softmax(-1).clone()
        weights[mask] = 0.25
        return weights @ x


@plain(x=floats(ROWS, WIDTH))
class OutArgument(nn.Module):
    """Results are written into a tensor that is there already, without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scratch", torch.zeros(ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch.mul(x, 2.0, out=self.scratch)
        return self.linear(x) + self.scratch


@plain(x=data(ROWS, WIDTH))
class ChangedInput(nn.Module):
    """The caller's own batch is normalised in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(x.mean(0)).div_(x.std(0) + 1e-5)
        return self.linear(x)


@plain(x=floats(ROWS, WIDTH), index=ints(ROWS, 3))
class AddedRows(nn.Module):
    """index_add_, index_copy_, scatter_ and fill_diagonal_ on a value with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        h = self.linear(x)
        h.index_add_(0, index, x[:3], alpha=0.5)
        h.index_copy_(1, torch.tensor([1]), x[:, :1])
        h.scatter_(1, index[:1, None], 2.0)
        h.fill_diagonal_(0.5)
        return h.sin_()


@plain(x=floats(ROWS, WIDTH))
class SwappedHalves(nn.Module):
    """Unbound rows are changed by augmented assignment, and two slices are exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h[:, :3], h[:, 3:] = h[:, 3:].clone(), h[:, :3].clone()
        h[1] *= 2
        h[..., -1] -= h.detach().mean()
        return h


@plain(x=floats(2, 3, 8))
class TemporalShift(nn.Module):
    """TSM: parts of the channels move in time, into zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[:, :-1, :2] = x[:, 1:, :2]
        out[:, 1:, 2:4] = x[:, :-1, 2:4]
        out[:, :, 4:] = x[:, :, 4:]
        return self.linear(out)
