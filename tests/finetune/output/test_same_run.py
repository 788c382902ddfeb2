"""A run resumes only from a checkpoint whose steps mean the same; all differences are listed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from thunder_memsave.callbacks.checkpoint import CheckpointInfo
from thunder_memsave.config import Fp8Config
from thunder_memsave.finetune.output.same_run import check_same_run
from thunder_memsave.finetune.run_file.config import ModelConfig, RunConfig, TrainConfig
from thunder_memsave.finetune.run_file.reading.parse import plain_values
from thunder_memsave.settings.problems import ConfigError

VALUES: dict[str, int | str] = {"seed": 42, "global_batch_size": 8}


def written_by(config: RunConfig, **values: Any) -> CheckpointInfo:
    plain = json.loads(json.dumps(plain_values(config)))
    return CheckpointInfo(path=Path("c"), world_size=1, values=VALUES | values, config=plain)


def message_of(info: CheckpointInfo, config: RunConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        check_same_run(info, VALUES, config)
    assert caught.value.key == "resume"
    return str(caught.value)


def test_all_differences_are_listed_old_to_new() -> None:
    before = RunConfig(lora={"r": 4, "lora_alpha": 8}, model=ModelConfig(dtype="float32"))
    now = RunConfig(lora={"r": 8, "lora_alpha": 16}, fp8=Fp8Config(recipe="current"))
    message = message_of(written_by(before, seed=7), now)
    assert message.startswith("c was written with other settings than this run has, so it cannot")
    rows = [line.split() for line in message.splitlines()]
    for row in (
        ["key", "checkpoint", "this", "run"],
        ["train.seed", "7", "42"],
        ["model.dtype", "float32", "bfloat16"],
        ["lora.r", "4", "8"],
        ["lora.lora_alpha", "8", "16"],
        ["fp8.recipe", "null", "current"],
    ):
        assert row in rows, message
    assert message.endswith("Restore the old values, or start a new run in another output_dir.")


def test_the_columns_of_the_table_stand_below_each_other() -> None:
    before = RunConfig(lora={"r": 4, "lora_alpha": 8})
    message = message_of(written_by(before, seed=7), RunConfig(lora={"r": 8, "lora_alpha": 16}))
    head, *rows = [line for line in message.splitlines() if line.startswith("    ")]
    column = head.index("this run")
    assert len(rows) == 3
    assert all(row[column - 1] == " " and row[column] != " " for row in rows)


def test_a_cause_that_the_value_does_not_tell_is_named() -> None:
    message = message_of(written_by(RunConfig(), global_batch_size=3), RunConfig())
    assert ["train.global_batch_size", "3", "8"] in [line.split() for line in message.splitlines()]
    assert "Leave one of train.micro_batch_size and" in message


def test_of_many_differences_the_first_are_listed() -> None:
    before = RunConfig(model=ModelConfig(config={f"k{n}": 1 for n in range(30)}))
    *_, last, more = [
        line.split() for line in message_of(written_by(before), RunConfig()).splitlines()[:-2]
    ]
    assert (last, more) == (["model.config.k19", "1", "null"], ["...", "and", "10", "more"])


def test_what_means_the_same_is_no_difference() -> None:
    before = RunConfig(lora={"r": 4, "target_modules": ["q", "v"]}, train=TrainConfig(max_steps=1))
    now = RunConfig(
        lora={"r": 4, "target_modules": ["v", "q"], "lora_dropout": 0.0, "bias": "none"},
        train=TrainConfig(max_steps=9, max_grad_norm=None),
        optimizer={"class_path": "AdamW", "init_args": {"lr": 1e-9}},
        output_dir="elsewhere",
    )
    check_same_run(written_by(before), VALUES, now)


def test_a_checkpoint_without_a_run_file_is_compared_by_its_values() -> None:
    info = CheckpointInfo(path=Path("c"), world_size=1, values=dict(VALUES))
    check_same_run(info, VALUES, RunConfig(lora={"r": 4}))
