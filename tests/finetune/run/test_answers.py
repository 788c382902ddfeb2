"""A run's model answers prompts at evaluations, as `generate` of transformers does with what it exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.commands import run_command
from harness.language_model import run_values, write_jsonl, write_run_file
from thunder_memsave.finetune.cli import main
from thunder_memsave.finetune.data.packing import pad
from thunder_memsave.finetune.data.prompts import prompts_of
from thunder_memsave.finetune.data.tokenize import IGNORED, Sample

OF_TWO = {"every_n_steps": 2, "max_batches": 1, "answers": 2, "max_new_tokens": 6}


def answers(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]


def generated(run: Path, base: Path, prompt: str, count: int) -> str:
    """Generate the most probable tokens in plain transformers and peft."""
    model: Any = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), run / "adapter"
    )
    tokenizer = AutoTokenizer.from_pretrained(run / "adapter")
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    ids = model.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("packing", [False, True])
def test_answers_are_those_of_transformers_and_peft(
    packing: bool, one_layer: Path, tmp_path: Path
) -> None:
    data = {"packing": packing}
    values = run_values(tmp_path, one_layer, data=data, eval=OF_TWO, optimizer=faster())
    output = run_command("train", str(write_run_file(tmp_path, values)))
    run = tmp_path / "run"
    found = answers(run)
    assert [each["step"] for each in found] == [0, 0, 2, 2, 4, 4]
    for each in found[-2:]:
        assert each["answer"] == generated(run, one_layer, each["prompt"], 6)
        assert each["expected"]
    assert found[0]["answer"] != found[-2]["answer"]  # it has learned something
    assert f"answer after step 4: {found[-2]['prompt']!r} -> " in output
    before = (run / "answers.jsonl").read_bytes()
    run_command(
        "train", str(run / "config.yaml"), f"--resume={run / 'checkpoints' / 'step-00000003'}"
    )
    assert (run / "answers.jsonl").read_bytes() == before


def test_of_a_pair_the_chosen_answer_is_expected(one_layer: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "pairs.jsonl", pairs())
    dataset = {"class_path": "DataFiles", "init_args": {"path": str(path), "val_fraction": 0.25}}
    values = run_values(
        tmp_path,
        one_layer,
        data={"dataset": dataset},
        preference={"loss": "orpo"},
        eval={**OF_TWO, "every_n_steps": None, "answers": 1},
        train={"max_steps": 1},
    )
    run_command("train", str(write_run_file(tmp_path, values)))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for each in answers(tmp_path / "run"):
        (row,) = [row for row in rows if row["chosen"].strip() == each["expected"].strip()]
        assert row["prompt"].strip() in each["prompt"]


def test_without_validation_data_there_are_no_prompts(
    one_layer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = run_values(tmp_path, one_layer, eval={"answers": 1})
    del values["data"]["dataset"]["init_args"]["val_fraction"]
    assert main(["validate", str(write_run_file(tmp_path, values))]) == 2
    assert "eval.answers is 1, but the run has no validation data" in capsys.readouterr().err


def sample(targets: list[int]) -> Sample:
    ids = np.arange(1, len(targets) + 1, dtype=np.int32)
    return Sample(input_ids=ids, targets=np.array(targets, dtype=np.int32))


def test_prompts_end_where_training_begins() -> None:
    chat = sample([IGNORED, IGNORED, 4, 5, IGNORED, 7])
    whole = sample(list(range(2, 10)))
    nothing = sample([IGNORED] * 3)
    rows = pad([chat, whole, nothing], length=8, pad_id=0)
    first, second = prompts_of(rows, 9)
    assert (first.tokens, first.expected) == ([1, 2, 3], [4, 5])
    assert (second.tokens, second.expected) == ([1, 2], list(range(3, 10)))
    assert len(prompts_of(rows, 1)) == 1


def pairs() -> list[dict[str, str]]:
    return [
        {"prompt": "red green", "chosen": f" one two {n}", "rejected": " three"} for n in range(16)
    ]


def faster() -> dict[str, Any]:
    return {"init_args": {"lr": 0.05}}
