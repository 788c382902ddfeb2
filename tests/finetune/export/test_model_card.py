"""The card of an adapter says what it was trained on, and how to load it, without empty sections."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from thunder_memsave.finetune.export.model_card import write_card


def test_the_card_has_the_facts_and_valid_front_matter(tmp_path: Path) -> None:
    directory = tmp_path / "adapter"
    directory.mkdir()
    config = {"base_model_name_or_path": "runs/x: y/model", "peft_type": "LORA"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    write_card(directory, {"data": "train.jsonl", "steps": "400"})
    _, front, text = (directory / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front) == {
        "base_model": "runs/x: y/model",
        "library_name": "peft",
        "tags": ["lora"],
    }
    assert "| data | train.jsonl |\n| steps | 400 |" in text
    assert 'AutoPeftModelForCausalLM.from_pretrained("adapter")' in text
    assert "More Information Needed" not in text
