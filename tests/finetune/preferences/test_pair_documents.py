"""Rows of pairs as people have them, and rows that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from harness.language_model import run_values, write_jsonl, write_run_file
from thunder_memsave.finetune.cli import main
from thunder_memsave.finetune.data.data_files import DataFiles
from thunder_memsave.finetune.data.documents import Document

USER, OTHER = {"role": "user", "content": "red?"}, {"role": "user", "content": "more?"}
YES, NO = {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}


@pytest.fixture(scope="module")
def tokenizer(model_directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_directory)


def marked(document: Document | None) -> str:
    """Return a document's text with what is trained on in brackets."""
    assert document is not None
    return "".join(f"[{p.text}]" if p.assistant else p.text for p in document.parts)


ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "texts after a prompt": (
        {"prompt": "a b", "chosen": " c", "rejected": " d"},
        "a b[ c]",
        "a b[ d]",
    ),
    "whole texts (HH-RLHF)": (
        {"chosen": "\n\nHuman: hi\n\nAssistant: yes", "rejected": "\n\nHuman: hi\n\nAssistant: no"},
        "\n\nHuman: hi\n\nAssistant:[ yes]",
        "\n\nHuman: hi\n\nAssistant:[ no]",
    ),
    "messages after a prompt (TRL)": (
        {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
        "<user>red?<end><assistant>[yes<end>]",
        "<user>red?<end><assistant>[no<end>]",
    ),
    "conversations with the prompt as a text (UltraFeedback)": (
        {"prompt": "red?", "chosen": [USER, YES], "rejected": [USER, NO]},
        "<user>red?<end><assistant>[yes<end>]",
        "<user>red?<end><assistant>[no<end>]",
    ),
    "answers to a prompt that is a text": (
        {"prompt": "red?", "chosen": [YES], "rejected": [NO]},
        "<user>red?<end><assistant>[yes<end>]",
        "<user>red?<end><assistant>[no<end>]",
    ),
    "conversations that share an answer": (
        {"chosen": [USER, YES, OTHER, NO], "rejected": [USER, YES, OTHER, YES]},
        "<user>red?<end><assistant>yes<end><user>more?<end><assistant>[no<end>]",
        "<user>red?<end><assistant>yes<end><user>more?<end><assistant>[yes<end>]",
    ),
    "conversations that part early": (
        {"chosen": [USER, YES, OTHER, NO], "rejected": [USER, NO]},
        "<user>red?<end><assistant>[yes<end>]<user>more?<end><assistant>[no<end>]",
        "<user>red?<end><assistant>[no<end>]",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_pairs(name: str, tokenizer: Any, tmp_path: Path) -> None:
    row, chosen, rejected = ROWS[name]
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    dataset = DataFiles(path=str(path))
    dataset.check_rows()
    (document,) = dataset.load(tokenizer).train
    assert marked(document) == chosen
    assert marked(document.rejected) == rejected


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "alike": ({"prompt": "a", "chosen": " b", "rejected": " b"}, "the same"),
    "one is the start of the other": ({"chosen": "a b", "rejected": "a b c"}, "nothing after"),
    "a text and messages": ({"chosen": "a", "rejected": [NO]}, "both"),
    "no answer": ({"chosen": [USER, OTHER], "rejected": [USER, NO]}, "'assistant'"),
    "empty": ({"chosen": "", "rejected": "a"}, "not empty"),
    "a number": ({"prompt": "a", "chosen": 3, "rejected": "a"}, "must be a text"),
    "a number as prompt": ({"prompt": 3, "chosen": [YES], "rejected": [NO]}, "'prompt'"),
    "a message without content": (
        {"prompt": [USER], "chosen": [YES], "rejected": [{}]},
        "'assistant'",
    ),
    "null": ({"prompt": "a", "chosen": None, "rejected": "b"}, "must be a text"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_pairs_are_one_message(
    name: str, model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, told = BAD[name]
    good = {"prompt": "a", "chosen": " b", "rejected": " c"}
    path = write_jsonl(tmp_path / "preferences.jsonl", [good, row])
    assert main(["validate", str(run_file(tmp_path, model_directory, path, loss="dpo"))]) == 2
    error = capsys.readouterr().err
    assert "preferences.jsonl:2" in error
    assert told in error
    assert "Traceback" not in error


def run_file(
    directory: Path, model: Path, path: Path, *, loss: str | None, **arguments: Any
) -> Path:
    given = {"path": str(path), **arguments}
    dataset = {"class_path": "DataFiles", "init_args": given}
    values = run_values(directory, model, data={"dataset": dataset})
    if loss is not None:
        values["preference"] = {"loss": loss}
    return write_run_file(directory, values)


PAIR = {"prompt": "a", "chosen": " b", "rejected": " c"}
PROMPT = {"prompt": "a", "completion": " b"}
UNUSABLE: dict[str, tuple[list[dict[str, Any]], str | None, dict[str, Any], list[str]]] = {
    "pairs without a section": ([PAIR], None, {}, ["preference: {loss: dpo}"]),
    "prompts for dpo": ([PROMPT], "dpo", {}, ["'chosen' and 'rejected'", "preferences.jsonl:1"]),
    "no label for kto": ([PROMPT], "kto", {}, ["'label'", "preferences.jsonl:1"]),
    "a label that is none": ([{**PROMPT, "label": 7}], "kto", {}, ["'label'"]),
    "texts": ([{"text": "a b"}], "dpo", {}, ["'chosen' and 'rejected'"]),
    "streaming": ([PAIR], "dpo", {"streaming": True}, ["streaming", "in memory"]),
    "streamed pairs without a section": ([PAIR], None, {"streaming": True}, ["preference: {loss"]),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_data_that_cannot_be_used(
    name: str, model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, loss, arguments, told = UNUSABLE[name]
    path = write_jsonl(tmp_path / "preferences.jsonl", rows)
    file = run_file(tmp_path, model_directory, path, loss=loss, **arguments)
    assert main(["validate", str(file)]) == 2
    error = capsys.readouterr().err
    for text in told:
        assert text in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("section", "data", "key"),
    [
        ({"loss": "dpo", "desirable_weight": 2.0}, {}, "preference.desirable_weight"),
        ({"loss": "ppo"}, {}, "preference.loss"),
        ({"beta": 0}, {}, "preference.beta"),
        ({"loss": "dpo"}, {"train_on": "all"}, "data.train_on"),
        ({"loss": "dpo"}, {"packing": True, "max_documents_per_row": 1}, "max_documents_per_row"),
    ],
)
def test_settings_that_do_not_go_together(
    section: dict[str, Any],
    data: dict[str, Any],
    key: str,
    model_directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_jsonl(tmp_path / "preferences.jsonl", [PAIR])
    dataset = {"class_path": "DataFiles", "init_args": {"path": str(path)}}
    values = run_values(tmp_path, model_directory, data={"dataset": dataset, **data})
    values["preference"] = section
    assert main(["validate", str(write_run_file(tmp_path, values))]) == 2
    error = capsys.readouterr().err
    assert key in error
    assert "Traceback" not in error
