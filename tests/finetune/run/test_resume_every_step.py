"""A run resumes bit-exactly from whichever step it was stopped after."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from harness.distributed import SOAK_HANG_S
from harness.fabric import on_fabric_rank, run_on_fabric_ranks
from harness.language_model import sample_of
from thunder_memsave import ThunderMemsaveStrategy
from thunder_memsave.callbacks import ModelCheckpoint, TrainingControl
from thunder_memsave.callbacks.checkpoint import read_info
from thunder_memsave.callbacks.verified import load_checkpoint
from thunder_memsave.checkpoints.manifest import read_manifest
from thunder_memsave.finetune.data.batches import Sharding
from thunder_memsave.finetune.data.packing import Rows, pad
from thunder_memsave.finetune.objectives.supervised import SupervisedFineTuning
from thunder_memsave.finetune.run_file.config import EvalConfig, LRSchedulerConfig
from thunder_memsave.finetune.training.loop import LoopPlan, fit
from thunder_memsave.optim import AdamW
from thunder_memsave.optim.by_rows import Rounding
from thunder_memsave.optim.formats import Format

NUM_STEPS, NUM_TOKENS = 20, 32
Optimizer = Literal["AdamW", "SGD", "AdamW_bfloat16", "AdamW_int8", "AdamW_fp8"]
"""The class, and the format of states in fewer bits."""
Precision = Literal["fp32", "bf16", "fp8", "nvfp4"]
Trained = Literal["full", "LoRA"]
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
TRAINED: tuple[Trained, ...] = get_args(Trained)
FP8: dict[Precision, dict[str, Any]] = {
    "fp8": {"backend": "torch", "recipe": "delayed", "amax_history_len": 4},
    "nvfp4": {"backend": "torch", "recipe": "nvfp4"},
}
IN_BFLOAT16 = ("bf16", "nvfp4")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model and its configuration."""

    optimizer: Optimizer
    precision: Precision
    trained: Trained

    def __str__(self) -> str:
        return f"{self.optimizer}-{self.precision}-{self.trained}"


SHORT = (
    Setting(optimizer="AdamW", precision="fp8", trained="LoRA"),
    Setting(optimizer="SGD", precision="bf16", trained="full"),
    Setting(optimizer="SGD", precision="nvfp4", trained="full"),
    Setting(optimizer="AdamW_int8", precision="bf16", trained="full"),
)
ALL = [
    Setting(optimizer=optimizer, precision=precision, trained=trained)
    for optimizer, precision, trained in product(OPTIMIZERS, PRECISIONS, TRAINED)
]


class Model(nn.Module):
    """Predicts the next token, with dropout, in the form that transformers' models have."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_TOKENS, 32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.head = nn.Linear(32, NUM_TOKENS, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, *, input_ids: Tensor, use_cache: bool) -> Any:
        x = self.table(input_ids)
        x = x + self.down(self.dropout(torch.relu(self.up(x))))
        return CausalLMOutput(logits=self.head(self.dropout(x)))


class Driver:
    """Saves after each step, and ends the run on request."""

    def __init__(self) -> None:
        self.checkpoints = ModelCheckpoint(".", every_n_steps=1, keep_last=NUM_STEPS)
        self.stops_after_each_step = False

    def save_into(self, directory: Path) -> None:
        self.checkpoints.directory = directory

    def on_train_batch_end(
        self, *, fabric: Fabric, step: int, state: dict[str, Any], control: TrainingControl
    ) -> None:
        # Other code draws random numbers too: its generators are also part of the checkpoint.
        random.random(), np.random.rand()
        self.checkpoints.on_train_batch_end(fabric=fabric, step=step, state=state)
        if self.stops_after_each_step:
            control.stop("one step was asked for")


def make_model(setting: Setting) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = Model()
    if setting.trained == "LoRA":
        model.requires_grad_(False)
        adapter = LoraConfig(r=16, target_modules=["up", "down"], lora_dropout=0.1)
        model = inject_adapter_in_model(adapter, model)
    return model.to(torch.bfloat16) if setting.precision in IN_BFLOAT16 else model


def make_optimizer(setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if setting.optimizer == "SGD":
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    _, _, states = setting.optimizer.partition("_")
    if not states:
        return torch.optim.AdamW(trained, lr=0.01)
    rounding: Rounding = "stochastic" if setting.precision in IN_BFLOAT16 else "nearest"
    return AdamW(trained, lr=0.01, states=cast(Format, states), rounding=rounding)


def make_rows() -> Rows:
    """Return 11 rows, so that the last global batch of an epoch is padded."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(NUM_TOKENS, (16,), generator=generator).tolist() for _ in range(11)]
    return pad([sample_of(row) for row in ids], length=16, pad_id=0)


