"""Python around tensors: branches, loops, errors, other types, side effects."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plain_kinds.registry import always, floats, ints, mlp, plain

ROWS, WIDTH = 4, 6
_calls: dict[int, int] = {}
_log = logging.getLogger("plain_modules")


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(WIDTH, 5, WIDTH), mlp(WIDTH, 4, WIDTH)


@plain(x=floats(ROWS, WIDTH))
class BranchOnSum(Two):
    """One of two networks, by the sign of a sum."""

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if x.sum() > 0 else self.second(x)


@plain(x=floats(ROWS, WIDTH), depth=lambda g: torch.tensor((g.initial_seed() + 1) // 2 % 3))
class LoopOfItem(Two):
    """The number of rounds is read from a tensor; ranks have the same number, as collectives need it."""

    def forward(self, x: Tensor, depth: Tensor) -> Tensor:
        for _ in range(int(depth.item()) + 1):
            x = self.first(x)
        return self.second(x)


@plain(x=floats(ROWS, WIDTH))
class UntilConverged(Two):
    """A while loop on a norm."""

    def forward(self, x: Tensor) -> Tensor:
        rounds = 0
        while x.norm() > 0.5 and rounds < 5:
            x, rounds = self.first(x) * 0.5, rounds + 1
        return self.second(x)


@plain(x=floats(ROWS, WIDTH))
class Conditional(Two):
    """torch.cond."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda v: self.first(v), lambda v: self.second(v), (x,))


@plain(x=floats(ROWS, WIDTH))
class EarlyExit(nn.Module):
    """BranchyNet: later layers run only if the first classifier is unsure."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp(WIDTH, WIDTH, WIDTH) for _ in range(3))
        self.exits = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        logits = x
        for layer, leave in zip(self.layers, self.exits, strict=True):
            x = layer(x)
            logits = leave(x)
            if logits.softmax(-1).max(-1).values.mean() > 0.38:
                break
        return logits


@plain(x=floats(ROWS, WIDTH))
class NonzeroRows(Two):
    """Only rows above a threshold are computed; their number depends on the batch."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nonzero(x.mean(-1) > -0.2).squeeze(-1)
        out = x.new_zeros(x.shape)
        out[rows] = self.first(x[rows])
        return self.second(out)


@plain(x=floats(ROWS, WIDTH))
class BooleanRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return h[h > 0].mean() + h[x[:, 0] > 0].sum()


@plain(x=floats(ROWS, WIDTH))
class TriesAndExcepts(Two):
    """What raises is caught, and something else is computed."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.first(x.view(5, -1))
        except RuntimeError:
            return self.second(x)


@plain(x=floats(ROWS, WIDTH))
class Asserts(Two):
    """Asserts on shapes and on numbers."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.ndim == 2, f"{x.shape} has other dims"
        assert torch.isfinite(x).all(), "not finite"
        torch._assert(x.shape[0] > 1, "too few rows")
        return self.second(self.first(x))


@plain(x=floats(ROWS, WIDTH))
class Prints(Two):
    """print of a number, in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        print(f"mean {h.mean().item():.3f}")
        return self.second(h)


@plain(x=floats(ROWS, WIDTH))
class WarnsAndLogs(Two):
    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("this is deprecated", UserWarning, stacklevel=2)
        _log.info("shape %s", x.shape)
        return self.second(self.first(x))


@plain(x=floats(ROWS, WIDTH))
class GlobalCounter(Two):
    """State in a global dictionary and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        count = _calls[id(self)] = _calls.get(id(self), 0) + 1
        self.history.append(count)
        return self.first(x) * count


@plain(x=floats(ROWS, WIDTH))
class WarmUp(Two):
    """A number of Python changes in each call, and a branch depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.beta = 0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        self.beta = min(1.0, self.step / 2)
        h = self.first(x)
        return self.second(h) * self.beta if self.step > 1 else h


@plain(x=floats(ROWS, WIDTH))
class NumpyRoundTrip(Two):
    """Numbers go to numpy and back, without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.from_numpy(x.detach().cpu().numpy().mean(0)).to(x)
        return self.first(x) * weights


@contextlib.contextmanager
def _scaled(module: Two, factor: float) -> Iterator[None]:
    module.factor = factor  # type: ignore[assignment]
    try:
        yield
    finally:
        module.factor = 1.0  # type: ignore[assignment]


