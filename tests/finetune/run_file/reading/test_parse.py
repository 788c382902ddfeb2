from __future__ import annotations

import json
from pathlib import Path

import pytest

from thunder_memsave.config import Fp8Config, ShardingConfig
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.run_file.reading.parse import (
    dump_run_config,
    load_run_config,
    read_run_file,
)
from thunder_memsave.settings.problems import ConfigError, ConfigErrors

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
    assert config.train.global_batch_size is None
    assert config.optimizer["class_path"] == "torch.optim.AdamW"


def test_a_number_with_an_exponent_is_a_number_everywhere(tmp_path: Path) -> None:
    text = GOOD + "optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 1e-4}}\n"
    config = load(tmp_path, text, "--train.max_grad_norm=5e-1", "--lora.lora_dropout=1e-1")
    assert config.optimizer["init_args"]["lr"] == 1e-4
    assert config.train.max_grad_norm == 0.5
    assert config.lora == {"lora_dropout": 0.1}


def test_a_text_in_quotes_stays_a_text_among_the_arguments_of_a_class(tmp_path: Path) -> None:
    arguments = {"project": "2026", "name": "null", "id": "1e-3", "tags": ["1", "true"]}
    text = GOOD + f"loggers: [{{class_path: WandbLogger, init_args: {json.dumps(arguments)}}}]\n"
    text += "lora: {target_modules: ['0', '1']}\nmodel: {config: {a: '1'}, name_or_path: x}\n"
    config = load(tmp_path, text.replace("model: {name_or_path: some/model}\n", "", 1))
    assert config.loggers[0]["init_args"] == arguments
    assert config.lora == {"target_modules": ["0", "1"]}
    assert config.model.config == {"a": "1"}


def test_a_text_in_quotes_stays_a_text_in_sections_of_ours(tmp_path: Path) -> None:
    text = GOOD.replace("some/model}", "some/model, revision: 'null'}") + "resume: 'true'\n"
    config = load(tmp_path, text)
    assert (config.model.revision, config.resume) == ("null", "true")


def test_a_whole_number_where_one_with_a_fraction_may_stand_is_kept_as_one(tmp_path: Path) -> None:
    text = GOOD + "train: {max_grad_norm: 2}\nlr_scheduler: {warmup_steps: 3}\n"
    config = load(tmp_path, text)
    assert dump_run_config(config).count("max_grad_norm: 2.0\n") == 1
    assert dump_run_config(config).count("warmup_steps: 3\n") == 1  # steps, and no part of the run


def test_a_number_beyond_all_floats_is_refused(tmp_path: Path) -> None:
    text = GOOD + f"train: {{max_grad_norm: {10**400}}}\n"
    with pytest.raises(ConfigErrors, match=r"train\.max_grad_norm is 1000*, but must be a number"):
        load(tmp_path, text)


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
    names = ["--output_dir=1e-4", "--model.name_or_path=2026-11-21"]
    strategy = ["--strategy.timeout=90s", "--strategy.leave_out=[schedule]", "--memory.budget=80%"]
    overrides = ["--lora.r=8", "--lr_scheduler.warmup_steps=5", "--fp8={}", *strategy, *names]
    config = load(tmp_path, GOOD, *overrides)
    assert load(tmp_path, dump_run_config(config)) == config
    assert config.output_dir == "1e-4"


def test_an_override_may_be_one_argument_or_two_with_or_without_dashes(tmp_path: Path) -> None:
    overrides = ["--train.max_steps", "7", "train.seed=1", "--lr_scheduler.warmup_steps", "0.5"]
    config = load(tmp_path, GOOD, *overrides, "--train.max_grad_norm=null")
    assert (config.train.max_steps, config.train.seed) == (7, 1)
    assert config.lr_scheduler.warmup_steps == 0.5
    assert config.train.max_grad_norm is None


def test_the_last_of_two_overrides_counts(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD, "train.seed=1", "train.seed=2").train.seed == 2


def test_a_text_on_the_command_line_needs_no_quotes(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD, "--output_dir=2026", "--resume=[a", "--model.revision=1e5")
    assert (config.output_dir, config.resume, config.model.revision) == ("2026", "[a", "1e5")


