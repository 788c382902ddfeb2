"""The data formats: each class reads files into documents and checks every row first."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from thunder_memsave.finetune.data.chat import check_chat, check_variables, render_chat
from thunder_memsave.finetune.data.documents import DataSplit, Document, Part
from thunder_memsave.finetune.data.files.jsonl import read_jsonl, read_text, string_of
from thunder_memsave.finetune.data.files.named_data import Named
from thunder_memsave.finetune.data.files.row_formats import FormatName
from thunder_memsave.settings.problems import ConfigError, belongs_to

# Not the run's seed: runs that differ only in their seed are compared on the same validation set.
_SPLIT_SEED = 0
_ARGUMENTS = "data.dataset.init_args"
_PATH, _VAL_PATH = f"{_ARGUMENTS}.path", f"{_ARGUMENTS}.val_path"


class _JSONL:
    """One JSON object per line."""

    has_assistant_part: bool = True
    continues_in_next_row: bool = False
    rendered: ClassVar[bool] = False
    reads: ClassVar[FormatName]

    def __init__(self, *, path: str, val_path: str | None = None, val_fraction: float = 0.0):
        check_fraction(val_fraction)
        check_one_source(path=path, val_path=val_path, val_fraction=val_fraction)
        self.path = Path(path)
        self.val_path = None if val_path is None else Path(val_path)
        self.val_fraction = val_fraction

    def load(self, tokenizer: Any) -> DataSplit:
        """Read the file, or both files."""
        with belongs_to(_PATH):
            train = self._read(self.path, tokenizer)
        if self.val_path is not None:
            with belongs_to(_VAL_PATH):
                return DataSplit(train=train, validation=self._read(self.val_path, tokenizer))
        return split_documents(train, self.val_fraction, path=self.path)

    def check_rows(self) -> None:
        """Check the files as far as possible without a tokenizer."""
        self.load(None)

    def _read(self, path: Path, tokenizer: Any) -> list[Document]:
        return self._documents(path, lambda row: self.parts(row, tokenizer))

    def _documents(
        self, path: Path, parts: Callable[[Mapping[str, Any]], tuple[Part, ...]]
    ) -> list[Document]:
        reader = type(self).__name__
        return read_jsonl(path, parts, rendered=self.rendered, reads=self.reads, reader=reader)

    def parts(self, row: Mapping[str, Any], tokenizer: Any) -> tuple[Part, ...]:
        """Check one row and cut it into parts."""
        raise NotImplementedError


class TextJSONL(_JSONL):
    """Rows `{"text": ...}`: every token is trained on, long texts continue in the next row.

    The tokenizer adds its own prefix (a `bos_token`, if it has one), and each text
    ends with the `eos_token`.
    """

    has_assistant_part = False
    continues_in_next_row = True
    reads = "text"

    @override
    def parts(self, row: Mapping[str, Any], tokenizer: Any) -> tuple[Part, ...]:
        return (Part(text=string_of(row, "text")),)


class PromptJSONL(_JSONL):
    """Rows `{"prompt": ..., "completion": ...}`, joined without a space in between.

    The `eos_token` follows the completion and is trained on with it; the end of rows that are too long
    is cut off.
    """

    reads = "prompt"

    @override
    def parts(self, row: Mapping[str, Any], tokenizer: Any) -> tuple[Part, ...]:
        prompt, completion = string_of(row, "prompt"), string_of(row, "completion")
        return (Part(text=prompt), Part(text=completion, assistant=True))


class ChatJSONL(_JSONL):
    """Rows `{"messages": [{"role": ..., "content": ...}, ...]}`, rendered by the tokenizer's template.

    All special tokens come from the template, the ends of turns too; the text after the generation
    prompt is trained on. A row may have `tools`, and messages may have any field that the
    template uses (`tool_calls`, ...); an unused field is refused.
    `chat_template_kwargs` gives the template values of further names that it uses, such as
    `enable_thinking` (Qwen3) or `date_string` (Llama 3, which otherwise may write today's date).
    """

    rendered = True
    reads = "messages"

    def __init__(
        self,
        *,
        path: str,
        val_path: str | None = None,
        val_fraction: float = 0.0,
        chat_template_kwargs: dict[str, Any] | None = None,
    ):
        super().__init__(path=path, val_path=val_path, val_fraction=val_fraction)
        self.chat_template_kwargs = chat_template_kwargs or {}

    @override
    def load(self, tokenizer: Any) -> DataSplit:
        if getattr(tokenizer, "chat_template", None) is None:
            raise no_chat_template("ChatJSONL")
        key = f"{_ARGUMENTS}.chat_template_kwargs"
        check_variables(self.chat_template_kwargs, tokenizer, key=key)
        return super().load(tokenizer)

    @override
    def check_rows(self) -> None:
        for key, path in ((_PATH, self.path), (_VAL_PATH, self.val_path)):
            if path is not None:
                with belongs_to(key):
                    self._documents(path, check_chat)

    @override
    def parts(self, row: Mapping[str, Any], tokenizer: Any) -> tuple[Part, ...]:
        return render_chat(row, tokenizer, self.chat_template_kwargs)


class PlainText:
    """A text file, or every `.txt` file of a directory; the end of each is the validation set.

    Each file is one document: it ends with the `eos_token`, and continues from row to row.
    """

    has_assistant_part: bool = False
    continues_in_next_row: bool = True

    def __init__(self, *, path: str, val_fraction: float = 0.0):
        check_fraction(val_fraction)
        self.path = Path(path)
        self.val_fraction = val_fraction

    def check_rows(self) -> None:
        """Check the files; no tokenizer is needed."""
        self.load(None)

    def load(self, tokenizer: Any) -> DataSplit:
        """Read the files and cut the end off each."""
        train, validation = [], []
        for file in _text_files(self.path):
            with belongs_to(_PATH):
                text = read_text(file)
            cut = max(len(text) - round(len(text) * self.val_fraction), 1)
            train.append(Document(parts=(Part(text=text[:cut]),), origin=str(file)))
            if cut < len(text):
                validation.append(Document(parts=(Part(text=text[cut:]),), origin=str(file)))
        if self.val_fraction and not validation:
            raise _empty_split(self.val_fraction, f"each file in {self.path}")
        return DataSplit(train=train, validation=validation)


def no_chat_template(reader: str) -> ConfigError:
    """Make an error about chats for a tokenizer that cannot render them."""
    return ConfigError(
        f"{reader} needs a tokenizer with a chat template, and this one has none; "
        "use PromptJSONL, or add chat_template.jinja to the model's directory.",
        key="data.dataset.class_path",
    )


def check_fraction(val_fraction: float) -> None:
    """Refuse a part of the rows that is not from 0 to 1."""
    if not 0 <= val_fraction < 1:
        raise ConfigError(
            f"val_fraction is {val_fraction}, but must be at least 0 and below 1.",
            key=f"{_ARGUMENTS}.val_fraction",
        )


def check_one_source(*, path: Named, val_path: Named | None, val_fraction: float) -> None:
    """Refuse two sources of validation rows, and what is trained on as one."""
    if val_path is None:
        return
    if val_fraction:
        raise ConfigError(
            "val_path and val_fraction are both given; give one of them.",
            key=_VAL_PATH,
        )
    if _place(val_path) == _place(path):
        raise ConfigError(
            f"val_path is {val_path}, the file that is trained on; give another file, or hold a "
            "part of it out by val_fraction.",
            key=_VAL_PATH,
        )


def _place(named: Named) -> Named | Path:
    return Path(named).resolve() if isinstance(named, str) else named


def split_documents(documents: list[Document], fraction: float, *, path: Path) -> DataSplit:
    """Hold a part of the rows out, the same ones whatever the run's seed."""
    num_validation = num_held_out(len(documents), fraction, path=path)
    held_out = set(random.Random(_SPLIT_SEED).sample(range(len(documents)), num_validation))
    return DataSplit(
        train=[doc for index, doc in enumerate(documents) if index not in held_out],
        validation=[doc for index, doc in enumerate(documents) if index in held_out],
    )


def num_held_out(num_rows: int, fraction: float, *, path: Path) -> int:
    """Return how many rows of a file are for validation; refuse a part that leaves training or validation none."""
    num_validation = round(num_rows * fraction)
    if fraction and not 0 < num_validation < num_rows:
        raise _empty_split(fraction, f"the {num_rows} rows of {path}")
    return num_validation


def _empty_split(fraction: float, of: str) -> ConfigError:
    return ConfigError(
        f"val_fraction {fraction} of {of} leaves an empty training or validation set; change it.",
        key=f"{_ARGUMENTS}.val_fraction",
    )


def _text_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.txt"))
    if not files:
        raise ConfigError(f"the directory {path} has no .txt files.", key=_PATH)
    return files
