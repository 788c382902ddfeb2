"""What every data format is read into: documents, in parts that are trained on or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


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
        """Read everything; raise `ConfigError` for rows that cannot be used, its `place` the file and line."""
