"""The data class for files as people have them: several, of any kind, with rows in any known format."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from thunder_memsave.finetune.data.chat import check_variables
from thunder_memsave.finetune.data.documents import DataSplit, Document
from thunder_memsave.finetune.data.files.bad_rows import BadRow, bad_rows
from thunder_memsave.finetune.data.files.read_rows import files_of, kind_of, read_rows
from thunder_memsave.finetune.data.files.row_formats import FORMATS, RowFormat, recognised
from thunder_memsave.finetune.data.formats import (
    check_fraction,
    check_one_source,
    no_chat_template,
    split_documents,
)
from thunder_memsave.finetune.data.row_documents import document_of, shown_as
from thunder_memsave.settings.problems import ConfigError, belongs_to

_ARGUMENTS = "data.dataset.init_args"
_WEIGHT_SEED = 0  # not the run's: runs that differ only in their seed have the same rows


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """A file, what it is, and how often an epoch has its rows."""

    path: Path
    kind: str
    format: RowFormat
    weight: float


class DataFiles:
    """Rows of JSONL, JSON, CSV, Parquet, or a directory that `datasets` saved; their format is recognised.

    A row is a chat (`messages`, with `tools` if it has any), ShareGPT (`conversations`), Alpaca (`instruction`,
    `input`, `output`), `prompt` and `completion`, `text`, or tokens (`input_ids`, with `labels` of -100 where nothing
    is trained on). `thunder-memsave validate` says which.

    Args:
        path: A file, a directory of them, or a list of these; in a list, `{path: ..., weight: 0.5}` too.
        format: The name of the format; `auto` recognises it by the first row of each file.
        columns: Other names of a format's keys in the files, such as `{prompt: question, completion: answer}`.
        val_path: A file or directory for validation.
        val_fraction: Part of the rows of each file that is held out, if there is no `val_path`.
        chat_template_kwargs: Values of further names in the chat template.
    """

    def __init__(
        self,
        *,
        path: str | list[str | dict[str, Any]],
        format: Literal[
            "auto", "messages", "sharegpt", "alpaca", "prompt", "text", "tokens"
        ] = "auto",
        columns: dict[str, str] | None = None,
        val_path: str | None = None,
        val_fraction: float = 0.0,
        chat_template_kwargs: dict[str, Any] | None = None,
    ):
        check_fraction(val_fraction)
        self.weights = _weights(path)
        for each in self.weights:
            check_one_source(path=each, val_path=val_path, val_fraction=val_fraction)
        self.format = format
        self.columns = columns or {}
        self.val_path = val_path
        self.val_fraction = val_fraction
        self.chat_template_kwargs = chat_template_kwargs or {}

    @property
    def has_assistant_part(self) -> bool:
        """Whether rows tell apart what the model is to write, which all formats but `text` do."""
        return self._sources[0].format.has_assistant_part

    @property
    def continues_in_next_row(self) -> bool:
        """Whether a long document continues in the next row, which a text does."""
        return not self.has_assistant_part

    def load(self, tokenizer: Any) -> DataSplit:
        """Read all files; each is split by itself, and then repeated by its weight."""
        self._check_tokenizer(tokenizer)
        train: list[Document] = []
        validation: list[Document] = []
        lines = []
        for source in self._sources:
            with belongs_to(f"{_ARGUMENTS}.path"):
                documents = self._documents(source, tokenizer)
            split = split_documents(documents, self.val_fraction, path=source.path)
            train += _repeated(split.train, source.weight)
            validation += split.validation
            lines.append(_described(source, len(documents), tokenizer))
        if self.val_path is not None:
            with belongs_to(f"{_ARGUMENTS}.val_path"):
                for source in self._recognised(self.val_path, weight=1.0):
                    validation += self._documents(source, tokenizer)
        return DataSplit(train=train, validation=validation, described="\n".join(lines))

    def check_rows(self) -> None:
        """Check the files as far as possible without a tokenizer."""
        for source in self._sources:
            with belongs_to(f"{_ARGUMENTS}.path"):
                self._documents(source, None)

    @cached_property
    def _sources(self) -> list[_Source]:
        """The files with their formats, which agree on whether rows have a part of an assistant's."""
        with belongs_to(f"{_ARGUMENTS}.path"):
            found = [
                s for path, w in self.weights.items() for s in self._recognised(path, weight=w)
            ]
            texts = [source for source in found if not source.format.has_assistant_part]
            if texts and len(texts) < len(found):
                other = next(source for source in found if source.format.has_assistant_part)
                raise ConfigError(
                    f"{texts[0].path} has {texts[0].format.shown} and {other.path} {other.format.shown}; a run trains "
                    "on texts, or on rows that say what the model is to write: leave one of the two out."
                )
        return found

    def _recognised(self, path: str, *, weight: float) -> list[_Source]:
        sources = []
        for file in files_of(Path(path)):
            kind = kind_of(file)
            found = self._format_of(file, kind)
            sources.append(_Source(path=file, kind=kind, format=found, weight=weight))
        return sources

    def _format_of(self, path: Path, kind: str) -> RowFormat:
        if self.format != "auto":
            return FORMATS[self.format]
        rows = (self._renamed(row) for _, row in read_rows(path, kind) if isinstance(row, Mapping))
        first = next(rows, None)
        found = None if first is None else recognised(first)
        if found is not None:
            return found
        if first is None:
            _refuse_unreadable(path, kind)
        keys = ", ".join(map(repr, first or {}))
        known = "; ".join(each.shown for each in FORMATS.values())
        raise ConfigError(
            f"the rows of {path} have the keys {keys}, which is no format that is known: {known}. Say which keys stand "
            f"for those by {_ARGUMENTS}.columns, such as {{prompt: question, completion: answer}}.",
            key=f"{_ARGUMENTS}.columns",
        )

    def _renamed(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self.columns:
            return row
        return {**row, **{here: row[there] for here, there in self.columns.items() if there in row}}

    def _documents(self, source: _Source, tokenizer: Any) -> list[Document]:
        documents, bad = [], []
        for number, row in read_rows(source.path, source.kind):
            try:
                if isinstance(row, ConfigError):
                    raise row
                documents.append(
                    document_of(
                        self._renamed(row),
                        source.format,
                        tokenizer,
                        variables=self.chat_template_kwargs,
                        origin=f"{source.path}:{number}",
                    )
                )
            except ConfigError as error:
                bad.append(BadRow(number=number, message=str(error)))
        if bad:
            reads = source.format.name
            num_good = len(documents) if source.kind == "JSONL" else 1
            raise bad_rows(source.path, bad, num_good=num_good, reads=reads, reader="DataFiles")
        if not documents:
            raise ConfigError(f"the data file {source.path} is empty.")
        return documents

    def _check_tokenizer(self, tokenizer: Any) -> None:
        formats = {source.format.name for source in self._sources}
        has_template = getattr(tokenizer, "chat_template", None) is not None
        if not has_template and formats & {"messages", "sharegpt"}:
            raise no_chat_template(type(self).__name__)
        key = f"{_ARGUMENTS}.chat_template_kwargs"
        if has_template:
            check_variables(self.chat_template_kwargs, tokenizer, key=key)
        elif self.chat_template_kwargs:
            raise ConfigError(
                "chat_template_kwargs is given, but the tokenizer has no chat template; leave it out.",
                key=key,
            )


def _refuse_unreadable(path: Path, kind: str) -> None:
    """Raise what is wrong with a file that has no row."""
    bad = [
        BadRow(number=number, message=str(row))
        for number, row in read_rows(path, kind)
        if isinstance(row, ConfigError)
    ]
    if not bad:
        raise ConfigError(f"the data file {path} is empty.")
    raise bad_rows(path, bad, num_good=1, reads=None, reader="DataFiles")


def _weights(path: str | Sequence[str | Mapping[str, Any]]) -> dict[str, float]:
    """Return the weight of each path, in the order given.

    Raises:
        ConfigError: an entry has other keys, a weight is not above 0, or a path is given twice.
    """
    key = f"{_ARGUMENTS}.path"
    entries = [path] if isinstance(path, str) else list(path)
    if not entries:
        raise ConfigError(f"{key} is an empty list; name a file.", key=key)
    weights: dict[str, float] = {}
    for entry in entries:
        each = {"path": entry} if isinstance(entry, str) else dict(entry)
        if not isinstance(each.get("path"), str) or each.keys() - {"path", "weight"}:
            raise ConfigError(
                f"{key} has {entry!r}; write a path, or {{path: a.jsonl, weight: 0.5}}.", key=key
            )
        weight = each.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < 1e6:
            raise ConfigError(
                f"{key}: the weight of {each['path']} is {weight!r}, but must be above 0.", key=key
            )
        if each["path"] in weights:
            raise ConfigError(
                f"{key} names {each['path']} twice; give it a weight instead.", key=key
            )
        weights[each["path"]] = float(weight)
    return weights


def _repeated(documents: Sequence[Document], weight: float) -> list[Document]:
    """Return documents as often as an epoch has them; of a fraction, always the same ones."""
    whole, part = divmod(weight, 1.0)
    chosen = random.Random(_WEIGHT_SEED).sample(range(len(documents)), round(part * len(documents)))
    return [*documents] * int(whole) + [documents[index] for index in sorted(chosen)]


def _described(source: _Source, num_rows: int, tokenizer: Any) -> str:
    times = "" if source.weight == 1 else f", {source.weight:g} times per epoch"
    return f"{source.path}: {source.kind}, {num_rows:,} rows of {shown_as(source.format, tokenizer)}{times}"
