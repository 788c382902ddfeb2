"""A small language model learns in fp8 as it does in bfloat16."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from thunder_memsave import ThunderMemsaveStrategy

NUM_STEPS, NUM_LAST = 300, 50
NUM_ROWS, NUM_TOKENS, WIDE, NUM_HEADS = 4, 32, 64, 4

TEXT = Path(__file__).parents[2] / "LICENSE"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDE), nn.LayerNorm(WIDE)
        self.qkv, self.out = nn.Linear(WIDE, 3 * WIDE), nn.Linear(WIDE, WIDE)
        self.up, self.down = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        qkv = self.qkv(self.before_attention(x)).view(rows, tokens, 3, NUM_HEADS, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, tokens, WIDE))
        return x + self.down(nn.functional.gelu(self.up(self.before_mlp(x))))


class LanguageModel(nn.Module):
    """A byte-level language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, WIDE)
        self.positions = nn.Parameter(0.02 * torch.randn(NUM_TOKENS, WIDE))
        self.blocks = nn.ModuleList([Block()])
        self.norm, self.lm_head = nn.LayerNorm(WIDE), nn.Linear(WIDE, 128)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def losses(fp8: dict[str, Any] | None) -> Tensor:
    """Train on the same bytes in the same order, in bfloat16 but for the linears in fp8."""
    text = torch.tensor(list(TEXT.read_bytes()))
    torch.manual_seed(0)
    fabric = Fabric(
        accelerator="cpu",
        devices=1,
        strategy=ThunderMemsaveStrategy(sharding="none", fp8=fp8),
        precision="bf16-mixed",
    )
    fabric.launch()
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    model, optimizer = fabric.setup(model, optimizer)
    found = []
    generator = torch.Generator().manual_seed(0)  # `nvfp4` draws from PyTorch's own
    for _ in range(NUM_STEPS):
        starts = torch.randint(len(text) - NUM_TOKENS - 1, (NUM_ROWS, 1), generator=generator)
        rows = text[starts + torch.arange(NUM_TOKENS + 1)]
        optimizer.zero_grad()
        loss = model(rows[:, :-1], rows[:, 1:])
        fabric.backward(loss)
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


@cache
def bfloat16_losses() -> Tensor:
    return losses(None)


@pytest.mark.parametrize(
    "recipe",
    [
        "delayed",
        pytest.param("current", marks=pytest.mark.soak),
        pytest.param("block", marks=pytest.mark.soak),
        pytest.param("mxfp8", marks=pytest.mark.soak),
        pytest.param("nvfp4", marks=pytest.mark.soak),
    ],
)
def test_a_language_models_loss_is_within_1_percent_of_bfloat16s_after_300_steps(
    recipe: str,
) -> None:
    reference, found = bfloat16_losses(), losses({"recipe": recipe, "backend": "torch"})
    assert not torch.equal(reference, found)
    assert reference[0] > 4  # of log(128) = 4.9
    last, expected = (run[-NUM_LAST:].mean().item() for run in (found, reference))
    assert expected < 2.5  # it has learned, and is still learning
    assert abs(last / expected - 1) < 0.01
