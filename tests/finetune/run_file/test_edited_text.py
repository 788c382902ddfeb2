"""Keys changed in the text of a run file, whose comments stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from thunder_memsave.finetune.run_file.edited_text import with_overrides, without_key
from thunder_memsave.finetune.run_file.reading.overrides import apply_override, parse_overrides
from thunder_memsave.finetune.run_file.shipped import copy_shipped, shipped_configs
from thunder_memsave.settings.problems import ConfigError
from thunder_memsave.settings.yaml_file import load_yaml, parse_yaml

CHANGES = (
    "--model.name_or_path=mine: a model # 1",
    "--lora=null",
    "--lora.r=2",
    "--data.dataset.init_args.path=[{path: a.jsonl, weight: 0.5}, b.csv]",
    "--data.max_seq_length=128",
    "--optimizer.init_args.lr=1e-3",
    "--optimizer.states=int8",
    "--memory.budget=20GiB",
    "--memory.offload=optimizer",
    "--train.seed=7",
    "--output_dir=runs/ä",
    "--model.architecture.num_hidden_layers=3",
    "--model.architecture=null",
    '--callbacks=[{class_path: EarlyStopping, init_args: {monitor: "val_loss"}}]',
)


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_the_text_has_the_values_of_the_overrides_and_its_comments(name: str) -> None:
    source = shipped_configs()[name].read_text()
    for words in (*((each,) for each in CHANGES), CHANGES):
        values = parse_yaml(source)
        for override in parse_overrides(words):
            apply_override(values, override)
        text = with_overrides(source, parse_overrides(words))
        assert parse_yaml(text) == values
        header = source[: source.index("\nmodel:")]
        assert text.startswith(header)


def test_only_the_value_changes() -> None:
    text = "a: 1\nmodel: # first\n  dtype: bfloat16 # second\ntrain: {seed: 1, epochs: 2} # third\n"
    changed = with_overrides(text, parse_overrides(["--train.seed=5", "--model.dtype=float32"]))
    assert changed == text.replace("seed: 1", "seed: 5").replace("bfloat16", "float32")
    more = with_overrides(text, parse_overrides(["--model.revision=x", "--train.max_steps=3"]))
    assert more == text.replace("# second\n", "# second\n  revision: x\n").replace(
        "epochs: 2", "epochs: 2, max_steps: 3"
    )


def test_a_key_goes_with_its_lines() -> None:
    text = "model:\n  x: # of it\n    y: 1\n    z: {a: 1,\n      b: 2}\n  dtype: float32\n"
    assert without_key(text, "model.x") == "model:\n  dtype: float32\n"
    assert without_key(text, "model.dtype") == text.removesuffix("  dtype: float32\n")
    assert without_key(text, "model.none") == without_key(text, "none.x") == text


def test_a_copy_for_another_model_has_no_architecture_and_its_own_directory(tmp_path: Path) -> None:
    named = "--model.name_or_path=mine"
    path = copy_shipped(
        "llama3_8b_lora", str(tmp_path / "a.yaml"), overrides=parse_overrides([named])
    )
    assert path.read_text().startswith("# As llama3_8b_lora, with another model.\nmodel:\n")
    values = load_yaml(path)
    assert values["model"] == {"name_or_path": "mine", "dtype": "bfloat16"}
    assert values["output_dir"] == "runs/a"
    given = [named, "--model.architecture.vocab_size=9", "--output_dir=here"]
    other = load_yaml(
        copy_shipped("llama3_8b_lora", str(tmp_path / "b.yaml"), overrides=parse_overrides(given))
    )
    assert other["model"]["architecture"]["vocab_size"] == 9
    assert other["output_dir"] == "here"
    with pytest.raises(ConfigError, match=r"train\.epoch"):
        copy_shipped(
            "tiny_lora", str(tmp_path / "c"), overrides=parse_overrides(["--train.epoch=1"])
        )
    assert not (tmp_path / "c").exists()
