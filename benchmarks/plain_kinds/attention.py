"""Attention, transformers of torch.nn, and torch.utils.checkpoint inside."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from plain_kinds.registry import bools, floats, ints, mlp, plain

ROWS, LENGTH, WIDTH = 2, 5, 8


@plain(x=floats(ROWS, LENGTH, WIDTH))
class AttentionWeights(nn.Module):
    """MultiheadAttention that returns its weights, of each head and on average."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, average = self.attend(x, x, x)
        again, heads = self.attend(out, x, x, average_attn_weights=False)
        return again, average, heads


@plain(x=floats(LENGTH, ROWS, WIDTH), y=floats(4, ROWS, 6))
class CrossAttention(nn.Module):
    """Other widths of keys and values, bias_k, a zero key, and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(
            WIDTH, 2, kdim=6, vdim=6, add_bias_kv=True, add_zero_attn=True
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = torch.zeros(LENGTH, 4, dtype=torch.bool)
        mask[:, 3] = True
        return self.attend(x, y, y, attn_mask=mask, need_weights=False)[0]


class _Encoder(nn.Module):
    norm_first = False

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 16, dropout=0.0, batch_first=True, norm_first=self.norm_first
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not self.norm_first)


@plain(x=floats(ROWS, LENGTH, WIDTH))
class Encoder(_Encoder):
    """In evaluation torch takes a fast path."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@plain(x=floats(ROWS, LENGTH, WIDTH))
class PaddedEncoder(_Encoder):
    """A mask of padding: the fast path is of nested tensors."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        return self.layers(x, src_key_padding_mask=mask)


@plain(ids=ints(9, ROWS, LENGTH))
class CausalEncoder(_Encoder):
    """A small language model of the tutorials, with sines and cosines of positions."""

    norm_first = True

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.words = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 9)
        place = torch.arange(LENGTH)[:, None] / 10 ** (torch.arange(0, WIDTH, 2) / WIDTH)
        codes = torch.zeros(LENGTH, WIDTH)
        codes[:, 0::2], codes[:, 1::2] = place.sin(), place.cos()
        self.register_buffer("codes", codes)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        h = self.layers(self.embed(ids) * WIDTH**0.5 + self.codes, mask=mask, is_causal=True)
        return self.words(h).log_softmax(-1)


@plain(source=floats(ROWS, 4, WIDTH), target=floats(ROWS, 3, WIDTH))
class WholeTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Transformer(WIDTH, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.net(source, target, tgt_mask=mask)


@plain(x=floats(ROWS, LENGTH, WIDTH), keep=bools(ROWS, LENGTH))
class MaskedAttention(nn.Module):
    """scaled_dot_product_attention with a boolean mask that keeps the diagonal."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mask = keep[:, None, None] | torch.eye(LENGTH, dtype=torch.bool)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@plain(x=floats(ROWS, LENGTH, WIDTH))
class LinearBiases(nn.Module):
    """ALiBi, with slopes of heads, and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.slopes = nn.Parameter(torch.tensor([0.5, 0.25]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        place = torch.arange(LENGTH)
        distance = place[None] - place[:, None]
        bias = (self.slopes[:, None, None] * distance).masked_fill(distance > 0, float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(ROWS, -1, -1, -1))


@plain(x=floats(ROWS, LENGTH, WIDTH))
class LinearAttention(nn.Module):
    """Kernels of queries and keys, and cumulative sums."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        states = torch.einsum("bld,ble->blde", k, v).cumsum(1)
        return torch.einsum("bld,blde->ble", q, states) / (q * k.cumsum(1)).sum(-1, keepdim=True)


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(WIDTH, 16, WIDTH) for _ in range(3))


@plain(x=floats(ROWS, WIDTH))
class Checkpointed(_Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


@plain(x=floats(ROWS, WIDTH))
class ReentrantCheckpoint(_Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=True)
        return x


@plain(x=floats(ROWS, WIDTH))
class SequentialCheckpoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(WIDTH, 8, 8, 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)


@plain(x=floats(ROWS, WIDTH))
class CheckpointInPieces(_Blocks):
    """Checkpoints in code that also reads a number."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
            if x.abs().max().item() > 1e4:
                x = x / 2
        return x


@plain(x=floats(ROWS, WIDTH))
class CheckpointedNorm(nn.Module):
    """BatchNorm in a checkpoint: eager updates its statistics twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        def inner(value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
            h = self.block(value)
            return h * scale, h.mean()

        h, mean = checkpoint(inner, x, 0.5, use_reentrant=False)
        return self.last(h) + mean


@plain(x=floats(ROWS, LENGTH, WIDTH))
class PerceiverPool(nn.Module):
    """Slot attention: learned queries, softmax over slots, a GRU cell in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(1, 3, WIDTH))
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.kv(x).chunk(2, -1)
        slots = self.slots.expand(len(x), -1, -1)
        for _ in range(2):
            weights = (self.q(slots) @ k.mT).softmax(1) + 1e-6
            weights = weights / weights.sum(-1, keepdim=True)
            slots = self.cell((weights @ v).flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
        return slots
