"""Draws small models at random: views, writes in place, values that are reused or not used at all."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

# Each maps names of (4, 6) values, and a fresh name, to lines that assign the fresh name.
_UNARY = (
    "torch.sin({a})",
    "torch.tanh({a})",
    "F.gelu({a})",
    "F.softmax({a}, -1)",
    "F.layer_norm({a}, (6,))",
    "F.linear({a}, self.weight, self.bias)",
    "F.dropout({a}, 0.5)",
    "{a}.view(2, 2, 6).transpose(0, 1).reshape(4, 6)",
    "{a}.t().contiguous().t()",
    "{a}[:1].expand(4, 6)",
    "{a}[:, ::2].repeat(1, 2)",
    "{a}.double().sin().float()",
    "{a} - {a}.max(1, keepdim=True)[0]",
    "torch.cat({a}.chunk(2, 1)[::-1], 1)",
    "torch.cat({a}.split([2, 4], 1), 1)",
    "torch.cat([{a}.topk(3)[0], {a}[:, 3:]], 1)",
    "torch.sort({a}, -1)[0]",
    "{a}.masked_fill({a} > 0.5, 0.25)",
    "{a} * self.seen",
)
_BINARY = (
    "{a} + {b}",
    "{a} * torch.tanh({b})",
    "{a} - {b}.detach()",
    "torch.where({a} > 0, {a}, {b})",
    "torch.tanh({a} @ {b}.t()) @ {a}",
)
_IN_PLACE = ("{c} = {a} * 1.5\n    {c}.add_({b})", "{c} = {a} + {b}\n    {c}.mul_({c}.sigmoid())")
_ASIDE = ("{c} = {a}.exp()", "self.seen.add_(1.0)", "self.mean.copy_({a}.detach().mean(0))")


class Graph(nn.Module):
    """Two weights, two buffers that forward may write to."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 2)
        self.bias = nn.Parameter(torch.randn(6) / 2)
        self.register_buffer("seen", torch.ones(()))
        self.register_buffer("mean", torch.zeros(6))
        self._forward = forward

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self._forward(self, x)


def source(seed: int, *, num_ops: int = 14) -> str:
    """Return the source of `run(self, x)`."""
    rng = random.Random(seed)
    lines, pool = ["y = F.linear(x, self.weight, self.bias)"], ["x", "y"]
    for number in range(num_ops):
        names = {"a": rng.choice(pool[-4:]), "b": rng.choice(pool), "c": f"v{number}"}
        kind = rng.choices((_UNARY, _BINARY, _IN_PLACE, _ASIDE), weights=(10, 6, 2, 2))[0]
        line = rng.choice(kind).format(**names)
        lines.append(line if kind in (_IN_PLACE, _ASIDE) else f"v{number} = {line}")
        if kind is not _ASIDE:
            pool.append(f"v{number}")
    result = f"{pool[-1]} * y + {rng.choice(pool)}, {rng.choice(pool[1:] or pool)} + 0"
    body = "\n    ".join([*lines, f"return {result}"])
    return f"def run(self, x):\n    {body}\n"


def graph(seed: int) -> Graph:
    """Build the model of a seed."""
    scope: dict[str, object] = {"torch": torch, "F": nn.functional}
    exec(compile(source(seed), f"graph {seed}", "exec"), scope)
    torch.manual_seed(seed)
    return Graph(scope["run"])  # type: ignore[arg-type]