@plain(x=floats(ROWS, WIDTH))
class OwnContext(Two):
    """A context manager of the user's own that changes an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def _layer(self, x: Tensor) -> Tensor:
        return self.first(x) * self.factor

    def forward(self, x: Tensor) -> Tensor:
        with _scaled(self, 3.0):
            h = self._layer(x)
        return h + self._layer(x)


@plain(x=floats(ROWS, WIDTH))
class Closures(Two):
    """Nested functions, partial, a generator, reduce, lambda, map and sorted."""

    def forward(self, x: Tensor) -> Tensor:
        offset = x.mean()

        def steps(count: int) -> Iterator[Tensor]:
            for number in range(count):
                yield self.first(x) + offset * number

        apply = functools.partial(torch.lerp, weight=0.25)
        parts = sorted(steps(3), key=lambda t: t.shape[0])
        h = functools.reduce(apply, parts)
        return sum((layer(h) for layer in [self.first, self.second]), start=torch.zeros(()))


@plain(x=floats(8, WIDTH))
class RecursiveTree(Two):
    """A tree of halves, by recursion."""

    def _combined(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            return self.first(x)
        half = len(x) // 2
        return self.second(self._combined(x[:half]) + self._combined(x[half:]))

    def forward(self, x: Tensor) -> Tensor:
        return self._combined(x)


@plain(x=floats(ROWS, WIDTH))
class CopiedModule(Two):
    """The inner loop of MAML without second derivatives: a copied layer takes a step in forward."""

    def forward(self, x: Tensor) -> Tensor:
        fast = copy.deepcopy(self.first)
        with torch.enable_grad():
            loss = fast(x.detach()).square().mean()
        grads = torch.autograd.grad(loss, list(fast.parameters()))
        with torch.no_grad():
            for p, g in zip(fast.parameters(), grads, strict=True):
                p.sub_(0.1 * g)
        return self.second(fast(x))


@plain(x=floats(ROWS, WIDTH))
class InnerGradient(nn.Module):
    """An energy-based step: the gradient of a scalar by the input, part of the graph (create_graph)."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, 8), nn.Softplus(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            if not x.requires_grad:
                x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return x - 0.1 * force


@plain(x=floats(ROWS, WIDTH))
class ShapeDependent(Two):
    """Branches on shapes, dtypes and devices, all known."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            return self.first(x.flatten(0, 1))
        match (x.shape[0] % 2, x.is_floating_point(), x.device.type):
            case (0, True, _):
                return self.second(x)
            case _:
                return self.first(x)


@plain(x=floats(ROWS, WIDTH))
class LayersOfOtherModes(Two):
    """Dropout-free: training alone adds an auxiliary output."""

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        return (self.second(h), h) if self.training else self.second(h)


class _Gate:
    """An object that is no module."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor

    @property
    def doubled(self) -> float:
        return 2 * self.factor


@plain(x=floats(ROWS, WIDTH))
class PlainObjects(Two):
    """Objects, cached properties, class attributes, and a table of functions."""

    table: ClassVar[dict[str, Any]] = {"relu": torch.relu, "tanh": torch.tanh}

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.kind = _Gate(0.5), "tanh"

    @functools.cached_property
    def mask(self) -> Tensor:
        return torch.ones(WIDTH).cumsum(0) / WIDTH

    def forward(self, x: Tensor) -> Tensor:
        h = self.table[self.kind](self.first(self.gate(x))) * self.gate.doubled
        return self.second(h * self.mask)


@plain(x=floats(ROWS, WIDTH))
class ReadsNumbersInEvaluation(Two):
    """Training is one graph; evaluation clips by numbers that it reads."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if not self.training and h.abs().max().item() > 0.1:
            h = h.clamp(-0.1, 0.1)
        return self.second(h)


@plain(x=floats(3, 5), lengths=ints(5, 3))
class ViterbiLoss(nn.Module):
    """A linear chain over labels with a mask of lengths: loops and where."""

    def __init__(self) -> None:
        super().__init__()
        self.emit, self.moves = nn.Linear(1, 4), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        scores = self.emit(x.unsqueeze(-1))
        alpha = scores[:, 0]
        for t in range(1, x.shape[1]):
            new = torch.logsumexp(alpha.unsqueeze(2) + self.moves, dim=1) + scores[:, t]
            alpha = torch.where((t <= lengths).unsqueeze(-1), new, alpha)
        return alpha.logsumexp(-1)


@plain(x=floats(ROWS, WIDTH))
class ClampedByTolist(Two):
    """tolist and max of Python."""

    def forward(self, x: Tensor) -> Tensor:
        most = max(x.detach().abs().amax(-1).tolist())
        return self.second(self.first(x) / most)


@plain(x=floats(2, 3, 8, 8), scale=always(2))
class ByInteger(nn.Module):
    """A number of Python changes shapes; it is a constant of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor, scale: int = 1) -> Tensor:
        for _ in range(scale):
            x = F.avg_pool2d(self.convolve(x), 2)
        return x
