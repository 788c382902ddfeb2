from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from thunder_memsave.finetune.run_file.config import TrainConfig
from thunder_memsave.finetune.run_file.keys.foreign_names import FOREIGN_NAMES, foreign_name
from thunder_memsave.finetune.run_file.keys.unknown_keys import schema_keys, unknown_key
from thunder_memsave.settings.schema import field_names

TRAIN = field_names(TrainConfig)

# Arguments of classes, and fields of peft, that the table names.
FREE = {
    "class_path",
    "data.dataset.class_path",
    "data.dataset.init_args.path",
    "data.dataset.init_args.streaming",
    "data.dataset.init_args.val_fraction",
    "data.dataset.init_args.val_path",
    "lora.fan_in_fan_out",
    "lora.lora_alpha",
    "lora.lora_dropout",
    "lora.modules_to_save",
    "lora.r",
    "lora.target_modules",
    "lora.use_dora",
    "lora.use_rslora",
    "optimizer.class_path",
    "optimizer.init_args",
    "optimizer.init_args.betas",
    "optimizer.init_args.eps",
    "optimizer.init_args.lr",
    "optimizer.init_args.weight_decay",
}


def test_the_table_of_other_tools_names_keys_that_exist_or_says_why_there_is_none() -> None:
    known = {*schema_keys(), *FREE}
    for name, foreign in FOREIGN_NAMES.items():
        assert set(foreign.here) <= known, name
        assert foreign.here or foreign.note, name
    assert {key for foreign in FOREIGN_NAMES.values() for key in foreign.here} >= FREE
    assert len(FOREIGN_NAMES) >= 60


def test_peft_torch_and_the_data_have_the_arguments_that_the_table_names() -> None:
    from peft import LoraConfig
    from torch.optim import AdamW

    from thunder_memsave.finetune.data import DataFiles

    homes: dict[str, Callable[..., object]] = {
        "lora": LoraConfig,
        "optimizer.init_args": AdamW,
        "data.dataset.init_args": DataFiles,
    }
    for key in FREE:
        section, _, name = key.rpartition(".")
        if section in homes:
            assert name in inspect.signature(homes[section]).parameters, key


def test_no_name_of_ours_is_called_foreign_where_it_belongs() -> None:
    for key in schema_keys():
        section, _, name = key.rpartition(".")
        foreign = foreign_name(name)
        # The key is known there, so it is never looked up; elsewhere the table must lead to it.
        assert foreign is None or not section or key in foreign.here or section == "data", key


def test_other_spellings_of_a_foreign_name_are_found() -> None:
    assert foreign_name("Learning-Rate") is foreign_name("learning_rate")


@pytest.mark.parametrize(
    ("key", "where", "message"),
    [
        (
            "lora_r",
            "",
            "lora_r is the name in axolotl, litgpt, TRL and unsloth; here it is lora.r.",
        ),
        ("out_dir", "", "out_dir is litgpt's name; here it is output_dir."),
        ("rank", "lora", "lora.rank is lora.r here (peft's name)."),
        ("tf32", "train", "and not supported here: set torch.backends"),
        ("max_step", "train", "is not a key of 'train'; did you mean 'max_steps'?"),
        ("packing", "train", "train.packing is data.packing here."),
        ("max_seq_lenght", "train", "train.max_seq_lenght is data.max_seq_length here."),
        ("every_n_steps", "", "is eval.every_n_steps or checkpoint.every_n_steps here."),
        (
            "xyz",
            "train",
            "train.xyz is not a key of 'train'; its keys are deterministic, epochs, global_batch",
        ),
    ],
)
def test_what_an_unknown_key_means_is_said(key: str, where: str, message: str) -> None:
    assert message in str(unknown_key(key, where=where, known=TRAIN))


def test_arguments_of_callbacks_and_loggers_are_not_taken_for_keys() -> None:
    for where in ("callbacks[0].init_args", "loggers[1].init_args", "adapter.init_args"):
        error = unknown_key("interval", where=where, known=["patience"], of="an argument of A")
        assert str(error) == f"{where}.interval is not an argument of A; its keys are patience."


def test_a_problem_knows_the_keys_that_were_meant() -> None:
    assert unknown_key("base_model", where="", known=[]).meant == ("model.name_or_path",)
    assert unknown_key("max_step", where="train", known=TRAIN).meant == ("train.max_steps",)
    assert unknown_key("packing", where="train", known=TRAIN).meant == ("data.packing",)
    assert unknown_key("xyz", where="train", known=TRAIN).meant == ()
