from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from harness.language_model import prompt_rows, write_jsonl
from thunder_memsave.finetune.data.documents import Document, Part
from thunder_memsave.finetune.data.formats import ChatJSONL, PlainText, PromptJSONL, TextJSONL
from thunder_memsave.settings.problems import ConfigError, ConfigErrors


def test_prompt_rows_know_what_the_model_is_to_write(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "two ", "completion": "three"}])
    (document,) = PromptJSONL(path=str(path)).load(tokenizer).train
    assert document == Document(
        parts=(Part(text="two "), Part(text="three", assistant=True)), origin=f"{path}:1"
    )


def test_text_rows_are_one_part(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "red"}, {"text": "blue", "extra": 1}])
    documents = TextJSONL(path=str(path)).load(tokenizer).train
    assert [document.parts[0].text for document in documents] == ["red", "blue"]


def test_chat_rows_are_the_templates_text_with_only_the_answers_trained(
    tmp_path: Path, tokenizer: Any
) -> None:
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "list"},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}])
    (document,) = ChatJSONL(path=str(path)).load(tokenizer).train
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert "".join(part.text for part in document.parts) == whole
    assert [part.text for part in document.parts if part.assistant] == ["two<end>", "list<end>"]


def test_plain_text_holds_out_the_end_of_each_file(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.txt").write_text("0123456789")
    (tmp_path / "b.txt").write_text("abcdefghij")
    split = PlainText(path=str(tmp_path), val_fraction=0.2).load(tokenizer)
    assert [document.parts[0].text for document in split.train] == ["01234567", "abcdefgh"]
    assert [document.parts[0].text for document in split.validation] == ["89", "ij"]


def test_the_split_has_every_row_once_and_is_always_the_same(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", prompt_rows(20))
    splits = [PromptJSONL(path=str(path), val_fraction=0.25).load(tokenizer) for _ in range(2)]
    assert splits[0] == splits[1]
    assert len(splits[0].validation) == 5
    origins = {document.origin for document in [*splits[0].train, *splits[0].validation]}
    assert origins == {f"{path}:{number}" for number in range(1, 21)}


def test_a_validation_file_is_read_beside_the_training_file(tmp_path: Path, tokenizer: Any) -> None:
    train = write_jsonl(tmp_path / "a.jsonl", [{"text": "red"}])
    validation = write_jsonl(tmp_path / "b.jsonl", [{"text": "blue"}])
    split = TextJSONL(path=str(train), val_path=str(validation)).load(tokenizer)
    assert [document.parts[0].text for document in split.validation] == ["blue"]


def test_a_line_separator_within_a_json_string_does_not_end_the_row(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\u2028two"}\n\n{"text": "three"}\n', encoding="utf-8")
    documents = TextJSONL(path=str(path)).load(tokenizer).train
    assert [document.origin for document in documents] == [f"{path}:1", f"{path}:3"]


@pytest.mark.parametrize(
    ("dataset", "line", "message"),
    [
        (TextJSONL, '{"text": "a"', r"a\.jsonl:2: this is not JSON: .* at column"),
        (TextJSONL, "[1]", r"a\.jsonl:2: this is a list, but a row must be a JSON object"),
        (TextJSONL, '{"txt": "a"}', r"a\.jsonl:2: there is no 'text'; there is 'txt'"),
        (
            TextJSONL,
            '{"text": ""}',
            r"a\.jsonl:2: 'text' is '', but must be a text that is not empty",
        ),
        (TextJSONL, '{"text": 3}', r"a\.jsonl:2: 'text' is 3, but must be a text"),
        (PromptJSONL, '{"prompt": "a"}', r"a\.jsonl:2: there is no 'completion'"),
        (ChatJSONL, '{"messages": []}', r"a\.jsonl:2: there is no 'messages' list, or it is empty"),
        (ChatJSONL, '{"messages": ["a"]}', r"a\.jsonl:2: the message 'a' must have 'role'"),
        (ChatJSONL, '{"messages": [{"role": "user"}]}', r"a\.jsonl:2: there is no 'content'"),
        (
            ChatJSONL,
            '{"messages": [{"role": "user", "content": "a"}]}',
            r"a\.jsonl:2: there is no message with the role 'assistant'",
        ),
    ],
)
def test_a_malformed_line_is_reported_with_its_number(
    tmp_path: Path, tokenizer: Any, dataset: Any, line: str, message: str
) -> None:
    good = (
        '{"text": "a", "prompt": "a", "completion": "b", '
        '"messages": [{"role": "assistant", "content": "a"}]}'
    )
    path = tmp_path / "a.jsonl"
    path.write_text(f"{good}\n{line}\n")
    with pytest.raises(ConfigError, match=message):
        dataset(path=str(path)).load(tokenizer)


def test_of_malformed_lines_the_first_twenty_reasons_are_shown(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f"{'[' * n}\n" for n in range(1, 23)) + '{"text": "a"}\n')
    with pytest.raises(ConfigErrors) as error:
        TextJSONL(path=str(path)).load(tokenizer)
    messages = [str(problem) for problem in error.value.problems]
    assert [message.split(": this is not")[0] for message in messages[:-1]] == [
        f"{path}:{number}" for number in range(1, 21)
    ]
    assert messages[-1] == f"{path}: 2 more rows cannot be used."


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n", "is empty; write one JSON object per line"),
        (b"\x1f\x8b\x08\x00", r"is compressed \(gzip\); unpack it first"),
        (b"PAR1....", "is in the Parquet format; set data.dataset.class_path to DataFiles"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl:2: the byte 0xff is not UTF-8"),
        (b'[\n{"text": "a"},\n{"text": "b"}\n]\n', "is one JSON value, not one per line"),
        (b'{"text": "a", "n": NaN}', r"a\.jsonl:1: this is not JSON: NaN is not a JSON number"),
        (b'{"text": "a", "text": "b"}', r"a\.jsonl:1: the key 'text' is given twice"),
        (b'{"text": "a\\ud83d"}', r"half of a surrogate pair, '\\ud83d'"),
        (b"[" * 100_000, "JSON nested too deeply"),
        (b'{"text": ["' + b"a" * 1000 + b'"]}', r"'text' is \['a{50,}\.\.\., but must be a text"),
        (b'{"Text": "a"}', "there is no 'text'; there is 'Text'"),
    ],
)
def test_a_file_that_is_not_jsonl_is_refused_by_what_it_is(
    tmp_path: Path, tokenizer: Any, content: bytes, message: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        TextJSONL(path=str(path)).load(tokenizer)


def test_byte_order_marks_carriage_returns_and_long_lines_are_read(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = tmp_path / "a.jsonl"
    long = "red " * 100_000
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": "%s"}' % long.encode())
    documents = TextJSONL(path=str(path)).load(tokenizer).train
    assert [document.parts[0].text for document in documents] == ["one", long]


def test_files_that_are_missing_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the data file .*: No such file"):
        TextJSONL(path=str(tmp_path / "none.jsonl")).load(tokenizer)
    (tmp_path / "binary.txt").write_bytes(b"one\n\xff\xfe\xff")
    with pytest.raises(ConfigError, match=r"binary\.txt:2: the byte 0xff is not UTF-8"):
        PlainText(path=str(tmp_path / "binary.txt")).load(tokenizer)
    (tmp_path / "directory").mkdir()
    with pytest.raises(ConfigError, match=r"has no \.txt files"):
        PlainText(path=str(tmp_path / "directory")).load(tokenizer)
    with pytest.raises(ConfigError, match="is a directory; name a file in it"):
        TextJSONL(path=str(tmp_path / "directory")).load(tokenizer)


def test_a_split_that_is_impossible_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "red"}, {"text": "blue"}])
    with pytest.raises(ConfigError, match="leaves an empty training or validation set"):
        TextJSONL(path=str(path), val_fraction=0.1).load(tokenizer)
    with pytest.raises(ConfigError, match="must be at least 0 and below 1"):
        TextJSONL(path=str(path), val_fraction=1.0)
    with pytest.raises(ConfigError, match="both given"):
        TextJSONL(path=str(path), val_path="b", val_fraction=0.1)


def test_the_validation_file_is_another_than_the_training_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the file that is trained on; give another file"):
        TextJSONL(path="a.jsonl", val_path="./a.jsonl")


def test_a_text_too_short_to_hold_any_out_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(ConfigError, match=r"each file in .* leaves an empty"):
        PlainText(path=str(tmp_path / "a.txt"), val_fraction=0.01).load(tokenizer)


def test_chats_need_a_template(tmp_path: Path, tokenizer_directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="needs a tokenizer with a chat template"):
        ChatJSONL(path="a.jsonl").load(tokenizer)