def test_lists_and_mappings_can_be_given_on_the_command_line(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD, "--callbacks=[{class_path: EarlyStopping}]", "--lora={r: 4}")
    assert config.callbacks == [{"class_path": "EarlyStopping"}]
    assert config.lora == {"r": 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "train: 3", "train is 3, but must be a mapping of names to values."),
        (GOOD + "train:", "train is empty; give it a key, or leave the section out."),
        (GOOD + "train: {seed: null}", "seed is null, but must be a whole number; leave it out"),
        (GOOD + "train: {max_steps: 1.5}", "is 1.5, but must be a whole number or null."),
        (GOOD + "train: {max_steps: true}", "is true, but must be a whole number or null."),
        (GOOD.replace("}}}", "}}, packing: 1}"), "data.packing is 1, but must be true or false."),
        (GOOD + "lora: 3", "lora is 3, but must be a mapping or null, such as {r: 16, "),
        (GOOD + "adapter: lora", "LoRA has the section 'lora'."),
        (GOOD + "optimizer: adamw", "class_path, init_args, states and rounding, such as {class"),
        (GOOD + "optimizer: {states: int4}", "optimizer.states is 'int4', but must be one of 'flo"),
        (GOOD + "optimizer: {class_path: 3}", "class_path is 3, but must be the name of a class."),
        (GOOD + "optimizer: {class_path: ''}", "optimizer.class_path is missing; write torch"),
        (GOOD + "optimizer: {init_args: 3}", "init_args is 3, but must be a mapping of names"),
        (
            GOOD + "optimizer: {classpath: A}",
            "optimizer.classpath is not a key of 'optimizer'; did",
        ),
        (GOOD + "loggers: [3]", "loggers[0] is 3, but must be a mapping with class_path and"),
        (GOOD + "loggers: [{init_args: {}}]", "loggers[0].class_path is missing."),
        (GOOD + "loggers: {class_path: A}", "but must be a list of mappings, such as [{class_path"),
        (GOOD + "callbacks: [{a: 1, class_path: A}]", "callbacks[0].a is not a key of 'callbacks"),
        (GOOD + "1: 2", "1 is not a key of a run file; its keys are adapter, callbacks"),
        (GOOD + "fp8: 3", "fp8 is 3, but must be a mapping or null, such as {recipe: delayed}."),
        (
            GOOD + "fp8: {recipes: block}",
            "fp8.recipes is not a key of 'fp8'; did you mean 'recipe'",
        ),
        (GOOD + "fp8: {recipe: fast}", "fp8.recipe is 'fast', but must be one of 'delayed', "),
        ("train: {seed: 1}", "output_dir is missing; name a directory for this run"),
        ("train: {seed: 1}", "model.name_or_path is missing; name a directory, or a model of"),
        ("train: {seed: 1}", "data.dataset.class_path is missing; name a dataset class"),
        ("# nothing\n", "the run file is empty; `thunder-memsave configs list`"),
        (GOOD + "lora: {r: 1}\nadapter: {class_path: A}", "lora and adapter are both given"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--train.max_step=3", "train.max_step is not a key of 'train'; did you mean 'max_steps'?"),
        ("--trian.seed=3", "trian is not a key of a run file; did you mean 'train'?"),
        (
            "--train.seed.x=3",
            "train.seed.x is not a key: train.seed has none below it; write --train.seed=VALUE.",
        ),
        ("--loggers.x=3", "loggers.x is not a key: loggers has none below it"),
        (
            "--loggers[0].class_path=A",
            "loggers[0].class_path is within the list loggers, which is given whole: --loggers=[",
        ),
        ("--loggers+=A", "loggers+ is not a key of a run file; did you mean 'loggers'?"),
        ("--train.max_steps=[", "the value of --train.max_steps is not YAML: this is not YAML"),
        ("--lora=!!python/name:os.system", "the YAML tag !!python/name:os.system is refused"),
        ("--train.max_steps=ten", "train.max_steps is 'ten', but must be a whole number or null."),
        ("--train", "'--train' is not an override; write --key=value"),
        ("--=3", "'--=3' is not an override"),
        (
            "train.micro_batch_size=0",
            "micro_batch_size is 0, but must be a whole number of at least 1.",
        ),
        (
            "train.max_steps=-1",
            "is -1, but must be a whole number of at least 1; leave it out, or write null, for no limit.",
        ),
        ("devices=0", "is 0, but must be a whole number of at least 1; write 'auto' for all GPUs."),
        ("devices=two", "devices is 'two', but must be a whole number or 'auto'."),
        ("train.max_grad_norm=0", "but must be above 0; write null for no clipping"),
        ("train.max_grad_norm=.nan", "train.max_grad_norm is nan, but must be above 0"),
        ("train.seed=-1", "train.seed is -1, but must be from 0 to 4294967295"),
        (
            "data.max_seq_length=1",
            "is 1, but must be a whole number of at least 2: a token and the one",
        ),
        ("data.max_documents_per_row=0", "max_documents_per_row is 0, but must be "),
        (
            "data={packing: false, max_documents_per_row: 3}",
            "max_documents_per_row is 3, but without data.packing each row has one document; set data.packing: true",
        ),
        ("model.dtype=float64", "must be 'float32' or 'bfloat16'; did you mean 'float32'?"),
        ("model.dtype=bf16-true", "must be 'float32' or 'bfloat16'; did you mean 'bfloat16'?"),
        ("model.dtype=fp32", "must be 'float32' or 'bfloat16'; did you mean 'float32'?"),
        ("model.attn_implementation=x", "must be one of 'auto', 'sdpa', 'eager'."),
        ("checkpoint.keep_last=-1", "is -1, but must be a whole number of at least 1."),
        ("checkpoint.keep_best=-1", "is -1, but must be a whole number of at least 0."),
        (f"train.epochs={2**31}", "train.epochs is 2147483648, but must be at most 2147483647."),
        (
            "checkpoint={keep_best: 1, every_n_steps: 500}",
            "those come every 500 steps and eval.every_n_steps is 200; set eval.every_n_steps to 500, or",
        ),
        (
            "checkpoint={keep_best: 1, every_n_steps: null}",
            "keep_best is 1, but checkpoint.every_n_steps is null, so that there is one checkpoint",
        ),
        (
            "checkpoint.best_of=val_perplexity",
            "best_of is 'val_perplexity', but no checkpoint is kept for it; set checkpoint.keep_best",
        ),
        (
            "checkpoint={asynchronous: true, every_n_steps: null}",
            "asynchronous is true, but checkpoint.every_n_steps is null, and the end of a run waits",
        ),
        (
            "checkpoint.copy_to=bucket/runs",
            "checkpoint.copy_to is 'bucket/runs', which is no address; write one with a protocol",
        ),
        (
            "resume=cloud9://runs",
            "resume is 'cloud9://runs', but fsspec knows no protocol 'cloud9'",
        ),
        (
            "guards.spike_window=7",
            "guards.spike_window is 7, but guards.loss_spike is null, so spikes are not detected; set guards.loss",
        ),
        (
            "guards={loss_spike: null, spike_threshold: 2.5}",
            "spike_threshold is 2.5, but guards.loss_spike is null, so spikes are not detected",
        ),
        ("eval.max_batches=-1", "of at least 1; write null for the whole validation set."),
        ("lr_scheduler.warmup_steps=-1", "must not be negative"),
        ("lr_scheduler.warmup_steps=2.5", "a whole number of steps or a fraction"),
        ("lr_scheduler.min_lr_ratio=2", "must be from 0 to 1"),
        ("lr_scheduler.warmup_steps=a", "'a', but must be a number."),
        ("optimizer=null", "optimizer is empty; give it a key"),
        ("resume=true", "resume is 'true'; write auto for the newest checkpoint"),
        ("strategy.sharding=zero9", "'zero9', but must be one of"),
        ("strategy.shardin=zero2", "did you mean 'sharding'"),
        ("strategy.fsdp=x", "strategy.fsdp is the name in axolotl and TRL; here it is strategy.sh"),
        (
            "data.dataset.path=x",
            "not a key of 'data.dataset'; an argument of the class belongs under init_args: write "
            "data.dataset.init_args.path.",
        ),
        ("memory.budget=4GiBs", "memory.budget: '4GiBs' is not a number of bytes"),
        ("memory.budgt=4GiB", "memory.budgt is not a key of 'memory'; did you mean 'budget'?"),
        (
            "memory=60GiB",
            "'60GiB', but must be a mapping of names to values, such as {budget: 60GiB}.",
        ),
        (
            "train.gradient_checkpointing=true",
            "here it is memory.budget and memory.policy (what does not fit is recomputed; with",
        ),
        (
            "model={name_or_path: a, config: {model_type: llama}, architecture: {model_type: llama}}",
            "model.config and model.architecture are both given; write model.config for random",
        ),
        ("fp8.backend=nvidia", "fp8.backend is 'nvidia', but must be one of 'auto', "),
        (
            "fp8=delayed",
            "fp8 is 'delayed', but must be a mapping or null, such as {recipe: delayed}.",
        ),
    ],
)
def test_what_is_wrong_in_an_override_is_named(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, GOOD, override)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.dtype=float32", "model.trainable_dtype=bfloat16"],
            "trained weights cannot be less precise than the computation",
        ),
        (
            ["lr_scheduler.name=constant", "lr_scheduler.min_lr_ratio=0.1"],
            "but a constant learning rate never reaches it",
        ),
        (["lora.r=8", "adapter.class_path=LoHaConfig"], "lora and adapter are both given"),
        (
            ["guards.nonfinite=rollback", "checkpoint.every_n_steps=null"],
            "guards.nonfinite is 'rollback', but checkpoint.every_n_steps is null, so that there is no checkpoint to",
        ),
        (
            ["guards.loss_spike=rollback", "checkpoint.every_n_steps=null"],
            "guards.loss_spike is 'rollback', but checkpoint.every_n_steps is null",
        ),
        (
            ["guards.max_skips=9", "strategy.nonfinite_gradients=skip"],
            "guards.max_skips is 9, but strategy.nonfinite_gradients 'skip' leaves out steps without end; write guards",
        ),
        (["model.name_or_path=.", "model.revision=main"], "a directory, which has no revisions"),
    ],
)
def test_settings_that_contradict_each_other_are_named(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, GOOD, *overrides)
    assert message in str(error.value)
    assert load(tmp_path, GOOD, overrides[0])


