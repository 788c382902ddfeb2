from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from thunder_memsave.finetune.config import RunConfig
from thunder_memsave.finetune.parse import dump_run_config, load_run_config
from thunder_memsave.settings import ConfigError

GOOD = """\
model: {name_or_path: some/model}
data: {dataset: {class_path: PromptJSONL, init_args: {path: rows.jsonl}}}
output_dir: runs/x
"""


def load(directory: Path, text: str, *overrides: str) -> RunConfig:
    path = directory / "run.yaml"
    path.write_text(text)
    return load_run_config(path, overrides)


def test_keys_left_out_have_their_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD)
    assert config.lora is None
    assert config.train.global_batch_size == 16
    assert config.optimizer["class_path"] == "torch.optim.AdamW"


def test_a_number_with_an_exponent_is_a_number_everywhere(tmp_path: Path) -> None:
    text = GOOD + "optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 1e-4}}\n"
    config = load(tmp_path, text, "--train.max_grad_norm=5e-1", "--lora.lora_dropout=1e-1")
    assert config.optimizer["init_args"]["lr"] == 1e-4
    assert config.train.max_grad_norm == 0.5
    assert config.lora == {"lora_dropout": 0.1}


def test_overrides_replace_keys_of_the_file_and_add_new_ones(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD, "--train.max_steps=7", "lora.r=8", "--model.dtype=float32")
    assert config.train.max_steps == 7
    assert config.lora == {"r": 8}
    assert config.model.dtype == "float32"


def test_arguments_without_a_class_go_to_the_default_optimizer(tmp_path: Path) -> None:
    optimizer = load(tmp_path, GOOD, "--optimizer.init_args.lr=0.5").optimizer
    assert optimizer == {
        "class_path": "torch.optim.AdamW",
        "init_args": {"lr": 0.5, "weight_decay": 0.0},
    }


def test_another_optimizer_gets_no_arguments_of_the_default_one(tmp_path: Path) -> None:
    optimizer = load(tmp_path, GOOD, "--optimizer.class_path=torch.optim.SGD").optimizer
    assert optimizer == {"class_path": "torch.optim.SGD"}


def test_a_dumped_configuration_loads_as_itself(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD, "--lora.r=8", "--lr_scheduler.warmup_steps=5")
    assert load(tmp_path, dump_run_config(config)) == config


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (
            GOOD + "train: {micro_batchsize: 1}",
            [],
            "no key 'micro_batchsize'; did you mean 'micro_batch_size'",
        ),
        (GOOD + "trian: {}", [], "the run file has no key 'trian'; did you mean 'train'"),
        (GOOD, ["--train.max_step=3"], "no key 'max_step'; did you mean 'max_steps'"),
        (GOOD + "output_dir: b", [], "'output_dir' is given twice, on lines 3 and 4"),
        (GOOD + "train: 3", [], "train is 3, but must be a mapping"),
        (GOOD + "train: {global_batch_size: null}", [], "train.global_batch_size is null"),
        (
            GOOD + "train: {global_batch_size: many}",
            [],
            "train.global_batch_size is 'many', but must be a whole number.",
        ),
        (
            GOOD + "train: {max_steps: 1.5}",
            [],
            "train.max_steps is 1.5, but must be a whole number or null.",
        ),
        (
            GOOD + "train: {micro_batch_size: 0}",
            [],
            "micro_batch_size is 0, but must be at least 1",
        ),
        (
            GOOD + "train: {global_batch_size: 3, micro_batch_size: 2}",
            [],
            "make it a multiple of 2",
        ),
        (GOOD + "train: {max_grad_norm: 0}", [], "write null for no clipping"),
        (GOOD + "train: {max_steps: 0}", [], "train.max_steps is 0"),
        (GOOD, ["--data.max_seq_length=1"], "max_seq_length is 1, but must be at least 2"),
        (
            GOOD,
            ["--model.dtype=float64"],
            "model.dtype is 'float64', but must be 'float32' or 'bfloat16'.",
        ),
        (
            GOOD,
            ["--model.dtype=float32", "--model.trainable_dtype=bfloat16"],
            "cannot be less precise",
        ),
        (GOOD, ["--lr_scheduler.warmup_steps=-1"], "must not be negative"),
        (GOOD, ["--lr_scheduler.warmup_steps=2.5"], "a whole number of steps or a fraction"),
        (GOOD, ["--lr_scheduler.min_lr_ratio=2"], "must be from 0 to 1"),
        (GOOD, ["--lr_scheduler.warmup_steps=a"], "'a', but must be a whole number or a number."),
        (GOOD, ["--lora=3"], "lora is 3, but must be a mapping or null."),
        (GOOD, ["--optimizer=3"], "optimizer is 3, but must be a mapping with class_path"),
        (GOOD, ["--optimizer=null"], "optimizer is None, but must be a mapping with class_path"),
        (GOOD, ["--optimizer.lr=3"], "optimizer has no key 'lr'"),
        (GOOD, ["--optimizer.class_path=3"], "class_path is 3, but must be the name of a class"),
        (GOOD, ["--optimizer.init_args=3"], "optimizer.init_args is 3, but must be a mapping"),
        (GOOD, ["--resume=true"], "resume is true; write 'auto'"),
        (GOOD, ["--strategy.sharding=zero9"], "'zero9', but must be one of"),
        (GOOD, ["--strategy.shardin=zero2"], "did you mean 'sharding'"),
        (GOOD, ["--memory.budget=4GiB"], "memory has no keys yet in this version"),
        (GOOD, ["--fp8={}"], "fp8 has no keys yet in this version"),
        (GOOD, ["--train"], "'--train' is not an override; write --key=value"),
        (GOOD, ["--train.max_steps=["], "the value of --train.max_steps is not YAML"),
        ("output_dir: a", [], "model.name_or_path is missing"),
        (GOOD.replace("class_path: PromptJSONL, ", ""), [], "class_path"),
        ("- 1", [], "must be a mapping"),
        ("a: [", [], "cannot read the configuration"),
    ],
)
def test_a_mistake_is_named_with_what_to_write(
    tmp_path: Path, text: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text, *overrides)
    assert message in str(error.value)


def test_several_mistakes_are_listed_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, GOOD + "train: {max_step: 1}\neval: {every: 2}")
    assert "max_step" in str(error.value)
    assert "'eval' has no key 'every'" in str(error.value)


def test_a_batch_must_divide_over_the_processes_of_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"times the number of processes \(3\)"):
        load(tmp_path, GOOD)


@pytest.mark.parametrize("name", ["LT_DEVICES", "LT_STRATEGY"])
def test_variables_that_would_replace_settings_of_fabric_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "2")
    with pytest.raises(ConfigError, match=f"{name}=2 contradicts this command"):
        load(tmp_path, GOOD)


def test_a_launch_by_fabric_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_CLI_USED", "1")
    with pytest.raises(ConfigError, match="launch it with torchrun"):
        load(tmp_path, GOOD)


def test_every_shipped_configuration_is_valid_and_says_how_to_launch_it() -> None:
    files = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
    assert files
    for path in files:
        load_run_config(path, ["--train.global_batch_size=16"])
        assert "thunder-memsave train" in path.read_text().split("model:")[0]
        assert yaml.safe_load(path.read_text())["output_dir"].startswith("runs/")
