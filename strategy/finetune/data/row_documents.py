"""Makes the document of one row, by its format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from thunder_memsave.finetune.data.chat import check_chat, render_chat
from thunder_memsave.finetune.data.documents import Document, Part
from thunder_memsave.finetune.data.files.jsonl import check_encodable, string_of
from thunder_memsave.finetune.data.files.row_formats import (
    Row,
    RowFormat,
    alpaca_messages,
    alpaca_prompt,
    as_messages,
)
from thunder_memsave.finetune.data.pair_documents import pair_of
from thunder_memsave.settings.problems import ConfigError

_IGNORED = -100
_LABELS = {"true": True, "false": False, "1": True, "0": False}


def document_of(
    row: Row, of: RowFormat, tokenizer: Any, *, variables: Mapping[str, Any], origin: str
) -> Document:
    """Check one row and make its document.

    Args:
        row: The row.
        of: Its format.
        tokenizer: Of the model; None checks the row as far as possible without one.
        variables: Values of further names in the chat template.
        origin: The file and the row in it, for messages.

    Raises:
        ConfigError: the row cannot be used.
    """
    if of.name == "tokens":
        return _of_tokens(row, tokenizer, origin=origin)
    if of.name == "pair":
        return pair_of(row, tokenizer, variables=variables, origin=origin)
    chat = _chat(row, of, tokenizer)
    if chat is not None:
        is_checked_only = tokenizer is None
        parts = check_chat(chat) if is_checked_only else render_chat(chat, tokenizer, variables)
    elif of.name == "text":
        parts = (Part(text=string_of(row, "text")),)
    else:
        asked = _checked_alpaca(row, alpaca_prompt) if of.name == "alpaca" else row
        prompt, completion = string_of(asked, "prompt"), string_of(asked, "completion")
        parts = (Part(text=prompt), Part(text=completion, assistant=True))
    check_encodable(parts)
    return Document(parts=parts, origin=origin, rendered=chat is not None, label=_label_of(row))


def shown_as(of: RowFormat, tokenizer: Any) -> str:
    """Describe a format, and what becomes of it where that depends on the tokenizer."""
    if of.name != "alpaca":
        return of.shown
    is_chat = _has_template(tokenizer)
    return f"{of.shown}, {'as chats' if is_chat else 'in the words of Stanford Alpaca'}"


def _label_of(row: Row) -> bool | None:
    """Return whether a row is labelled as desirable; None: it has no such label."""
    return _LABELS.get(str(row.get("label")).lower())


def _chat(row: Row, of: RowFormat, tokenizer: Any) -> Row | None:
    """Return the row with `messages`, if it is rendered by the chat template."""
    if of.name == "messages":
        return row
    if of.name == "sharegpt":
        return as_messages(row)
    if of.name == "alpaca" and _has_template(tokenizer):
        return _checked_alpaca(row, alpaca_messages)
    if of.name == "prompt" and isinstance(row.get("prompt"), list):
        # TRL's conversational form: both are lists of messages.
        if not isinstance(row.get("completion"), list):
            raise ConfigError("'prompt' is a list of messages, so 'completion' must be one too.")
        return {"messages": [*row["prompt"], *row["completion"]], "tools": row.get("tools")}
    return None


def _checked_alpaca(row: Row, make: Any) -> Row:
    string_of(row, "instruction")
    string_of(row, "output")
    if not isinstance(row.get("input") or "", str):
        raise ConfigError(f"'input' is {row['input']!r}, but must be a text, or empty.")
    made: Row = make(row)
    return made


def _has_template(tokenizer: Any) -> bool:
    return getattr(tokenizer, "chat_template", None) is not None


def _of_tokens(row: Row, tokenizer: Any, *, origin: str) -> Document:
    ids = _numbers(row, "input_ids")
    labels = _numbers(row, "labels") if row.get("labels") is not None else ids
    if len(labels) != len(ids):
        raise ConfigError(f"'labels' has {len(labels)} numbers, but 'input_ids' {len(ids)}.")
    wrong = next(
        (i for i, (a, b) in enumerate(zip(ids, labels, strict=True)) if b not in (a, -100)), None
    )
    if wrong is not None:
        raise ConfigError(
            f"'labels' has {labels[wrong]} at {wrong}, where 'input_ids' has {ids[wrong]}; a label is the token at its "
            f"own place, or {_IGNORED}: targets are moved by one here."
        )
    if min(ids) < 0 or (tokenizer is not None and max(ids) >= len(tokenizer)):
        worst = min(ids) if min(ids) < 0 else max(ids)
        raise ConfigError(f"'input_ids' has {worst}, which is no token of the model's tokenizer.")
    trained = tuple(label != _IGNORED for label in labels)
    return Document(parts=(), origin=origin, rendered=True, tokens=tuple(ids), trained=trained)


def _numbers(row: Row, key: str) -> Sequence[int]:
    value = row.get(key)
    if not isinstance(value, list) or not value or not all(type(n) is int for n in value):
        raise ConfigError(f"{key!r} must be a list of whole numbers that is not empty.")
    return value
