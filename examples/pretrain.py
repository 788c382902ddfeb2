"""Pre-trains a small Llama on bytes, in a hand-written loop with this package's callbacks and checkpoints.

python examples/pretrain.py
torchrun --nproc-per-node 2 examples/pretrain.py --num-steps 200 --output-dir runs/pretrain
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from thunder_memsave.callbacks import (
    LearningRateMonitor,
    MetricsCSV,
    ModelCheckpoint,
    ProgressBar,
    ThroughputMonitor,
)

CONFIG = LlamaConfig(
    vocab_size=256,  # bytes
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=2,
    num_attention_heads=4,
    tie_word_embeddings=True,
    use_cache=False,
)
LENGTH, BATCH_SIZE = 64, 8


def main() -> None:
    """Train on this very file and print the last loss."""
    arguments = parse_arguments()
    text = torch.tensor(list(Path(__file__).read_bytes()))
    fabric = build_fabric(arguments.output_dir)
    fabric.launch()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    generator = torch.Generator().manual_seed(fabric.global_rank)  # other rows on every rank

    fabric.call("on_train_start", fabric=fabric, step=0, num_steps=arguments.num_steps, state=state)
    for step in range(1, arguments.num_steps + 1):
        fabric.call("on_train_batch_start", fabric=fabric, step=step)
        ids = sample(text, generator).to(fabric.device)
        loss = model(input_ids=ids, labels=ids).loss  # within the model, it is a part of its plan
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step
        fabric.call(
            "on_train_batch_end",
            fabric=fabric,
            step=step,
            num_steps=arguments.num_steps,
            metrics={
                "loss": float(loss.detach()),
                "num_tokens": BATCH_SIZE * LENGTH * fabric.world_size,
            },
            state=state,
            optimizer=optimizer,
        )
    fabric.call("on_train_end", fabric=fabric, step=arguments.num_steps, state=state)
    fabric.print(f"last loss {loss.item():.4f}; everything is in {arguments.output_dir}")


def build_fabric(output_dir: Path) -> Fabric:
    """Make Fabric on the processes that torchrun started, else on one."""
    return Fabric(
        strategy="thunder_memsave",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        callbacks=[
            ThroughputMonitor(),
            LearningRateMonitor(),
            MetricsCSV(output_dir / "metrics.csv"),
            ProgressBar(),
            ModelCheckpoint(output_dir / "checkpoints"),
        ],
    )


def sample(text: Tensor, generator: torch.Generator) -> Tensor:
    """Draw rows of bytes from the text, each one byte longer than the model sees."""
    starts = torch.randint(len(text) - LENGTH, (BATCH_SIZE,), generator=generator)
    return torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-steps", type=int, default=100)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/pretrain"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
