"""The data formats: each class reads files into documents and checks every row first."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from typing_extensions import override

from thunder_memsave.settings import ConfigError

_MAX_REPORTED_ROWS = 10

# Not the run's seed: runs that differ in seed only are compared on the same validation set.
_SPLIT_SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A piece of a document's text."""

    text: str
    assistant: bool = False
    """Whether the model is to learn to write this piece (a completion, an assistant message)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """Text that belongs together; attention never crosses its ends."""

    parts: tuple[Part, ...]
    origin: str
    """File and line, for messages."""

    rendered: bool = False
    """The text holds its special tokens already, from a chat template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSplit:
    """What is trained on and what is only evaluated."""

    train: Sequence[Document]
    validation: Sequence[Document]


class Dataset(Protocol):
    """What `data.dataset.class_path` must name; our classes and a user's own alike."""

    has_assistant_part: bool
    """Whether documents tell apart what the model writes; decides what `train_on` may be."""

    continues_in_next_row: bool
    """Whether a document longer than a row goes on in the next one, instead of being cut."""

    def load(self, tokenizer: Any) -> DataSplit:
        """Read everything; raise `ConfigError` with file and line for rows that cannot be used."""


class _JSONL:
    """One JSON object per line."""

    has_assistant_part: bool = True
    continues_in_next_row: bool = False
    rendered: ClassVar[bool] = False

    def __init__(self, *, path: str, val_path: str | None = None, val_fraction: float = 0.0):
        _check_split(val_path=val_path, val_fraction=val_fraction)
        self.path = Path(path)
        self.val_path = None if val_path is None else Path(val_path)
        self.val_fraction = val_fraction

    def load(self, tokenizer: Any) -> DataSplit:
        """Read the file, or both files."""
        train = self._read(self.path, tokenizer)
        if self.val_path is not None:
            return DataSplit(train=train, validation=self._read(self.val_path, tokenizer))
        return _split(train, self.val_fraction, path=self.path)

    def _read(self, path: Path, tokenizer: Any) -> list[Document]:
        return _read_jsonl(path, lambda row: self.parts(row, tokenizer), self.rendered)

    def parts(self, row: Mapping[str, Any], tokenizer: Any) -> tuple[Part, ...]:
        """Check one row and cut it into parts."""
        raise NotImplementedError


class TextJSONL(_JSONL):
    """Rows `{"text": ...}`: every token is trained on, long texts go on in the next row."""

    has_assistant_part = False
    continues_in_next_row = True

    @override
    def parts(self, row: Mapping[str, Any], tokenizer: Any) -> tuple[Part, ...]:
        return (Part(text=_string(row, "text")),)


class PromptJSONL(_JSONL):
    """Rows `{"prompt": ..., "completion": ...}`, joined as they are, without a space between."""

    @override
    def parts(self, row: Mapping[str, Any], tokenizer: Any) -> tuple[Part, ...]:
        prompt, completion = _string(row, "prompt"), _string(row, "completion")
        return (Part(text=prompt), Part(text=completion, assistant=True))


class ChatJSONL(_JSONL):
    """Rows `{"messages": [{"role": ..., "content": ...}, ...]}`, by the tokenizer's template."""

    rendered = True

    @override
    def load(self, tokenizer: Any) -> DataSplit:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ConfigError(
                "ChatJSONL needs a tokenizer with a chat template, and this one has none; "
                "use PromptJSONL, or add chat_template.jinja to the model's directory."
            )
        return super().load(tokenizer)

    @override
    def parts(self, row: Mapping[str, Any], tokenizer: Any) -> tuple[Part, ...]:
        return _render_chat(_messages(row), tokenizer)


class PlainText:
    """A text file, or every `.txt` file of a directory; the end of each is the validation set."""

    has_assistant_part: bool = False
    continues_in_next_row: bool = True

    def __init__(self, *, path: str, val_fraction: float = 0.0):
        _check_split(val_path=None, val_fraction=val_fraction)
        self.path = Path(path)
        self.val_fraction = val_fraction

    def load(self, tokenizer: Any) -> DataSplit:
        """Read the files and cut the end off each."""
        train, validation = [], []
        for file in _text_files(self.path):
            text = _read_text(file)
            cut = len(text) - round(len(text) * self.val_fraction)
            train.append(Document(parts=(Part(text=text[:cut]),), origin=str(file)))
            if cut < len(text):
                validation.append(Document(parts=(Part(text=text[cut:]),), origin=str(file)))
        return DataSplit(train=train, validation=validation)


