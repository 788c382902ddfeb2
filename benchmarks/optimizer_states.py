"""Final losses of a tiny language model with optimizer states in fewer bits, and how far updates are from float32's.

    python benchmarks/optimizer_states.py losses            # 5 seeds, 400 steps each
    python benchmarks/optimizer_states.py losses --lr 1e-2
    python benchmarks/optimizer_states.py updates           # no model: gradients of known scales

`updates` compares the formats that we chose with others, each after 300 updates of both moments by gradients whose
scale differs from element to element: their logarithms are normal, with the standard deviation of the column. The last
half of the gradients is 0.3 times the first, so second moments decay.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from thunder_memsave.aten.random_bits import key_of
from thunder_memsave.optim import AdamW, tables
from thunder_memsave.optim.formats import Format, Place, State, layout, read, write

VOCABULARY, WIDTH, LENGTH, ROWS = 64, 64, 32, 32
STEPS, SEEDS, LAST = 400, 5, 40

WeightsAndOptimizer = tuple[torch.dtype, Callable[[Iterable[nn.Parameter]], Optimizer]]


def ours(**settings: Any) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    return lambda weights: AdamW(weights, weight_decay=0.0, **settings)


def torchs(weights: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(weights, weight_decay=0.0)


KINDS: dict[str, WeightsAndOptimizer] = {
    "torch.optim.AdamW": (torch.float32, torchs),
    "float32": (torch.float32, ours(states="float32")),
    "bfloat16": (torch.float32, ours(states="bfloat16")),
    "int8": (torch.float32, ours(states="int8")),
    "fp8": (torch.float32, ours(states="fp8")),
    "weights in bfloat16, torch.optim.AdamW": (torch.bfloat16, torchs),
    "weights in bfloat16, float32": (
        torch.bfloat16,
        ours(states="float32", rounding="stochastic"),
    ),
    "weights in bfloat16, int8": (torch.bfloat16, ours(states="int8", rounding="stochastic")),
}


class Model(nn.Module):
    """One block of a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 5 * WIDTH), nn.Linear(5 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight
        parts = self.qkv(self.before_attention(x)).unflatten(-1, (3, 4, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        logits: Tensor = self.head(x + self.down(F.gelu(self.up(self.before_mlp(x)))))
        return logits


def batch(generator: torch.Generator) -> Tensor:
    """Rows whose next token follows from the two before it, but for one in ten, which is any."""
    table = torch.randint(VOCABULARY, (VOCABULARY, 4), generator=torch.Generator().manual_seed(9))
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    follows = torch.rand(ids.shape, generator=generator) < 0.9
    for t in range(2, LENGTH + 1):
        next_ids = table[ids[:, t - 1], ids[:, t - 2] % 4]
        ids[:, t] = torch.where(follows[:, t], next_ids, ids[:, t])
    return ids


def final_loss(kind: WeightsAndOptimizer, seed: int, lr: float) -> float:
    """Train, and return the mean loss of the last steps."""
    dtype, make = kind
    torch.manual_seed(seed)
    model = Model().to(dtype)
    optimizer = make(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(STEPS):
        ids = batch(generator)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        done = step / STEPS
        factor = min(1, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * done))
        optimizer.param_groups[0]["lr"] = lr * factor
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-LAST:]) / LAST


def print_losses(lr: float) -> None:
    print(f"| states | {' | '.join(f'seed {s}' for s in range(SEEDS))} | mean | std | to float32 |")
    print("|---" * (SEEDS + 4) + "|")
    known = torch.tensor([0.0])
    for name, kind in KINDS.items():
        found = torch.tensor([final_loss(kind, seed, lr) for seed in range(SEEDS)])
        known = found if name == "torch.optim.AdamW" else known
        apart = found - known
        seeds = " | ".join(f"{loss:.4f}" for loss in found.tolist())
        spread = f"{apart.mean():+.4f} ± {apart.std() / SEEDS**0.5:.4f}"
        print(
            f"| {name} | {seeds} | {found.mean():.4f} | {found.std():.4f} | {spread} |", flush=True
        )


BLOCK = 256
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Stored = Callable[[Tensor], Tensor]


def by_blocks(code: Stored, largest: float = 1.0) -> Stored:
    def stored(x: Tensor) -> Tensor:
        blocks = x.view(-1, BLOCK)
        scale = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-38) / largest
        return (code(blocks / scale) * scale).view(x.shape)

    return stored


def of_table(table: tables.Table, *, above_zero: bool = True) -> Stored:
    """Round to the nearest number; if `above_zero`, what is above 0 stays above 0."""
    numbers = table.numbers.sort().values
    bounds = (numbers[1:] + numbers[:-1]) / 2
    if above_zero and not table.first_code:
        bounds[0] = 0.0
    return by_blocks(lambda x: numbers[torch.bucketize(x, bounds)])


