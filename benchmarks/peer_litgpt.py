"""Trains the model of `peer_runs.py` through litgpt's own scripts `finetune/lora.py` and `finetune/full.py`.

litgpt comes from a checkout that the environment variable LITGPT names. Its scripts run as they are, but for the
schedule of the learning rate, which is constant here, and the end, which is after the last step. They do not clip
gradients, so that later losses differ from the others' by a little.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

VARIABLE = "LITGPT"


class Seen(Protocol):
    """As `peer_runs.Seen`."""

    losses: list[float]

    def starts(self, step: int) -> None:
        """Begin a step; they are counted from 1."""

    def ends(self, step: int) -> None:
        """End a step, after the update."""


class _AllDone(BaseException):
    """Raised after the last step, in place of a checkpoint and an example."""


def train(
    rows: list[list[int]],
    directory: Path,
    seen: Seen,
    *,
    ranks: dict[str, Any] | None,
    learning_rate: float,
    num_steps: int,
) -> None:
    """Train all rows as one batch.

    Args:
        rows: Token numbers of each row.
        directory: Has the model in `model`, as transformers writes it.
        seen: Notes steps and losses.
        ranks: `r` and `lora_alpha` of LoRA on all linear layers but the head; None: all weights are trained.
        learning_rate: Constant.
        num_steps: Optimizer steps.
    """
    sys.path.insert(0, os.environ[VARIABLE])
    from lightning.fabric import Fabric
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.finetune import full, lora

    base = _converted(directory)
    script = full if ranks is None else lora
    backward = Fabric.backward

    def watched_backward(self: Fabric, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        seen.losses.append(float(tensor.detach()))
        backward(self, tensor, *args, **kwargs)

    class Constant(LambdaLR):
        def step(self, epoch: int | None = None) -> None:
            super().step(epoch)
            if (done := self.last_epoch) > 0:  # the first call is the constructor's
                seen.ends(done)
                if done == num_steps:
                    raise _AllDone

    Fabric.backward = watched_backward  # type: ignore[method-assign]
    script.get_lr_scheduler = lambda optimizer, **_: Constant(optimizer, lambda _: 1.0)
    given: dict[str, Any] = {}
    if ranks is not None:
        places = ("query", "key", "value", "projection", "mlp")
        given = {"lora_r": ranks["r"], "lora_alpha": ranks["lora_alpha"], "lora_dropout": 0.0}
        given |= {f"lora_{place}": True for place in places} | {"lora_head": False}
    optimizer = {
        "class_path": "torch.optim.AdamW",
        "init_args": {"lr": learning_rate, "weight_decay": 0.0},
    }
    try:
        script.setup(
            base,
            out_dir=directory / "of_litgpt",
            precision="32-true",
            data=_data(rows, seen),
            train=TrainArgs(
                save_interval=10**6,
                log_interval=10**6,
                global_batch_size=len(rows),
                micro_batch_size=len(rows),
                lr_warmup_steps=0,
                epochs=10**6,
                max_steps=num_steps,
            ),
            eval=EvalArgs(interval=10**6, max_new_tokens=1, max_iters=1),
            optimizer=optimizer,
            **given,
        )
    except _AllDone:
        return
    raise RuntimeError("litgpt ended before its last step")


def _converted(directory: Path) -> Path:
    """Write the model in litgpt's format."""
    from litgpt.config import Config
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
    from litgpt.utils import copy_config_files, save_config
    from safetensors.torch import load_file
    from transformers import LlamaConfig

    source, target = directory / "model", directory / "of_litgpt_base"
    target.mkdir()
    of_model = LlamaConfig.from_pretrained(source)
    config = Config(
        name="Llama-small",
        hf_config={},
        n_layer=of_model.num_hidden_layers,
        n_embd=of_model.hidden_size,
        n_head=of_model.num_attention_heads,
        n_query_groups=of_model.num_key_value_heads,
        intermediate_size=of_model.intermediate_size,
        block_size=of_model.max_position_embeddings,
        vocab_size=of_model.vocab_size,
        padded_vocab_size=of_model.vocab_size,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=of_model.rms_norm_eps,
        mlp_class_name="LLaMAMLP",
    )
    weights: dict[str, torch.Tensor] = {}
    copy_weights_hf_llama(config, {}, weights, load_file(source / "model.safetensors"))
    torch.save(weights, target / "lit_model.pth")
    save_config(config, target)
    copy_config_files(source, target)
    return target


def _data(rows: list[list[int]], seen: Seen) -> Any:
    """Return a data module of litgpt that begins a step where its training loader makes a batch."""
    from litgpt.data import DataModule

    samples = []
    for row in rows:
        ids = torch.tensor(row)
        counts = {name: torch.tensor([len(row)]) for name in ("raw", "raw_plus_prompt_template")}
        samples.append({"input_ids": ids, "labels": ids, "token_counts": counts})

    def stacked(batch: list[dict[str, Any]]) -> dict[str, Any]:
        names = batch[0]["token_counts"]
        return {
            "input_ids": torch.stack([each["input_ids"] for each in batch]),
            "labels": torch.stack([each["labels"] for each in batch]),
            "token_counts": {n: torch.stack([e["token_counts"][n] for e in batch]) for n in names},
        }

    class RowsAsTheyAre(DataModule):  # type: ignore[misc]  # not installed here
        num_begun = 0

        def connect(self, *_: Any, **__: Any) -> None:
            """Need nothing."""

        def train_dataloader(self) -> DataLoader[Any]:
            """Make one batch of all rows, again and again."""

            def begun(batch: list[dict[str, Any]]) -> dict[str, Any]:
                self.num_begun += 1
                seen.starts(self.num_begun)
                return stacked(batch)

            return DataLoader(samples, batch_size=len(samples), collate_fn=begun)  # type: ignore[arg-type]

        def val_dataloader(self) -> DataLoader[Any]:
            """Make one batch of one row."""
            return DataLoader(samples[:1], batch_size=1, collate_fn=stacked)  # type: ignore[arg-type]

    return RowsAsTheyAre()
