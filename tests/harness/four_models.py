"""Builds a small language model in four kinds: fully trained, LoRA, tied weights, odd numbers of rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

KINDS = ("all trainable", "lora", "tied", "odd")
SMALLEST_VOCABULARY = 13


class Adapted(nn.Module):
    """A frozen linear layer with a trained adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features) / 4)
        self.b = nn.Parameter(torch.randn(base.out_features, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


class Block(nn.Module):
    """A residual of two layers, which are frozen and have adapters with `lora`."""

    def __init__(self, width: int, inner: int, *, lora: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up: nn.Module = nn.Linear(width, inner)
        self.down: nn.Module = nn.Linear(inner, width)
        if lora:
            self.norm.requires_grad_(False)
            self.up, self.down = Adapted(nn.Linear(width, inner)), Adapted(nn.Linear(inner, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Embeds tokens, and gives the loss of predicting each from those before it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        vocabulary, width, inner = (SMALLEST_VOCABULARY, 7, 9) if kind == "odd" else (16, 8, 12)
        self.embedding = nn.Embedding(vocabulary, width)
        blocks = [Block(width, inner, lora=kind == "lora") for _ in range(2)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.25))
        if kind == "lora":
            self.embedding.requires_grad_(False)
            self.head.requires_grad_(False)
        if kind == "tied":
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embedding(tokens))) * self.scale
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def build(kind: str) -> Model:
    """Build one of `KINDS`, with the same weights every time."""
    torch.manual_seed(0)
    return Model(kind)
