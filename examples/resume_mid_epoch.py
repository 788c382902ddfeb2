"""Resumes in the middle of an epoch, bit-exactly, with data loader workers and random data augmentation.

python examples/resume_mid_epoch.py --output-dir runs/whole
python examples/resume_mid_epoch.py --output-dir runs/parts --stop-after 5
python examples/resume_mid_epoch.py --output-dir runs/parts
torchrun --nproc-per-node 2 examples/resume_mid_epoch.py
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Sampler

from thunder_memsave.callbacks import ModelCheckpoint
from thunder_memsave.callbacks.verified import load_checkpoint, newest_valid

NUM_ROWS, GLOBAL_BATCH_SIZE, NUM_STEPS = 40, 8, 12
Place = tuple[int, int]
"""An epoch and a row."""


class NoisyRows(Dataset[tuple[Tensor, Tensor]]):
    """Rows with noise that depends on epoch and row alone, not on the worker or on what it drew before."""

    def __getitem__(self, place: Place) -> tuple[Tensor, Tensor]:
        """Draw the row's numbers anew in each epoch."""
        epoch, row = place
        inputs = torch.randn(16, generator=torch.Generator().manual_seed(row))
        noise = torch.randn(16, generator=torch.Generator().manual_seed(NUM_ROWS * epoch + row))
        return inputs + 0.1 * noise, inputs[:4].argmax()


class ResumableBatches(Sampler[list[Place]]):
    """This rank's part of each global batch, from a position that counts the trained batches.

    Workers fetch more batches than the loop has trained on, so the loop calls `advance`.
    """

    def __init__(self, *, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.epoch, self.batch = 0, 0

    def __iter__(self) -> Iterator[list[Place]]:
        """Yield the rest of the epoch."""
        epoch, generator = self.epoch, torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(NUM_ROWS, generator=generator).tolist()
        for batch in range(self.batch, NUM_ROWS // GLOBAL_BATCH_SIZE):
            rows = order[batch * GLOBAL_BATCH_SIZE :][:GLOBAL_BATCH_SIZE]
            yield [(epoch, row) for row in rows[self.rank :: self.world_size]]

    def advance(self) -> None:
        """Note that a batch was trained on."""
        self.batch += 1
        if self.batch == NUM_ROWS // GLOBAL_BATCH_SIZE:
            self.epoch, self.batch = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return the position, which is valid for any number of ranks."""
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restore the position."""
        self.epoch, self.batch = state_dict["epoch"], state_dict["batch"]


def main(arguments: Sequence[str] | None = None) -> str:
    """Train to the end, or stop early as if killed, and return a hash of the weights."""
    options = parse(arguments)
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    fabric = Fabric(strategy="thunder_memsave", accelerator="auto", devices=devices)
    fabric.launch()
    batches = ResumableBatches(rank=fabric.global_rank, world_size=fabric.world_size)
    state = make_state(fabric, batches)
    checkpoints = ModelCheckpoint(options.output_dir, every_n_steps=1)
    newest = newest_valid(fabric, options.output_dir)
    if newest is not None:
        load_checkpoint(fabric, newest, state, is_verified=True)
    checkpoints.on_train_start(fabric=fabric, step=state["step"])
    train(fabric, state, batches, checkpoints, num_steps=options.stop_after)
    weights = fabric.strategy.get_module_state_dict(state["model"])
    content = b"".join(weight.numpy().tobytes() for weight in weights.values())
    fabric.print(f"step {state['step']}, weights {hashlib.sha256(content).hexdigest()[:16]}")
    return hashlib.sha256(content).hexdigest()


def make_state(fabric: Fabric, batches: ResumableBatches) -> dict[str, Any]:
    """Return everything that a checkpoint holds besides the random states."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    torch.manual_seed(1 + fabric.global_rank)  # dropout differs from rank to rank
    return {"model": model, "optimizer": optimizer, "batches": batches, "step": 0}


def train(
    fabric: Fabric,
    state: dict[str, Any],
    batches: ResumableBatches,
    checkpoints: ModelCheckpoint,
    *,
    num_steps: int,
) -> None:
    """Take the remaining steps."""
    # A generator of its own: a new iterator must not draw from the one that dropout uses.
    own = torch.Generator().manual_seed(fabric.global_rank)
    loader = DataLoader(NoisyRows(), batch_sampler=batches, num_workers=2, generator=own)
    while state["step"] < num_steps:
        for inputs, targets in loader:
            logits = state["model"](inputs.to(fabric.device))
            fabric.backward(cross_entropy(logits, targets.to(fabric.device)))
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            batches.advance()
            state["step"] += 1
            checkpoints.on_train_batch_end(fabric=fabric, step=state["step"], state=state)
            if state["step"] == num_steps:
                break
    checkpoints.on_train_end(fabric=fabric, step=state["step"], state=state)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/resume_mid_epoch"))
    parser.add_argument("--stop-after", type=int, default=NUM_STEPS, help="steps")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
