"""Losses and metrics of preference tuning against those of TRL's trainers, step by step."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from harness.language_model import run_values, write_jsonl, write_run_file
from thunder_memsave.finetune.cli import main

NUM_STEPS = 3
LEARNING_RATE = 3e-3
BETA = 0.3
# float32, sums in another order; later steps start from weights that differ in their last digits
FIRST_STEP, LATER_STEPS = 1e-6, 2e-5

TRAINERS = {
    "dpo": (DPOTrainer, DPOConfig),
    "orpo": (ORPOTrainer, ORPOConfig),
    "kto": (KTOTrainer, KTOConfig),
}
NAMES = {
    "loss": "loss",
    "reward_accuracy": "rewards/accuracies",
    "reward_margin": "rewards/margins",
    "chosen_reward": "rewards/chosen",
    "rejected_reward": "rewards/rejected",
    "kl": "kl",
    "nll_loss": "nll_loss",
    "log_odds_ratio": "log_odds_ratio",
}
"""Names of our metrics and of TRL's."""


def by_trl(
    loss: str, rows: list[dict[str, Any]], model: Path, directory: Path
) -> list[dict[str, float]]:
    """Return what TRL logs in steps on all rows at once, with all weights trained."""
    trainer_class, config_class = TRAINERS[loss]
    arguments = config_class(
        output_dir=str(directory),
        use_cpu=True,
        bf16=False,
        beta=BETA,
        max_length=128,
        max_steps=NUM_STEPS,
        per_device_train_batch_size=len(rows),
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        weight_decay=0.0,
        max_grad_norm=1e9,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        gradient_checkpointing=False,
        disable_tqdm=True,
        **({"precompute_ref_log_probs": True} if loss == "dpo" else {}),
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    return [step for step in trainer.state.log_history if "loss" in step]


def by_us(
    loss: str, rows: list[dict[str, Any]], model: Path, directory: Path, *, packing: bool
) -> list[dict[str, float]]:
    """Return our metrics of the same steps, which are made of several micro-batches or of packed rows."""
    path = write_jsonl(directory / "preferences.jsonl", rows)
    values = run_values(
        directory,
        model,
        lora=None,
        data={
            "dataset": {"class_path": "DataFiles", "init_args": {"path": str(path)}},
            "max_seq_length": 96 if packing else 64,
            "packing": packing,
        },
        preference={"loss": loss, "beta": BETA},
        train={"global_batch_size": len(rows), "micro_batch_size": 4, "max_steps": NUM_STEPS},
        optimizer={
            "class_path": "torch.optim.AdamW",
            "init_args": {"lr": LEARNING_RATE, "weight_decay": 0.0},
        },
        lr_scheduler={"name": "constant", "warmup_steps": 0},
    )
    values["train"]["max_grad_norm"] = None
    assert main(["train", str(write_run_file(directory, values))]) == 0
    with (directory / "run" / "metrics.csv").open(encoding="utf-8") as file:
        return [
            {name: float(value) for name, value in row.items() if value}
            for row in csv.DictReader(file)
        ]


@pytest.mark.filterwarnings("ignore")  # TRL's and transformers' own, of their trainers
@pytest.mark.parametrize("loss", ["dpo", "orpo", "kto"])
def test_losses_and_metrics_are_those_of_trl(
    loss: str,
    pair_rows: list[dict[str, Any]],
    labelled_rows: list[dict[str, Any]],
    model_directory: Path,
    tmp_path: Path,
) -> None:
    rows = labelled_rows if loss == "kto" else pair_rows
    expected = by_trl(loss, rows, model_directory, tmp_path / "trl")
    assert len(expected) == NUM_STEPS
    for packing in (False, True):
        directory = tmp_path / f"packing={packing}"
        directory.mkdir()
        ours = by_us(loss, rows, model_directory, directory, packing=packing)
        for number, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
            tolerance = LATER_STEPS if number else FIRST_STEP
            for name, other in NAMES.items():
                assert (name in mine) == (other in theirs), name
                if name in mine:
                    close = pytest.approx(theirs[other], rel=tolerance, abs=tolerance)
                    assert mine[name] == close, (packing, name)
