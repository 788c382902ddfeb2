"""The data formats: each class reads files into documents and checks every row first."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from thunder_memsave.finetune.chat import render_chat
from thunder_memsave.finetune.documents import DataSplit, Document, Part
from thunder_memsave.finetune.jsonl import messages_of, read_jsonl, read_text, string_of
from thunder_memsave.settings import ConfigError

# Not the run's seed: runs that differ in seed only are compared on the same validation set.
_SPLIT_SEED = 0


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
        return read_jsonl(path, lambda row: self.parts(row, tokenizer), rendered=self.rendered)

    def parts(self, row: Mapping[str, Any], tokenizer: Any) -> tuple[Part, ...]:
        """Check one row and cut it into parts."""
        raise NotImplementedError


class TextJSONL(_JSONL):
    """Rows `{"text": ...}`: every token is trained on, long texts go on in the next row."""

    has_assistant_part = False
    continues_in_next_row = True

    @override
    def parts(self, row: Mapping[str, Any], tokenizer: Any) -> tuple[Part, ...]:
        return (Part(text=string_of(row, "text")),)


class PromptJSONL(_JSONL):
    """Rows `{"prompt": ..., "completion": ...}`, joined as they are, without a space between."""

    @override
    def parts(self, row: Mapping[str, Any], tokenizer: Any) -> tuple[Part, ...]:
        prompt, completion = string_of(row, "prompt"), string_of(row, "completion")
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
        return render_chat(messages_of(row), tokenizer)


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
            text = read_text(file)
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


def _text_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.txt"))
    if not files:
        raise ConfigError(f"the directory {path} has no .txt files.")
    return files
