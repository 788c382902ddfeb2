"""Files as people have them are read by what they are, and refused in one message that names the key to change."""

from __future__ import annotations

import csv
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.language_model import write_jsonl
from thunder_memsave.finetune.data import ChatJSONL, DataFiles, PromptJSONL, TextJSONL, data_files
from thunder_memsave.finetune.data.documents import Document
from thunder_memsave.finetune.data.tokenize import IGNORED, tokenize
from thunder_memsave.settings.problems import ConfigError, ConfigErrors

CHAT = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": CHAT},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]
    },
    "prompt": {"prompt": "one ", "completion": "two"},
    "alpaca": {"instruction": "one", "input": "", "output": "two"},
    "text": {"text": "one two"},
    "tokens": {"input_ids": [3, 4, 5], "labels": [-100, 4, 5]},
}
needs_datasets = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="the package datasets is not installed"
)
needs_pyarrow = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="the package pyarrow is not installed"
)


def write_json(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return path


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def table(rows: Sequence[dict[str, Any]]) -> Any:
    return importlib.import_module("datasets").Dataset.from_list(list(rows))


def write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    arrow = importlib.import_module("pyarrow")
    table = arrow.Table.from_pylist(list(rows))
    importlib.import_module("pyarrow.parquet").write_table(table, path)
    return path


def write_arrow(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    table(rows).save_to_disk(str(path))
    return path


def documents(tokenizer: Any, path: Path, **arguments: Any) -> Sequence[Document]:
    return DataFiles(path=str(path), **arguments).load(tokenizer).train


def content(found: Sequence[Document]) -> list[Any]:
    return [(each.parts, each.rendered, each.tokens, each.trained) for each in found]


@pytest.mark.parametrize("name", ROWS)
def test_a_format_is_recognised_shown_and_can_be_named(
    name: str, tmp_path: Path, tokenizer: Any
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [ROWS[name]] * 2)
    dataset = DataFiles(path=str(path))
    split = dataset.load(tokenizer)
    assert split.described.startswith(f"{path}: JSONL, 2 rows of ")
    assert all(repr(key) in split.described for key in ROWS[name])
    assert content(split.train) == content(documents(tokenizer, path, format=name))
    assert dataset.has_assistant_part is (name != "text")
    assert dataset.continues_in_next_row is (name == "text")


def test_chats_of_all_formats_are_the_same_document(tmp_path: Path, tokenizer: Any) -> None:
    made = []
    for name in ("messages", "sharegpt", "alpaca"):
        path = write_jsonl(tmp_path / f"{name}.jsonl", [ROWS[name]])
        made.append(content(documents(tokenizer, path)))
    (tmp_path / "trl.jsonl").write_text(json.dumps({"prompt": CHAT[:1], "completion": CHAT[1:]}))
    made.append(content(documents(tokenizer, tmp_path / "trl.jsonl")))
    reference = ChatJSONL(path=str(tmp_path / "messages.jsonl")).load(tokenizer).train
    assert made == [content(reference)] * 4


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (write_json, tuple(ROWS)),
        (write_csv, ("prompt", "alpaca", "text")),
        pytest.param(write_parquet, tuple(ROWS), marks=needs_pyarrow),
        pytest.param(write_arrow, tuple(ROWS), marks=needs_datasets),
    ],
)
def test_every_kind_of_file_gives_the_documents_of_the_same_jsonl(
    write: Callable[[Path, Sequence[dict[str, Any]]], Path],
    names: Sequence[str],
    tmp_path: Path,
    tokenizer: Any,
) -> None:
    for name in names:
        rows = [ROWS[name]] * 3
        reference = write_jsonl(tmp_path / f"{name}.jsonl", rows)
        suffix = write.__name__.removeprefix("write_")
        path = write(tmp_path / f"{name}.{suffix}", rows)
        assert content(documents(tokenizer, path)) == content(documents(tokenizer, reference))


def test_tokens_are_trained_where_labels_say_so(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [ROWS["tokens"]])
    found = documents(tokenizer, path)
    for assistant_only, targets in ((True, [4, 5, IGNORED]), (False, [4, 5, IGNORED])):
        data = tokenize(
            found,
            tokenizer,
            max_seq_length=8,
            assistant_only=assistant_only,
            continue_long=False,
        )
        assert data.samples[0].input_ids.tolist() == [3, 4, 5]
        assert data.samples[0].targets.tolist() == targets
    masked = write_jsonl(tmp_path / "b.jsonl", [{"input_ids": [3, 4, 5], "labels": [3, -100, 5]}])
    data = tokenize(
        documents(tokenizer, masked),
        tokenizer,
        max_seq_length=8,
        assistant_only=True,
        continue_long=False,
    )
    assert data.samples[0].targets.tolist() == [IGNORED, 5, IGNORED]