def test_problems_of_all_sections_are_found_together(tmp_path: Path) -> None:
    text = GOOD + "train: {max_step: 1, epochs: a, seed: 2.5}\neval: {every: 2, max_batches: 0}\n"
    text += "strategy: {jit: 1}\nlora: 3\nlora_rank: 4\ntrain: {}\n"
    with pytest.raises(ConfigErrors) as error:
        load(tmp_path, text, "--fp8.margin=-1")
    assert {problem.key for problem in error.value.problems} == {
        "train",
        "train.max_step",
        "train.epochs",
        "train.seed",
        "eval.every",
        "eval.max_batches",
        "strategy.jit",
        "lora",
        "lora_rank",
        "fp8.margin",
    }


def test_a_file_that_is_partly_wrong_still_gives_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD + "train: {epochs: a, seed: 7}\n")
    run_file = read_run_file(path, ["--train.max_steps=9"])
    assert (run_file.config.train.seed, run_file.config.train.max_steps) == (7, 9)
    assert run_file.config.train.epochs is None
    assert [problem.key for problem in run_file.problems] == ["train.epochs"]


def test_an_override_takes_over_the_place_of_its_key(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD + "train: {epochs: 1}\n")
    run_file = read_run_file(path, ["--train", "{epoch: 3}"])
    assert "train.epochs" not in run_file.lines
    assert run_file.overrides == {"train": "--train {epoch: 3}"}


def test_devices_must_agree_with_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert load(tmp_path, GOOD, "devices=2").devices == 2
    with pytest.raises(ConfigError, match="devices is 3, but torchrun started 2 processes"):
        load(tmp_path, GOOD, "devices=3")


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


def test_srun_with_several_tasks_is_refused_unless_they_are_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(ConfigError, match=r"srun started 2 tasks, .* one torchrun per machine"):
        load(tmp_path, GOOD)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    load(tmp_path, GOOD)


def test_fp8_is_asked_for_by_its_section_alone(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD).fp8 is None
    assert load(tmp_path, GOOD, "--fp8={}").fp8 == Fp8Config()
    overrides = ("--fp8.recipe=block", "--fp8.skip_modules=[lm_head, gate]")
    expected = Fp8Config(recipe="block", skip_modules=("lm_head", "gate"))
    assert load(tmp_path, GOOD, *overrides).fp8 == expected


def test_a_part_of_the_sharding_is_added_to_its_mode(tmp_path: Path) -> None:
    text = GOOD + "strategy: {sharding: hybrid}\n"
    sharding = load(tmp_path, text, "--strategy.sharding.size=4").strategy.sharding
    assert sharding == ShardingConfig(mode="hybrid", size=4)
