"""Reads JSONL files, checking every row and reporting the bad ones by line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thunder_memsave.finetune.documents import Document, Part
from thunder_memsave.settings import ConfigError

_MAX_REPORTED_ROWS = 10


def read_jsonl(
    path: Path, parts: Callable[[Mapping[str, Any]], tuple[Part, ...]], *, rendered: bool
) -> list[Document]:
    """Make a document of each line that is not empty.

    Args:
        path: The file.
        parts: Checks a row and cuts it into parts; raises `ConfigError` for a bad one.
        rendered: What the documents say of themselves.

    Raises:
        ConfigError: rows cannot be used (the first ten are listed by line), or there are none.
    """
    documents, problems = [], []
    # Not `splitlines`, which also splits at characters that are legal within a JSON string.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
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


def string_of(row: Mapping[str, Any], key: str) -> str:
    """Return a row's text under a key."""
    if key not in row:
        raise ConfigError(f"there is no {key!r}; the row has {', '.join(map(repr, row)) or 'no'}.")
    if not isinstance(row[key], str) or not row[key]:
        raise ConfigError(f"{key!r} is {row[key]!r}, but must be a text that is not empty.")
    return str(row[key])


def messages_of(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a row's conversation; somebody must answer in it."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ConfigError("there is no 'messages' list, or it is empty.")
    for message in messages:
        if not isinstance(message, dict):
            raise ConfigError(f"the message {message!r} must have 'role' and 'content'.")
        string_of(message, "role")
        string_of(message, "content")
    if not any(message["role"] == "assistant" for message in messages):
        raise ConfigError("there is no message with the role 'assistant' to learn from.")
    return messages


def read_text(path: Path) -> str:
    """Return a file's text, which must not be blank."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the data file {path}: {error}") from error
    if not text.strip():
        raise ConfigError(f"the data file {path} is empty.")
    return text