def test_weights_repeat_rows_and_take_a_part_of_them(tmp_path: Path, tokenizer: Any) -> None:
    many = write_jsonl(tmp_path / "a.jsonl", [{"text": f"red {n}"} for n in range(10)])
    few = write_csv(tmp_path / "b.csv", [{"text": "blue"}, {"text": "green"}])
    path: list[Any] = [{"path": str(many), "weight": 0.5}, {"path": str(few), "weight": 2}]
    loads = [DataFiles(path=path).load(tokenizer) for _ in range(2)]
    assert loads[0] == loads[1]
    texts = [each.parts[0].text for each in loads[0].train]
    assert sum(text.startswith("red") for text in texts) == len({*texts} - {"blue", "green"}) == 5
    assert texts.count("blue") == texts.count("green") == 2
    assert "0.5 times per epoch" in loads[0].described


def test_no_row_is_trained_on_and_held_out_whatever_its_weight(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"red {n}"} for n in range(20)])
    entry = {"path": str(path), "weight": 2.5}
    split = DataFiles(path=[entry], val_fraction=0.25).load(tokenizer)
    held_out = {each.origin for each in split.validation}
    assert len(held_out) == 5
    assert held_out.isdisjoint(each.origin for each in split.train)


def test_the_number_that_pandas_writes_before_each_row_is_left_out(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(",prompt,completion\n0,one ,two\n")
    (found,) = documents(tokenizer, path)
    assert [part.text for part in found.parts] == ["one ", "two"]


def test_a_value_of_a_table_may_be_a_whole_book(tmp_path: Path, tokenizer: Any) -> None:
    text = "once upon a time " * 20_000
    (found,) = documents(tokenizer, write_csv(tmp_path / "a.csv", [{"text": text}]))
    assert found.parts[0].text == text


def test_a_directory_is_all_its_files(tmp_path: Path, tokenizer: Any) -> None:
    write_jsonl(tmp_path / "b.jsonl", [{"text": "red"}])
    write_json(tmp_path / "a.json", [{"text": "blue"}])
    (tmp_path / "README.md").write_text("no data")
    texts = [each.parts[0].text for each in documents(tokenizer, tmp_path)]
    assert texts == ["blue", "red"]


def test_other_names_of_columns_are_told_by_the_run_file(tmp_path: Path, tokenizer: Any) -> None:
    path = write_csv(tmp_path / "a.csv", [{"question": "one ", "answer": "two"}])
    with pytest.raises(
        ConfigError, match="have the keys 'question', 'answer', which is no"
    ) as error:
        documents(tokenizer, path)
    assert error.value.key == "data.dataset.init_args.columns"
    columns = {"prompt": "question", "completion": "answer"}
    (found,) = documents(tokenizer, path, columns=columns)
    assert [part.text for part in found.parts] == ["one ", "two"]


CSV = "prompt,completion\n" + "one,two\n" * 30


@pytest.mark.parametrize(
    ("reader", "name", "content", "told"),
    [
        (ChatJSONL, "a.csv", CSV, "is a CSV file with the columns prompt, completion; set data."),
        (PromptJSONL, "a.jsonl", CSV, "is a CSV file with the columns prompt, completion; set"),
        (
            ChatJSONL,
            "a.jsonl",
            "sharegpt",
            "are ShareGPT ('conversations' with 'from' and 'value')",
        ),
        (ChatJSONL, "a.jsonl", "alpaca", "are Alpaca ('instruction', 'input' and 'output'), but"),
        (ChatJSONL, "a.jsonl", "prompt", "class_path to PromptJSONL, which reads them."),
        (PromptJSONL, "a.jsonl", "messages", "class_path to ChatJSONL, which reads them."),
        (TextJSONL, "a.jsonl", "messages", "class_path to ChatJSONL, which reads them."),
        (PromptJSONL, "a.jsonl", "text", "class_path to TextJSONL, which reads them."),
        (TextJSONL, "a.json", '[\n{"text": "a"}\n]', "is one JSON value, not one per line; set"),
        (TextJSONL, "a.json", '[{"text": "a"}, {"text": "b"}]', "is one JSON value, not one per"),
    ],
)
def test_rows_of_another_format_are_one_message_with_the_key_to_change(
    reader: Any, name: str, content: str, told: str, tmp_path: Path, tokenizer: Any
) -> None:
    path = tmp_path / name
    rows = [ROWS[content]] * 30 if content in ROWS else None
    if rows is None:
        path.write_text(content)
    else:
        write_jsonl(path, rows)
    with pytest.raises(ConfigError) as error:
        reader(path=str(path)).load(tokenizer)
    (problem,) = ConfigErrors([error.value]).problems
    assert told in str(problem)
    assert problem.key == "data.dataset.class_path"
    if "DataFiles" in str(problem):
        assert len(documents(tokenizer, path)) in (1, 2, 30)


def test_the_same_mistake_in_many_rows_is_told_once(tmp_path: Path, tokenizer: Any) -> None:
    good = ROWS["prompt"]
    path = write_jsonl(tmp_path / "a.jsonl", [good, *[{"prompt": "one"}] * 30, {"completion": ""}])
    with pytest.raises(ConfigErrors) as error:
        PromptJSONL(path=str(path)).load(tokenizer)
    assert [str(each) for each in error.value.problems] == [
        f"{path}:2: there is no 'completion'; there is 'prompt'. The same in 29 more rows: 3, 4, 5, 6, 7, ....",
        f"{path}:32: there is no 'prompt'; there is 'completion'.",
    ]


@pytest.mark.parametrize(
    ("line", "column"),
    [('{"text": "a"', 13), ('{"text": "é" "b"}', 14), ('{"text": a}', 10)],
)
def test_the_column_of_broken_json_counts_the_characters_of_its_line(
    line: str, column: int, tmp_path: Path, tokenizer: Any
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "a"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(
        ConfigError, match=rf"a\.jsonl:2: this is not JSON: .* at column {column}\."
    ):
        TextJSONL(path=str(path)).load(tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (
            "a.csv",
            "prompt,completion\na,b\nc\n",
            r"a\.csv:3: this row has 1 values, but the header 2",
        ),
        ("a.csv", "prompt,completion\na,b,c\n", r"a\.csv:2: this row has 3 values, but the header"),
        ("a.csv", 'text\n"a" b\n', r"a\.csv:2: this is not CSV"),
        ("a.csv", "text\n", "is empty"),
        ("a.json", '[{"text": "a"}, 3]', r"a\.json:2: this is a number, but a row must be a JSON"),
        ("a.json", '{"a": {\n"b": 1}}', "is one JSON dict; write a list of objects"),
        ("a.json", "[1", "is not JSON"),
        (
            "a.jsonl",
            '{"conversations": [{"from": "me", "value": "a"}]}',
            "is from 'me', which is not",
        ),
        (
            "a.jsonl",
            '{"input_ids": [1], "labels": [2]}',
            "'labels' has 2 at 0, where 'input_ids' has",
        ),
        ("a.jsonl", '{"input_ids": [99999]}', "'input_ids' has 99999, which is no token"),
        ("a.jsonl", '{"input_ids": ["1"]}', "'input_ids' must be a list of whole numbers"),
        ("a.jsonl", '{"instruction": "a", "output": ""}', "'output' is '', but must be a text"),
        ("a.jsonl", '{"prompt": [], "completion": "a"}', "so 'completion' must be one too"),
    ],
)
def test_what_cannot_be_used_is_told_with_its_place(
    name: str, content: str, told: str, tmp_path: Path, tokenizer: Any
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=told):
        documents(tokenizer, tmp_path / name)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ([], "is an empty list"),
        (["a", "a"], "names a twice; give it a weight instead"),
        ([{"path": "a", "weight": 0}], "the weight of a is 0, but must be above 0"),
        ([{"path": "a", "wieght": 1}], "write a path, {path: a.jsonl, weight: 0.5}, or"),
    ],
)
def test_a_list_of_files_is_checked(path: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        DataFiles(path=path)


def test_texts_and_answers_are_not_mixed(tmp_path: Path, tokenizer: Any) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", [ROWS["text"]])
    prompts = write_jsonl(tmp_path / "b.jsonl", [ROWS["prompt"]])
    with pytest.raises(ConfigError, match=r"a\.jsonl has texts .* and .*b\.jsonl prompts"):
        DataFiles(path=[str(texts), str(prompts)]).load(tokenizer)


@needs_datasets
def test_a_saved_dictionary_of_splits_names_them(tmp_path: Path, tokenizer: Any) -> None:
    datasets = importlib.import_module("datasets")
    datasets.DatasetDict(train=table([ROWS["text"]])).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match=r"several splits; name one of them: .*saved/train"):
        documents(tokenizer, tmp_path / "saved")
    assert len(documents(tokenizer, tmp_path / "saved" / "train")) == 1


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is there")
def test_without_the_package_a_table_says_what_to_install(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1....")
    with pytest.raises(ConfigError, match="needs the package pyarrow: pip install pyarrow"):
        documents(tokenizer, tmp_path / "a.parquet")


def test_a_large_file_is_said_to_be_one_for_streaming(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [ROWS["text"]])
    advice = "data.dataset.init_args.streaming: true keeps its tokens on the disk"
    assert advice not in DataFiles(path=str(path)).load(tokenizer).described
    monkeypatch.setattr(data_files, "_LARGE_BYTES", 10)
    assert advice in DataFiles(path=str(path)).load(tokenizer).described
