"""The run file that a run leaves has the defaults of classes, and means what it meant."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch

from harness.language_model import run_values, write_run_file
from thunder_memsave.finetune.model.adapters import check_adapter
from thunder_memsave.finetune.output.defaults_written import with_defaults
from thunder_memsave.finetune.run_file.classes.class_kinds import DATASET, OPTIMIZER, check_class
from thunder_memsave.finetune.run_file.config import (
    ClassSpec,
    DataConfig,
    OptimizerSpec,
    RunConfig,
)
from thunder_memsave.finetune.run_file.reading.parse import dump_run_config, load_run_config
from thunder_memsave.finetune.run_file.shipped import shipped_configs
from thunder_memsave.finetune.training.optimizer import make_optimizer


def test_defaults_of_optimizer_dataset_and_lora_are_written(tmp_path: Path) -> None:
    values = run_values(tmp_path, tmp_path)
    config = with_defaults(load_run_config(write_run_file(tmp_path, values)))
    (group,) = torch.optim.AdamW([torch.zeros(1)]).param_groups
    given = config.optimizer["init_args"]
    assert given["betas"] == list(group["betas"])
    assert given["eps"] == group["eps"]
    assert given["lr"] == values["optimizer"]["init_args"]["lr"]
    assert not {"fused", "capturable"} & set(given)  # a run that gives none has the fused kernel
    assert config.lora is not None
    assert config.lora["r"] == values["lora"]["r"]
    assert config.lora["use_rslora"] is peft.LoraConfig().use_rslora
    assert config.data.dataset["init_args"]["val_fraction"] == 0.25


def test_a_run_that_trains_everything_has_no_lora() -> None:
    dataset = ClassSpec(class_path="ChatJSONL", init_args={"path": "a.jsonl"})
    assert with_defaults(RunConfig(data=DataConfig(dataset=dataset))).lora is None


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_an_optimizer_with_states_in_fewer_bits_takes_what_is_written(name: str) -> None:
    spec = OptimizerSpec(class_path=f"torch.optim.{name}", init_args={"lr": 0.1}, states="int8")
    dataset = ClassSpec(class_path="ChatJSONL", init_args={"path": "a.jsonl"})
    config = with_defaults(RunConfig(optimizer=spec, data=DataConfig(dataset=dataset)))
    assert len(config.optimizer["init_args"]) > 1
    weights = [torch.nn.Parameter(torch.zeros(4))]
    assert make_optimizer(config, weights, device_type="cpu").param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("path", shipped_configs().values(), ids=shipped_configs())
def test_the_file_is_read_as_it_was_written(path: Path, tmp_path: Path) -> None:
    before = with_defaults(load_run_config(path))
    (tmp_path / "config.yaml").write_text(dump_run_config(before))
    after = load_run_config(tmp_path / "config.yaml")
    assert after == before
    assert with_defaults(after) == before
    check_adapter(after)
    check_class(after.optimizer, OPTIMIZER, where="optimizer")
    check_class(after.data.dataset, DATASET, where="data.dataset")
