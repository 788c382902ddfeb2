"""Files with one mistake each: `DataFiles` refuses each in one message that names the place and what to do."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from thunder_memsave.finetune.data import DataFiles
from thunder_memsave.settings.problems import ConfigError, ConfigErrors

GOOD = '{"prompt": "a", "completion": "b"}\n'
TEXT = '{"text": "a"}\n'


def rows(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def chat(*messages: Any, **more: Any) -> str:
    return rows({"messages": list(messages), **more})


def sharegpt(*turns: Any, **more: Any) -> str:
    return rows({"conversations": list(turns), **more})


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
HUMAN, GPT = {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}
FINE = {"prompt": "a", "completion": "b"}

# Name, contents, and a part of the message.
WHOLE_FILES: Sequence[tuple[str, str | bytes, str]] = [
    ("a.jsonl", "", "is empty"),
    ("a.jsonl", "\n\n  \n", "is empty"),
    ("a.jsonl", b"\xef\xbb\xbf", "is empty"),
    ("a.jsonl", b"\xef\xbb\xbf\n", "is empty"),
    ("a.jsonl", gzip.compress(GOOD.encode()), "is compressed (gzip); unpack it first"),
    ("a.jsonl.gz", gzip.compress(GOOD.encode()), "is compressed (gzip); unpack it first"),
    ("a.jsonl.zst", b"\x28\xb5\x2f\xfd....", "is compressed (zstd)"),
    ("a.jsonl.xz", b"\xfd7zXZ\x00..", "is compressed (xz)"),
    ("a.jsonl.bz2", b"BZh91AY&SY", "is compressed (bzip2)"),
    ("a.zip", b"PK\x03\x04....", "is compressed (zip)"),
    ("a.pdf", b"%PDF-1.7\n...", "is of no kind that is known"),
    ("a.txt", "Once upon a time\n", "is of no kind that is known"),
    ("a.bin", bytes(range(128, 256)), "is of no kind that is known"),
    ("a.pkl", b"\x80\x04\x95\x00\x00", "is of no kind that is known"),
    ("a.xml", "<rows><row/></rows>", "is of no kind that is known"),
    ("a.yaml", "- text: a\n", "is of no kind that is known"),
    ("a.jsonl", GOOD.encode("utf-16"), "is in UTF-16; save it as UTF-8"),
    ("a.csv", b"\xfe\xff\x00t\x00e\x00x\x00t", "is in UTF-16; save it as UTF-8"),
    ("a.jsonl", "\x00\x00\x00\n", "not JSON"),
    ("a.json", "{", "not JSON"),
    ("a.json", "[", "is not JSON"),
    ("a.json", "[1, 2", "is not JSON"),
    ("a.json", "[]", "is empty"),
    ("a.json", "[[]]", "this is a list, but a row must be a JSON object"),
    ("a.json", '["a"]', "this is a text, but a row must be a JSON object"),
    ("a.json", "[null]", "this is null, but a row must be a JSON object"),
    ("a.json", '[{"text": "a"}] trailing', "is not JSON"),
    ("a.json", "[" * 100_000, "not JSON"),
    ("a.json", '{\n"a": 1}', "write a list of objects"),
    ("a.json", '{\n"a": [], "b": []}', "write a list of objects"),
    ("a.json", b'[{"text": "\xe9"}]', "is not JSON"),
    ("a.csv", "text\n", "is empty"),
    ("a.csv", "\n\n", "is empty"),
    ("a.csv", "prompt,completion\na,b\nc\n", "a.csv:3: this row has 1 values, but the header 2"),
    ("a.csv", "prompt,completion\na,b,c\n", "a.csv:2: this row has 3 values, but the header 2"),
    ("a.csv", 'text\n"a" b\n', "a.csv:2: this is not CSV"),
    ("a.csv", 'text\n"a\n', "a.csv:2: this is not CSV"),
    ("a.csv", b"text\n\xe9\n", "a.csv:1: the byte 0xe9 is not UTF-8; save the file as UTF-8"),
    ("a.csv", ",\n1,a\n", "is of no kind that is known"),
    ("a.csv", "prompt,prompt,completion\na,b,c\n", "names the column 'prompt' twice"),
    ("a.csv", ",prompt\n0,a\n", "have the keys 'prompt', which is no format that is known"),
    ("a.csv", "question,answer\na,b\n", "have the keys 'question', 'answer', which is no format"),
    ("a.csv", "prompt;completion\n;b\n", "'prompt' is ''"),
    ("a.tsv", "prompt\tcompletion\na\t\n", "'completion' is ''"),
    ("a.csv", "messages\nhello\n", "there is no 'messages' list"),
    ("a.csv", "input_ids\n1 2 3\n", "'input_ids' must be a list of whole numbers"),
    ("a.parquet", b"PAR1....", "a.parquet"),
    ("a.parquet", "not a table", "is of no kind that is known"),
    ("a.arrow", b"ARROW1\x00\x00....", "a.arrow"),
    ("a.arrow", b"\xff\xff\xff\xff\x10\x00\x00\x00", "a.arrow"),
    ("a.arrow", "", "a.arrow"),
]

LINES: Sequence[tuple[str, str]] = [
    ("{", "this is not JSON"),
    ("}", "this is not JSON"),
    ('{"text": a}', "this is not JSON"),
    ("{'text': 'a'}", "this is not JSON"),
    ('{"text": "a",}', "this is not JSON"),
    ('{"text": "a"} {"text": "b"}', "this is not JSON"),
    ('{"text": NaN}', "NaN is not a JSON number"),
    ('{"text": Infinity}', "Infinity is not a JSON number"),
    ('{"text": "a\tb"}', "this is not JSON"),
    ('{"text": "\\x41"}', "this is not JSON"),
    ('{"prompt": "\\ud800", "completion": "a"}', "half of a surrogate pair"),
    ('{"prompt": "a", "prompt": "b", "completion": "c"}', "the key 'prompt' is given twice"),
    ("[1]", "this is a list, but a row must be a JSON object"),
    ("3", "this is a number, but a row must be a JSON object"),
    ('"a"', "this is a text, but a row must be a JSON object"),
    ("null", "this is null, but a row must be a JSON object"),
    ("[" * 100_000, "nested too deeply"),
    ("9" * 5000, "not JSON that can be read"),
    ("{}", "there is no"),
    ('{"prompt": "a"}', "there is no 'completion'; there is 'prompt'"),
    ('{"completion": "a"}', "there is no 'prompt'; there is 'completion'"),
    ('{"prompt": "", "completion": "a"}', "'prompt' is '', but must be a text"),
    ('{"prompt": "a", "completion": null}', "'completion' is None, but must be a text"),
    ('{"prompt": 1, "completion": "a"}', "'prompt' is 1, but must be a text"),
    ('{"prompt": ["a"], "completion": "a"}', "'prompt' is a list of messages, so 'completion'"),
    ('{"prompt": [], "completion": "a"}', "'prompt' is a list of messages, so 'completion'"),
    ('{"prompt": {"a": 1}, "completion": "a"}', "must be a text"),
]

ROWS: Sequence[tuple[str, str]] = [
    (rows({}), "which is no format that is known"),
    (rows({"question": "a", "answer": "b"}), "have the keys 'question', 'answer', which is no"),
    (rows({"Text": "a"}), "have the keys 'Text', which is no format"),
    (rows({"text": ""}), "'text' is '', but must be a text that is not empty"),
    (rows({"text": None}), "'text' is None"),
    (rows({"text": ["a"]}), "'text' is ['a']"),
    (rows({"text": {"a": "b"}}), "'text' is {'a': 'b'}"),
    (rows({"instruction": "", "output": "b"}), "'instruction' is ''"),
    (rows({"instruction": "a", "output": ""}), "'output' is ''"),
    (rows({"instruction": "a", "input": 3, "output": "b"}), "'input' is 3, but must be a text"),
    (rows({"instruction": ["a"], "output": "b"}), "'instruction' is ['a']"),
    (rows({"messages": []}), "there is no 'messages' list, or it is empty"),
    (rows({"messages": "hello"}), "there is no 'messages' list"),
    (rows({"messages": None}), "there is no 'messages' list"),
    (chat("hello"), "the message 'hello' must have 'role' and 'content'"),
    (chat(USER), "there is no message with the role 'assistant' to learn from"),
    (chat(USER, {"role": "assistant"}), "there is no 'content'"),
    (chat(USER, {"role": "assistant", "content": ""}), "'content' is ''"),
    (chat(USER, {"role": "assistant", "content": None}), "there is no 'content'"),
    (chat(USER, {"role": "assistant", "content": ["b"]}), "'content' is ['b']"),
    (chat(USER, {"content": "b"}), "there is no 'role'"),
    (chat(USER, {"role": 3, "content": "b"}), "'role' is 3"),
    (chat(USER, {"role": "", "content": "b"}), "'role' is ''"),
    (chat({"role": "user"}, ANSWER), "there is no 'content'"),
    (chat(USER, {**ANSWER, "weight": 1}), "a message has 'weight', which the chat template does"),
    (chat(USER, ANSWER, tools=[{"name": "f"}]), "the row has 'tools', which the chat template"),
    (chat(USER, ANSWER, tools="f"), "'tools' is a text, but not of JSON"),
    (chat(USER, ANSWER, tools=["f"]), "'tools' must be a list of JSON objects"),
    (chat(USER, ANSWER, tools={"name": "f"}), "'tools' must be a list of JSON objects"),
    (rows({"prompt": [USER], "completion": [USER]}), "no message with the role 'assistant'"),
    (rows({"prompt": ["a"], "completion": [ANSWER]}), "the message 'a' must have 'role'"),
    (sharegpt(HUMAN), "there is no message with the role 'assistant'"),
    (sharegpt(HUMAN, {"from": "me", "value": "b"}), "the turn is from 'me', which is not known"),
    (sharegpt(HUMAN, {"from": None, "value": "b"}), "the turn is from None"),
    (sharegpt(HUMAN, {"from": "gpt"}), "must have 'from' and 'value'"),
    (sharegpt(HUMAN, "b"), "the turn 'b' must have 'from' and 'value'"),
    (sharegpt(HUMAN, {"from": "gpt", "value": ""}), "'content' is ''"),
    (sharegpt(HUMAN, {"from": "gpt", "value": 3}), "'content' is 3"),
    (sharegpt(HUMAN, GPT, tools=3), "'tools' must be a list of JSON objects"),
    (rows({"input_ids": []}), "'input_ids' must be a list of whole numbers that is not empty"),
    (rows({"input_ids": None}), "'input_ids' must be a list of whole numbers"),
    (rows({"input_ids": "1 2"}), "'input_ids' must be a list of whole numbers"),
    (rows({"input_ids": [1.5]}), "'input_ids' must be a list of whole numbers"),
    (rows({"input_ids": [True]}), "'input_ids' must be a list of whole numbers"),
    (rows({"input_ids": [[1]]}), "'input_ids' must be a list of whole numbers"),
    (rows({"input_ids": [-1]}), "'input_ids' has -1, which is no token"),
    (rows({"input_ids": [10**6]}), "'input_ids' has 1000000, which is no token"),
    (rows({"input_ids": [10**30]}), "which is no token"),
    (rows({"input_ids": [1, 2], "labels": [1]}), "'labels' has 1 numbers, but 'input_ids' 2"),
    (rows({"input_ids": [1, 2], "labels": [1, 3]}), "'labels' has 3 at 1, where 'input_ids' has 2"),
    (rows({"input_ids": [1, 2], "labels": [-1, 2]}), "'labels' has -1 at 0"),
    (rows({"input_ids": [1, 2], "labels": "12"}), "'labels' must be a list of whole numbers"),
]

DIRECTORIES: Sequence[tuple[dict[str, str | bytes], str]] = [
    ({}, "has no data files"),
    ({"README.md": "no data"}, "has no data files"),
    ({"a.jsonl": GOOD, "b.jsonl": ""}, "b.jsonl is empty"),
    ({"a.jsonl": GOOD, "b.jsonl": TEXT}, "a run trains on texts, or on rows that say what"),
    ({"state.json": "{"}, "state.json is not JSON"),
    ({"state.json": "{}"}, "does not say which files have the rows"),
    ({"state.json": '{"_data_files": [{"filename": "../a.arrow"}]}'}, "is no file beside it"),
    ({"state.json": '{"_data_files": [{"filename": "a.arrow"}]}'}, "cannot read the Arrow data"),
    ({"state.json": '{"_data_files": []}'}, "is empty"),
    ({"dataset_dict.json": '{"splits": ["train"]}'}, "has several splits; name one of them: "),
]

CASES = [
    *((name, content, told) for name, content, told in WHOLE_FILES),
    *(("a.jsonl", GOOD + line + "\n" + GOOD, told) for line, told in LINES),
    *(("a.jsonl", content, told) for content, told in ROWS),
]


def refused(path: Path, tokenizer: Any, *, streaming: bool) -> Sequence[ConfigError]:
    with pytest.raises(ConfigError) as error:
        DataFiles(path=str(path), streaming=streaming).load(tokenizer)
    return ConfigErrors([error.value]).problems


def test_there_are_140_bad_files() -> None:
    assert len(CASES) + len(DIRECTORIES) >= 140
    assert len({(name, content) for name, content, _ in CASES}) == len(CASES)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_bad_file_is_one_message(number: int, tmp_path: Path, tokenizer: Any) -> None:
    name, content, told = CASES[number]
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    if name.endswith((".parquet", ".arrow")) and "kind" not in told:
        pytest.importorskip("pyarrow")
    problems = refused(path, tokenizer, streaming=False)
    (problem,) = problems
    assert told in str(problem)
    assert str(path) in str(problem)
    assert len(str(problem)) < 800
    assert problem.key is not None
    if not name.endswith(".json"):
        assert [str(each) for each in refused(path, tokenizer, streaming=True)] == [str(problem)]


@pytest.mark.parametrize("number", range(len(DIRECTORIES)))
def test_a_bad_directory_is_one_message(number: int, tmp_path: Path, tokenizer: Any) -> None:
    files, told = DIRECTORIES[number]
    directory = tmp_path / "data"
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_bytes(content.encode() if isinstance(content, str) else content)
    if {"state.json", "dataset_dict.json"} & files.keys():
        pytest.importorskip("pyarrow")
    (problem,) = refused(directory, tokenizer, streaming=False)
    assert told in str(problem)


def test_what_cannot_be_opened_is_one_message(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    for name, told in [
        ("missing.jsonl", "cannot read the data file"),
        ("loop", "cannot read the data file"),
        ("pipe", "is no file"),
    ]:
        (problem,) = refused(tmp_path / name, tokenizer, streaming=False)
        assert told in str(problem)
