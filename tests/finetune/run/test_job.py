"""A run is checked before it starts, also if it has known problems."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.language_model import run_values, write_jsonl, write_run_file
from thunder_memsave.finetune.output.run_directory import RunDirectory
from thunder_memsave.finetune.run import job
from thunder_memsave.finetune.run.job import prepare
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.run_file.reading.parse import read_run_file
from thunder_memsave.finetune.run_file.reading.problems import Problems
from thunder_memsave.settings.problems import ConfigError, ConfigErrors


@pytest.fixture
def config_of(tmp_path: Path, model_directory: Path) -> Callable[..., RunConfig]:
    path = write_run_file(tmp_path, run_values(tmp_path, model_directory))

    def read(*overrides: str) -> RunConfig:
        run_file = read_run_file(path, overrides)
        assert not run_file.problems
        return run_file.config

    return read


def keys_of(config: RunConfig, *known: ConfigError) -> set[str | None]:
    with pytest.raises(ConfigErrors) as error:
        prepare(config, Problems(known))
    return {problem.key for problem in error.value.problems}


def test_a_usable_run_becomes_a_job(config_of: Callable[..., RunConfig], tmp_path: Path) -> None:
    made = prepare(config_of())
    assert made.directory.root == tmp_path / "run"
    assert made.batch_sizes.gradient_accumulation_steps == 4
    assert len(made.data.train) == 18
    assert made.resume_from is None


def test_the_sections_that_are_right_are_checked_besides_the_ones_that_are_wrong(
    config_of: Callable[..., RunConfig], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text("no json\n")
    config = config_of("lora.rr=1", "optimizer.init_args.lr=a", "train.micro_batch_size=3")
    known = ConfigError("wrong", key="eval.max_batches")
    assert keys_of(config, known) == {
        "eval.max_batches",
        "lora.rr",
        "optimizer.init_args.lr",
        "train.global_batch_size",
        "data.dataset.init_args.path",
    }


def test_a_broken_key_is_not_checked_by_its_default(config_of: Callable[..., RunConfig]) -> None:
    # The default of 2048 would exceed the model's positions.
    config = config_of("data.max_seq_length=2048", "lora.target_modules=[nothing]")
    known = ConfigError("wrong", key="data.max_seq_length")
    assert keys_of(config, known) == {"data.max_seq_length", "lora.target_modules"}


def test_rows_are_checked_without_a_tokenizer(
    config_of: Callable[..., RunConfig], tmp_path: Path
) -> None:
    for name, row in (("ChatJSONL", {"messages": []}), ("TextJSONL", {"txt": "a"})):
        write_jsonl(tmp_path / "rows.jsonl", [row])
        config = config_of("model.name_or_path=./nowhere", f"data.dataset.class_path={name}")
        assert keys_of(config) == {"model.name_or_path", "data.dataset.init_args.path"}


def test_arguments_of_a_data_set_that_are_wrong_do_not_hide_its_rows(
    config_of: Callable[..., RunConfig], tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    config = config_of("data.dataset.init_args.val_fractoin=0.1")
    arguments = "data.dataset.init_args"
    assert keys_of(config) == {f"{arguments}.val_fractoin", f"{arguments}.path"}


@pytest.mark.parametrize("is_offline", [True, False])
def test_a_mistake_does_not_wait_for_a_model_of_the_hub(
    is_offline: bool, config_of: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def load_tokenizer(model: Any) -> None:
        asked.append(model.name_or_path)
        raise ConfigError("not there")

    monkeypatch.setattr(job, "load_tokenizer", load_tokenizer)
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: is_offline)
    config = config_of("model.name_or_path=some/model", "optimizer.init_args.lr=a")
    assert "optimizer.init_args.lr" in keys_of(config)
    assert asked == (["some/model"] if is_offline else [])
    prepared = config_of("model.name_or_path=some/model")
    assert keys_of(prepared) == {"model.name_or_path"}  # without a mistake the hub is asked
    assert asked[-1] == "some/model"


def test_more_devices_than_there_are_gpus_are_refused(
    config_of: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(
        "torch.cuda.is_available", lambda: False
    )  # PyTorch's builds for CUDA ask the count
    with pytest.raises(ConfigErrors, match="devices is 4, but this machine has 2 GPUs; write 2,"):
        prepare(config_of("devices=4"))


def test_an_output_directory_that_cannot_be_made_is_refused(
    config_of: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigErrors, match=r"to output_dir rows.jsonl/x: .*rows.jsonl is a file"):
        prepare(config_of("output_dir=rows.jsonl/x"))
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ConfigErrors, match=r"to output_dir link/x: .*link is a link to nothing;"):
        prepare(config_of("output_dir=link/x"))
    for name in ("~/run", "$HOME/run"):
        with pytest.raises(ConfigErrors, match=r"'~' and '\$' are not expanded here; write the wh"):
            prepare(config_of(f"output_dir={name}"))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigErrors, match=f"to output_dir a/b: {tmp_path} is not writable"):
        prepare(config_of("output_dir=a/b"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.class_path=LBFGS", r"is 'LBFGS', which cannot take a step here: .*closure"),
        ("optimizer.class_path=SparseAdam", "is 'SparseAdam', which cannot take a step here: "),
        ("optimizer.init_args.lr=.inf", "the first step of torch.optim.AdamW is not finite; check"),
    ],
)
def test_an_optimizer_that_could_not_take_a_step_is_refused(
    override: str, message: str, config_of: Callable[..., RunConfig]
) -> None:
    with pytest.raises(ConfigErrors, match=message):
        prepare(config_of(override))


def test_callbacks_and_loggers_that_could_not_work_are_refused(
    config_of: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thunder_memsave.finetune.run.callbacks.find_spec", lambda name: None)
    config = config_of(
        "callbacks=[{class_path: EarlyStopping}]",
        "eval.every_n_steps=null",
        "loggers=[{class_path: CSVLogger}, {class_path: WandbLogger}]",
    )
    assert keys_of(config) == {"callbacks[0]", "loggers[1]"}
    without = config_of(
        "callbacks=[{class_path: EarlyStopping}]", "data.dataset.init_args.val_fraction=0"
    )
    assert keys_of(without) == {"callbacks[0]"}


def test_of_two_runs_that_start_at_once_the_second_is_refused(
    config_of: Callable[..., RunConfig], tmp_path: Path
) -> None:
    directory = RunDirectory(root=tmp_path / "run")
    directory.create(config_of())
    with pytest.raises(ConfigError, match=r"another run has just begun in output_dir .*run; name"):
        directory.create(config_of())
    directory.create(config_of("resume=auto"))
