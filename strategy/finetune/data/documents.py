"""The documents that every data format is read into: text in parts that are trained on or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A piece of a document's text."""

    text: str
    assistant: bool = False
    """Whether the model learns to write this piece (a completion, an assistant message)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A text that attention treats as one: it never crosses the ends."""

    parts: tuple[Part, ...]
    origin: str
    """File and line, for messages."""

    rendered: bool = False
    """Whether the text contains its special tokens already, from a chat template."""

    tokens: tuple[int, ...] | None = None
    """Of a document that was tokenized before: its tokens in place of parts, and nothing is added to them."""

    trained: tuple[bool, ...] = ()
    """Whether each of `tokens` is trained on."""

    rejected: Document | None = None
    """Of a pair of preferences: the text that this one is preferred to."""

    label: bool | None = None
    """Whether the text is desirable, if its row says so by `label`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSplit:
    """Documents for training, and documents that are only evaluated."""

    train: Sequence[Document]
    validation: Sequence[Document]
    described: str = ""
    """What was read, a line per file; may be empty."""


class Dataset(Protocol):
    """The interface of `data.dataset.class_path`, for our classes and a user's own."""

    has_assistant_part: bool
    """Whether documents mark the text that the model writes; decides what `train_on` may be."""

    continues_in_next_row: bool
    """Whether a document longer than a row continues in the next one, instead of being cut."""

    def load(self, tokenizer: Any) -> DataSplit:
        """Read everything; raise `ConfigError` for unusable rows, with the file and line as its `place`."""
