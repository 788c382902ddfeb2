"""The configurations that are shipped can be used as they are, and every key in them does something."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

import peft
import pytest
import torch
from transformers import AutoTokenizer

from harness.language_model import llama_config
from thunder_memsave.configs import tiny
from thunder_memsave.finetune import data
from thunder_memsave.finetune.model.build import build_model, describe_model
from thunder_memsave.finetune.run.train import train
from thunder_memsave.finetune.run_file.config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LRSchedulerConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
)
from thunder_memsave.finetune.run_file.reading.parse import load_run_config
from thunder_memsave.settings.yaml_file import load_yaml

DIRECTORY = Path(str(files("thunder_memsave.configs")))
CONFIGS = sorted(DIRECTORY.glob("*.yaml"))
LARGE = [path for path in CONFIGS if path.stem.startswith(("llama3", "qwen3"))]

# Elements in the safetensors files on the hub; a tied output layer counts once.
PUBLISHED_SIZES = {
    "llama3_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_8b": 8_190_735_360,
    "qwen3_32b": 32_762_123_264,
}

SECTIONS = (
    RunConfig,
    ModelConfig,
    DataConfig,
    TrainConfig,
    LRSchedulerConfig,
    EvalConfig,
    CheckpointConfig,
)

# What copies or checks the settings as a whole does not use them.
NOT_A_USE = ("parse", "schema", "checks", "problems", "report", "cli")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfigWithUnreadKey(RunConfig):
    no_code_reads_this: int = 0


def by_name(path: Path) -> str:
    return path.stem


def run_file(path: Path, *overrides: str) -> RunConfig:
    return load_run_config(path, list(overrides))


def keys_set(values: Mapping[str, Any], section: Any = RunConfig) -> Iterator[str]:
    """Name the fields that a run file gives, as `TrainConfig.epochs`."""
    hints = get_type_hints(section)
    for key, value in values.items():
        if hints[key] in SECTIONS:
            yield from keys_set(value, hints[key])
        else:
            yield f"{section.__name__}.{key}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyRuns:
    """Both tiny files, run one after the other in an empty directory, two steps each."""

    directory: Path
    reads: Mapping[str, set[str]]
    """What the code read of the run file, with an adapter and without."""


@pytest.fixture(scope="module")
def tiny_runs(tmp_path_factory: pytest.TempPathFactory) -> TinyRuns:
    directory = tmp_path_factory.mktemp("empty")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(directory)
        tiny.main()
        reads = {"full": recorded_run("tiny_pretrain"), "lora": recorded_run("tiny_lora")}
    return TinyRuns(directory=directory, reads=reads)


def recorded_run(name: str) -> set[str]:
    short = (
        *("--train.max_steps=2", "--lr_scheduler.warmup_steps=1", "--eval.max_batches=1"),
        "--eval.answers=1",  # so that it reads max_new_tokens, too
    )
    config = run_file(DIRECTORY / f"{name}.yaml", *short, "--devices=1")
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    with pytest.MonkeyPatch.context() as monkeypatch:
        read = record_reads(monkeypatch)
        train(RunConfigWithUnreadKey(**given))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return read


def record_reads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    read: set[str] = set()
    for section in (*SECTIONS, RunConfigWithUnreadKey):
        monkeypatch.setattr(section, "__getattribute__", recorder(read), raising=False)
    return read


def recorder(read: set[str]) -> Any:
    def get(self: Any, name: str) -> Any:
        module = sys._getframe(1).f_globals.get("__name__", "")
        ours, _, last = module.rpartition(".")
        used = ours.startswith("thunder_memsave") and last not in NOT_A_USE
        if used and name in type(self).__dataclass_fields__:
            section = RunConfig if isinstance(self, RunConfig) else type(self)
            read.add(f"{section.__name__}.{name}")
        return object.__getattribute__(self, name)

    return get


def kind_of(path: Path) -> str:
    return "full" if load_yaml(path).get("lora") is None else "lora"


@pytest.mark.parametrize("path", CONFIGS, ids=by_name)
def test_every_key_of_a_shipped_file_is_read_in_a_run(path: Path, tiny_runs: TinyRuns) -> None:
    unread = set(keys_set(load_yaml(path))) - tiny_runs.reads[kind_of(path)]
    assert not unread, f"{path.name} sets what no code reads: {sorted(unread)}"


def test_a_key_that_no_code_reads_would_be_noticed(tiny_runs: TinyRuns) -> None:
    values = {"no_code_reads_this": 1, "train": {"epochs": 1}}
    unread = set(keys_set(values, RunConfigWithUnreadKey)) - tiny_runs.reads["lora"]
    assert "RunConfigWithUnreadKey.no_code_reads_this" in unread
    assert "RunConfig.no_code_reads_this" not in tiny_runs.reads["lora"]
    assert "TrainConfig.epochs" not in unread


@pytest.mark.parametrize("path", CONFIGS, ids=by_name)
def test_the_free_sections_hold_only_what_their_constructors_take(path: Path) -> None:
    config = run_file(path)
    optimizer = getattr(torch.optim, config.optimizer["class_path"].removeprefix("torch.optim."))
    assert set(config.optimizer["init_args"]) <= set(inspect.signature(optimizer).parameters)
    dataset = getattr(data, config.data.dataset["class_path"])
    assert set(config.data.dataset["init_args"]) <= set(inspect.signature(dataset).parameters)
    assert set(config.lora or {}) <= {field.name for field in dataclasses.fields(peft.LoraConfig)}


@pytest.mark.parametrize("path", CONFIGS, ids=by_name)
def test_a_shipped_file_passes_the_checks_on_one_process_and_on_eight(path: Path) -> None:
    for devices in (1, 8):
        if path.stem.startswith(("demo", "tiny")) and devices == 8:
            continue  # for two processes at most
        config = run_file(path, f"--devices={devices}")
        assert config.output_dir.startswith("runs/")


@pytest.mark.parametrize("path", CONFIGS, ids=by_name)
def test_a_header_says_what_the_file_does_and_how_to_launch_it(path: Path) -> None:
    header = path.read_text().split("\nmodel:")[0]
    first = header.splitlines()[0]
    assert re.fullmatch(r"# \S.*\.", first)
    assert len(first) < 100
    assert "Memory" in header
    assert "--devices=" in header
    assert "torchrun --standalone --nproc-per-node" in header
    assert "torchrun --nnodes 2" in header
    named = re.findall(r"thunder-memsave (?:train|validate) (\S+)", header)
    assert {name for name in named if name.startswith(path.stem.split("_")[0])} >= {path.stem}


@pytest.mark.parametrize("path", LARGE, ids=by_name)
def test_the_architecture_has_as_many_weights_as_the_published_model(path: Path) -> None:
    config = dataclasses.replace(run_file(path), lora=None)
    num = sum(p.numel() for p in describe_model(config).parameters())
    assert num == PUBLISHED_SIZES[re.sub(r"_(full|dpo|q?lora)(_fp8|_\d+k)?$", "", path.stem)]


@pytest.mark.parametrize("path", LARGE, ids=by_name)
def test_lora_finds_its_targets_in_a_model_of_that_type(path: Path, tmp_path: Path) -> None:
    model_type = "llama" if path.stem.startswith("llama3") else "qwen3"
    tiny.write_tokenizer(tmp_path)
    config = run_file(path, f"--model.name_or_path={tmp_path}")
    shape = {**llama_config(), "model_type": model_type, "head_dim": 8}
    model_config = dataclasses.replace(config.model, config=shape)
    sizes = dataclasses.replace(config.data, max_seq_length=64)
    config = dataclasses.replace(config, model=model_config, data=sizes)
    model = build_model(config, AutoTokenizer.from_pretrained(tmp_path))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    layers = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    if config.lora is None:
        assert trained == {name for name, _ in model.named_parameters()}
    else:
        found = {name.split(".lora_")[0].rsplit(".")[-1] for name in trained}
        assert found == layers


def test_the_tiny_files_run_one_after_the_other_in_an_empty_directory(tiny_runs: TinyRuns) -> None:
    runs = tiny_runs.directory / "runs"
    assert (runs / "tiny_pretrain/model/model.safetensors").is_file()
    assert (runs / "tiny_lora/adapter/adapter_model.safetensors").is_file()


def test_the_texts_and_questions_of_tiny_are_the_same_on_every_machine(tmp_path: Path) -> None:
    tiny.main(tmp_path / "a")
    tiny.main(tmp_path / "b")
    for name in ("texts.jsonl", "questions.jsonl", "tokenizer/tokenizer.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_tokenizer_of_tiny_has_as_many_tokens_as_the_model(tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path)
    shape = load_yaml(DIRECTORY / "tiny_pretrain.yaml")["model"]["config"]
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == shape["vocab_size"]