def _check_split(*, val_path: str | None, val_fraction: float) -> None:
    if not 0 <= val_fraction < 1:
        raise ConfigError(f"val_fraction is {val_fraction}, but must be at least 0 and below 1.")
    if val_path is not None and val_fraction:
        raise ConfigError("val_path and val_fraction are both given; give one of them.")


def _split(documents: list[Document], fraction: float, *, path: Path) -> DataSplit:
    num_validation = round(len(documents) * fraction)
    if fraction and not 0 < num_validation < len(documents):
        raise ConfigError(
            f"val_fraction {fraction} of the {len(documents)} rows of {path} leaves an empty "
            "training or validation set; change it, or give val_path."
        )
    held_out = set(random.Random(_SPLIT_SEED).sample(range(len(documents)), num_validation))
    return DataSplit(
        train=[doc for index, doc in enumerate(documents) if index not in held_out],
        validation=[doc for index, doc in enumerate(documents) if index in held_out],
    )


def _read_jsonl(
    path: Path, parts: Callable[[Mapping[str, Any]], tuple[Part, ...]], rendered: bool
) -> list[Document]:
    documents, problems = [], []
    # Not `splitlines`, which also splits at characters that are legal within a JSON string.
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        origin = f"{path} line {number}"
        try:
            row = _json_object(line)
            documents.append(Document(parts=parts(row), origin=origin, rendered=rendered))
        except ConfigError as error:
            problems.append(f"  - {origin}: {error}")
    if problems:
        raise ConfigError(_bad_rows(path, problems))
    if not documents:
        raise ConfigError(f"{path} has no rows; write one JSON object per line.")
    return documents


def _bad_rows(path: Path, problems: Sequence[str]) -> str:
    lines = [f"{path} has {len(problems)} row(s) that cannot be used:"]
    lines += problems[:_MAX_REPORTED_ROWS]
    if len(problems) > _MAX_REPORTED_ROWS:
        lines.append(f"  - and {len(problems) - _MAX_REPORTED_ROWS} more")
    return "\n".join(lines)


def _json_object(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"this is not JSON: {error.msg} at column {error.colno}.") from error
    if not isinstance(row, dict):
        raise ConfigError(f"this is a {type(row).__name__}, but a row must be a JSON object.")
    return row


def _string(row: Mapping[str, Any], key: str) -> str:
    if key not in row:
        raise ConfigError(f"there is no {key!r}; the row has {', '.join(map(repr, row)) or 'no'}.")
    if not isinstance(row[key], str) or not row[key]:
        raise ConfigError(f"{key!r} is {row[key]!r}, but must be a text that is not empty.")
    return str(row[key])


def _messages(row: Mapping[str, Any]) -> list[dict[str, str]]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ConfigError("there is no 'messages' list, or it is empty.")
    for message in messages:
        if not isinstance(message, dict):
            raise ConfigError(f"the message {message!r} must have 'role' and 'content'.")
        _string(message, "role")
        _string(message, "content")
    if not any(message["role"] == "assistant" for message in messages):
        raise ConfigError("there is no message with the role 'assistant' to learn from.")
    return messages


def _render_chat(messages: list[dict[str, str]], tokenizer: Any) -> tuple[Part, ...]:
    """Render the growing conversation, so that each assistant message is what it adds."""
    parts: list[Part] = []
    done = ""
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = _render(messages[:index], tokenizer, add_generation_prompt=True)
            parts.append(Part(text=_added(prompt, done)))
            done = prompt
        whole = _render(messages[: index + 1], tokenizer)
        parts.append(Part(text=_added(whole, done), assistant=message["role"] == "assistant"))
        done = whole
    return tuple(parts)


def _render(messages: list[dict[str, str]], tokenizer: Any, **options: bool) -> str:
    if not messages:
        return ""
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def _added(text: str, done: str) -> str:
    if not text.startswith(done):
        raise ConfigError(
            "the chat template rewrites earlier messages when later ones follow, so the "
            "assistant's tokens cannot be told apart; give single-turn conversations."
        )
    return text[len(done) :]


def _text_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.txt"))
    if not files:
        raise ConfigError(f"the directory {path} has no .txt files.")
    return files


def _read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the data file {path}: {error}") from error
    if not text.strip():
        raise ConfigError(f"the data file {path} is empty.")
    return text
