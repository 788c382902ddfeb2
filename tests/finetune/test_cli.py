from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.language_model import run_values, write_jsonl, write_run_file
from thunder_memsave.finetune.cli import main


def test_without_arguments_the_usage_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.count("thunder-memsave train CONFIG") >= 2


def test_the_help_of_train_explains_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--train.micro_batch_size" in text
    assert "the rest is gradient accumulation" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "no command 'trian'; did you mean 'train'"),
        (["train"], "train needs a run file"),
        (["train", "--train.max_steps=3"], "train needs a run file"),
        (["train", "missing.yaml"], "cannot read the configuration missing.yaml"),
    ],
)
def test_a_mistake_in_the_arguments_gives_one_message_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.max_step=3"], "did you mean 'max_steps'"),
        (["model.name_or_path=nowhere"], "'nowhere', which is not a directory"),
        (["model.name_or_path=."], "cannot load a tokenizer from ."),
        (["model.config={model_type: lama}"], "'lama', which transformers does not know; did you"),
        (["model.config={model_type: llama, hiden_size: 8}"], "did you mean 'hidden_size'"),
        (["model.config={model_type: llama, vocab_size: 4}"], "set vocab_size to at least"),
        (["model.config={model_type: llama, hidden_size: a}"], "transformers refuses model.config"),
        (["data.max_seq_length=256"], "but the model has 128 positions"),
        (["data.dataset.class_path=PromtJSONL"], "has no class 'PromtJSONL'; did you mean"),
        (["data.dataset.class_path=no.such.Class"], "No module named 'no'"),
        (["data.dataset.init_args={}"], "data.dataset.init_args needs 'path' for PromptJSONL"),
        (["data.dataset.init_args.pth=x"], "has no key 'pth'; did you mean 'path'"),
        (["data.dataset.init_args.val_fraction=2"], "must be at least 0 and below 1"),
        (["data.dataset.init_args.val_fraction=a"], "PromptJSONL refuses its arguments"),
        (["data.dataset.init_args.path=none.jsonl"], "cannot read the data file none.jsonl"),
        (["data.dataset.class_path=TextJSONL"], "there is no 'text'"),
        (["optimizer.class_path=torch.optim.AdamX"], "has no class 'AdamX'; did you mean 'Adam"),
        (["optimizer.init_args.learning_rate=1"], "has no key 'learning_rate'"),
        (["lora.rank=4"], "lora has no key 'rank'"),
        (["lora.r=0"], "peft refuses the section 'lora'"),
        (["lora.target_modules=[nothing]"], "peft refuses the section 'lora'"),
        (["resume=nowhere"], "resume is 'nowhere', which is not a checkpoint"),
        (["resume=."], ". is not a checkpoint: its checkpoint.json cannot be read"),
        (["output_dir=/proc/self/run"], "cannot write to output_dir /proc/self/run"),
        (["output_dir=/proc/self/status"], "output_dir /proc/self/status is a file"),
    ],
)
def test_a_mistake_in_the_run_leaves_no_output_directory(
    overrides: list[str],
    message: str,
    tmp_path: Path,
    model_directory: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_run_file(tmp_path, run_values(tmp_path, model_directory))
    assert main(["train", str(path), *(f"--{override}" for override in overrides)]) == 2
    captured = capsys.readouterr().err
    assert captured.startswith("error: ")
    assert message in " ".join(captured.split())
    assert "Traceback" not in captured
    assert not (tmp_path / "run").exists()


def test_train_on_assistant_needs_data_with_an_assistant(
    tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_jsonl(tmp_path / "text.jsonl", [{"text": "red green"}])
    dataset: dict[str, Any] = {"class_path": "TextJSONL", "init_args": {"path": str(rows)}}
    data = {"dataset": dataset, "train_on": "assistant"}
    path = write_run_file(tmp_path, run_values(tmp_path, model_directory, data=data))
    assert main(["train", str(path)]) == 2
    assert "rows of TextJSONL do not tell apart" in capsys.readouterr().err


def test_packing_is_refused_for_a_sliding_window_that_it_would_widen(
    tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "model_type": "mistral",
        "sliding_window": 8,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
    }
    values = run_values(tmp_path, model_directory, model={"config": config}, data={"packing": True})
    assert main(["train", str(write_run_file(tmp_path, values))]) == 2
    assert "the model's sliding window of 8 tokens" in capsys.readouterr().err


def test_weights_that_cannot_be_read_are_refused_before_anything_is_written(
    tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = shutil.copytree(model_directory, tmp_path / "broken")
    content = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(content[:100])  # a download that broke off
    path = write_run_file(tmp_path, run_values(tmp_path, broken))
    assert main(["train", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: cannot make a causal language model of type 'llama' from ")
    assert "invalid header" in error
    assert not (tmp_path / "run").exists()


def test_a_directory_with_files_in_it_is_refused_and_kept(
    tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run_file(tmp_path, run_values(tmp_path, model_directory))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious.txt").write_text("mine")
    assert main(["train", str(path)]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["precious.txt"]


def test_files_that_are_no_run_are_not_mixed_with_one_that_resumes(
    tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run_file(tmp_path, run_values(tmp_path, model_directory))
    elsewhere = tmp_path / "other" / "checkpoints" / "step-00000001"
    write_checkpoint_info(elsewhere, world_size=1, values={"step": 1})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious.txt").write_text("mine")
    for resume in ("auto", str(elsewhere)):
        assert main(["train", str(path), f"--resume={resume}"]) == 2
        assert "exists and is not empty" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["precious.txt"]


def test_a_checkpoint_that_cannot_be_read_is_named(
    tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run_file(tmp_path, run_values(tmp_path, model_directory))
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    for content in ("{", "{}", "[]"):
        (checkpoint / "checkpoint.json").write_text(content)
        assert main(["train", str(path), "--resume=auto"]) == 2
        message = f"{checkpoint} is not a checkpoint: its checkpoint.json cannot be read"
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("world_size", "values", "message"),
    [
        (2, {}, "was written by 2 processes, this launch has 1; start 2"),
        (
            1,
            {"optimizer_class": "SGD"},
            "was written with optimizer_class SGD, this run has AdamW, so",
        ),
        (
            1,
            {"optimizer_class": "AdamW", "seed": 1},
            "was written with seed 1, this run has 42, so",
        ),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path,
    model_directory: Path,
    capsys: pytest.CaptureFixture[str],
    world_size: int,
    values: dict[str, int | str],
    message: str,
) -> None:
    path = write_run_file(tmp_path, run_values(tmp_path, model_directory))
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    write_checkpoint_info(checkpoint, world_size=world_size, values={"step": 1, **values})
    assert main(["train", str(path), "--resume=auto"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def write_checkpoint_info(
    directory: Path, *, world_size: int, values: Mapping[str, int | str]
) -> None:
    directory.mkdir(parents=True)
    content = {"world_size": world_size, "values": values}
    (directory / "checkpoint.json").write_text(json.dumps(content))


def test_under_torchrun_the_message_is_printed_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "-m", "thunder_memsave", "train", "missing.yaml"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode != 0
    assert result.stderr.count("error: cannot read the configuration missing.yaml") == 1
    assert not list(tmp_path.iterdir())