def as_ours(states: Format) -> tuple[Stored, Stored]:
    """Store moments as our optimizer does."""
    keys = itertools.count()

    def stored(state: State) -> Stored:
        def of(x: Tensor) -> Tensor:
            tensors = {
                key: torch.zeros(shape, dtype=dtype)
                for key, (shape, dtype) in layout(state, states, x.shape).items()
            }
            place = Place(first_row=0, key=key_of(next(keys)))
            write(state, x.clone(), tensors, states, place)
            return read(state, tensors, states)

        return of

    average, square = AdamW.kept
    return stored(average), stored(square)


def linear(least: float) -> Stored:
    def code(x: Tensor) -> Tensor:
        rounded = (x * 255).round() / 255 if least else (x * 127).round() / 127
        return torch.where((x > 0) & (rounded == 0), least, rounded) if least else rounded

    return by_blocks(code)


def fp8(dtype: torch.dtype, least: float = 0.0) -> Stored:
    def code(x: Tensor) -> Tensor:
        rounded = x.to(dtype).float()
        return torch.where((x > 0) & (rounded == 0), least, rounded)

    return by_blocks(code, torch.finfo(dtype).max)


def root(stored: Stored) -> Stored:
    return lambda x: stored(x.sqrt()).square()


FORMATS: dict[str, tuple[Stored, Stored]] = {
    "bfloat16": (lambda x: x.bfloat16().float(),) * 2,
    "bfloat16, stochastic (ours)": as_ours("bfloat16"),
    "int8 linear, never to 0": (linear(0), linear(1 / 255)),
    "int8 dynamic": (of_table(tables.SIGNED), of_table(tables.UNSIGNED, above_zero=False)),
    "int8 dynamic, never to 0": (of_table(tables.SIGNED), of_table(tables.UNSIGNED)),
    "int8 dynamic, root": (of_table(tables.SIGNED), root(of_table(tables.UNSIGNED))),
    "int8 dynamic, root, stochastic (ours)": as_ours("int8"),
    "fp8 e4m3": (fp8(E4M3), fp8(E4M3)),
    "fp8 e4m3, never to 0": (fp8(E4M3), fp8(E4M3, 2.0**-9)),
    "fp8 e4m3 and e5m2, never to 0": (fp8(E4M3), fp8(E5M2, 2.0**-16)),
    "fp8 e4m3, root": (fp8(E4M3), root(fp8(E4M3, 2.0**-9))),
    "fp8 e4m3, root, stochastic (ours)": as_ours("fp8"),
}


def print_updates() -> None:
    spreads = (0.5, 1, 2, 3)
    print(f"| moments | {' | '.join(f'{s}: error, largest, along' for s in spreads)} |")
    print("|---" * (len(spreads) + 1) + "|")
    rows: dict[str, list[str]] = {name: [] for name in FORMATS}
    for spread in spreads:
        for name, numbers in errors(spread).items():
            rows[name].append(", ".join(f"{number:.3g}" for number in numbers))
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells)} |")


def errors(spread: float) -> dict[str, tuple[float, float, float]]:
    """Compare updates with float32's.

    Returns:
        For each format the norm of the error, the largest update, and the length along float32's: each relative to
        float32's.
    """
    torch.manual_seed(0)
    scales = torch.exp(spread * torch.randn(64, 1024))
    keep: tuple[Stored, Stored] = (lambda x: x, lambda x: x)
    moments = {name: [torch.zeros_like(scales)] * 2 for name in ("float32", *FORMATS)}
    for step in range(300):
        gradient = scales * torch.randn(scales.shape) * (1 if step < 150 else 0.3)
        for name, (average, square) in moments.items():
            new = (0.9 * average + 0.1 * gradient, 0.999 * square + 0.001 * gradient.square())
            stored = FORMATS.get(name, keep)
            moments[name] = [stored[0](new[0]), stored[1](new[1])]
            if step == 299:
                moments[name] = [new[0] / (new[1].sqrt() + 1e-12)] * 2
    exact = moments.pop("float32")[0]
    return {
        name: (
            float((update - exact).norm() / exact.norm()),
            float(update.abs().max() / exact.abs().max()),
            float((update * exact).sum() / exact.square().sum()),
        )
        for name, (update, _) in moments.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=["losses", "updates"])
    parser.add_argument("--lr", type=float, default=3e-3)
    torch.set_num_threads(1)
    asked = parser.parse_args()
    if asked.table == "losses":
        print_losses(asked.lr)
    else:
        print_updates()