def check_steps(setting: Setting, root: Path, steps: Iterable[int], num_ranks: int = 1) -> None:
    """A step from each checkpoint gives the next one, so all steps from it give the last."""
    driver = Driver()
    strategy = ThunderMemsaveStrategy(fp8=FP8.get(setting.precision))
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=num_ranks, callbacks=[driver])
    fabric.launch()
    model = make_model(setting)
    module, optimizer = fabric.setup(model, make_optimizer(setting, model))
    torch.manual_seed(1 + fabric.global_rank)
    state = {"model": module, "optimizer": optimizer, "step": 0}
    whole, parts = root / "whole", root / "parts"
    driver.save_into(whole)
    take_steps(fabric, state)
    assert state["step"] == NUM_STEPS
    driver.stops_after_each_step = True
    driver.save_into(parts)
    for step in steps:
        scramble(state)
        load_checkpoint(fabric, read_info(whole / name(step)), state)
        take_steps(fabric, state)
        assert state["step"] == step + 1
        check_same_files(whole / name(step + 1), parts / name(step + 1))


def take_steps(fabric: Fabric, state: dict[str, Any]) -> None:
    """Take steps of two micro-batches on each rank."""
    sharding = Sharding(
        global_batch_size=4 * fabric.world_size,
        micro_batch_size=2,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
    )
    plan = LoopPlan(
        num_steps=NUM_STEPS,
        sharding=sharding,
        seed=0,
        objective=SupervisedFineTuning(mask="none", length=16),
        max_grad_norm=1.0,
        lr_scheduler=LRSchedulerConfig(),
        eval=EvalConfig(),
    )
    fit(
        fabric,
        state["model"],
        state["optimizer"],
        train_rows=make_rows(),
        validation_rows=None,
        plan=plan,
        state=state,
    )


@torch.no_grad()
def scramble(state: dict[str, Any]) -> None:
    """Clear everything of the steps before that loading must restore."""
    for tensor in state["model"].state_dict().values():
        tensor.fill_(7)
    state["optimizer"].state.clear()
    for group in state["optimizer"].param_groups:
        group["lr"] = 7.0
    state["step"] = 7
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)


def name(step: int) -> str:
    return f"step-{step:08d}"


def check_same_files(first: Path, second: Path) -> None:
    """Compare every byte of the weights, the optimizer's state, the scales, the generators and the rest."""
    expected, found = read_manifest(first).files, read_manifest(second).files
    assert expected.keys() == found.keys()
    # DCP's table of contents contains the time of writing.
    different = [n for n in found if found[n] != expected[n] and n != "state/.metadata"]
    assert not different


@pytest.mark.parametrize("setting", SHORT, ids=str)
def test_a_run_goes_on_bit_by_bit(setting: Setting, tmp_path: Path) -> None:
    check_steps(setting, tmp_path, (1, 10, 19))


@pytest.mark.soak
@pytest.mark.line("resume")
@pytest.mark.parametrize("setting", ALL, ids=str)
def test_a_run_goes_on_bit_by_bit_from_every_step(
    setting: Setting, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    check_steps(setting, tmp_path, range(1, NUM_STEPS))
    record_property("measured", f"{setting}: {NUM_STEPS - 1} of {NUM_STEPS - 1} steps")


@on_fabric_rank
def check_on_ranks(root: Path) -> None:
    for setting in SHORT:
        check_steps(setting, root / str(setting), range(1, NUM_STEPS), num_ranks=2)


@pytest.mark.soak
@pytest.mark.line("resume")
@pytest.mark.timeout(SOAK_HANG_S)
def test_a_run_of_two_ranks_goes_on_bit_by_bit_from_every_step(tmp_path: Path) -> None:
    run_on_fabric_ranks(check_on_ranks, 2, tmp_path, hang_s=SOAK_HANG_S)
