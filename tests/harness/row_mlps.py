"""Builds models whose MLPs are wider than what goes in and out: gated with adapters or without, plain, and fused."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Kind = Literal["gated", "adapters", "plain", "fused", "relu"]
KINDS: tuple[Kind, ...] = ("gated", "adapters", "plain", "fused")
WIDTH, INNER = 16, 256


class Adapted(nn.Module):
    """A frozen linear layer with a trained adapter."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x)) * 2.0


class Mlp(nn.Module):
    """Of one kind."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        linear = Adapted if kind == "adapters" else nn.Linear
        self.kind = kind
        self.up = linear(WIDTH, 2 * INNER if kind == "fused" else INNER)
        self.gate = linear(WIDTH, INNER) if kind in ("gated", "adapters", "relu") else None
        self.down = linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        if self.kind == "fused":
            gate, up = up.chunk(2, dim=-1)
            inner = F.silu(gate) * up
        elif self.gate is None:
            inner = F.gelu(up)
        else:
            act = F.relu if self.kind == "relu" else F.silu
            inner = act(self.gate(x)) * up
        result: Tensor = self.down(inner)
        return result


class Rows(nn.Module):
    """Residuals of attention and of an MLP; its result is a loss."""

    def __init__(self, kind: Kind, num_blocks: int = 2) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(num_blocks))
        self.mlps = nn.ModuleList(Mlp(kind) for _ in range(num_blocks))
        if kind == "adapters":
            self.norms.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            heads = norm(x)[:, None]
            x = x + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[:, 0]
            x = x + mlp(norm(x))
        return (x.square().mean(),)


def build(kind: Kind, dtype: torch.dtype = torch.float32, num_blocks: int = 2) -> Rows:
    """Build a model, with the same weights every time."""
    torch.manual_seed(0)
    return Rows(kind, num_blocks).to(dtype)
