"""The data class for files as people have them: several, of any kind, with rows in any known format."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from thunder_memsave.finetune.data.chat import check_variables
from thunder_memsave.finetune.data.documents import DataSplit, Document
from thunder_memsave.finetune.data.files.bad_rows import BadRow, bad_rows
from thunder_memsave.finetune.data.files.hub_data import HubData
from thunder_memsave.finetune.data.files.named_data import (
    Named,
    files_named,
    named_by,
    weights_of,
)
from thunder_memsave.finetune.data.files.read_rows import kind_of, read_rows
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
_LARGE_BYTES = 1024**3
"""Of a file that should be streamed."""
_MOST_BAD = 1000
"""Rows that cannot be used, after which a streamed file is read no further."""
_WEIGHT_SEED = 0  # not the run's: runs that differ only in their seed have the same rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A file, what it is, and how often an epoch has its rows."""

    named: Named
    path: Path
    kind: str
    format: RowFormat
    weight: float
    key: Literal["path", "val_path"]
    """The argument that names it."""

    def described(self, num_rows: int, tokenizer: Any) -> str:
        """Describe in a line what was read."""
        times = "" if self.weight == 1 else f", {self.weight:g} times per epoch"
        where = self.named if isinstance(self.named, HubData) else self.path
        return (
            f"{where}: {self.kind}, {num_rows:,} rows of {shown_as(self.format, tokenizer)}{times}"
        )


class DataFiles:
    """Rows of JSONL, JSON, CSV, Parquet, or a directory that `datasets` saved; their format is recognised.

    A row is a chat (`messages`, with `tools` if it has any), ShareGPT (`conversations`), Alpaca (`instruction`,
    `input`, `output`), `prompt` and `completion`, `text`, or tokens (`input_ids`, with `labels` of -100 where nothing
    is trained on). `thunder-memsave validate` says which. For preference tuning a row is a pair, `chosen` and
    `rejected`, with `prompt` if they do not begin with it; or one of the others with `label`: true or false.

    Args:
        path: A file, a directory of them, `{hub: owner/name}` with `subset`, `split` and `revision` where it needs
            them, or a list of these, each with a `weight` if it is not 1.
        format: The name of the format; `auto` recognises it by the first row of each file.
        columns: Other names of a format's keys in the files, such as `{prompt: question, completion: answer}`.
        val_path: What is for validation, as `path`, but no list.
        val_fraction: Part of the rows of each file that is held out, if there is no `val_path`.
        chat_template_kwargs: Values of further names in the chat template.
        streaming: Whether tokens are kept in files of the cache and read batch by batch, for data beyond the memory.
    """

    def __init__(
        self,
        *,
        path: str | dict[str, Any] | list[str | dict[str, Any]],
        format: Literal[
            "auto", "messages", "sharegpt", "alpaca", "prompt", "pair", "text", "tokens"
        ] = "auto",
        columns: dict[str, str] | None = None,
        val_path: str | dict[str, Any] | None = None,
        val_fraction: float = 0.0,
        chat_template_kwargs: dict[str, Any] | None = None,
        streaming: bool = False,
    ):
        check_fraction(val_fraction)
        self.weights = weights_of(path, key=f"{_ARGUMENTS}.path")
        val_key = f"{_ARGUMENTS}.val_path"
        self.val_path = None if val_path is None else named_by(val_path, key=val_key)
        for each in self.weights:
            check_one_source(path=each, val_path=self.val_path, val_fraction=val_fraction)
        self.format = format
        self.columns = columns or {}
        self.val_fraction = val_fraction
        self.chat_template_kwargs = chat_template_kwargs or {}
        self.streaming = streaming

    @property
    def has_assistant_part(self) -> bool:
        """Whether rows tell apart what the model is to write, which all formats but `text` do."""
        return self.sources[0].format.has_assistant_part

    @property
    def continues_in_next_row(self) -> bool:
        """Whether a long document continues in the next row, which a text does."""
        return not self.has_assistant_part

    def load(self, tokenizer: Any) -> DataSplit:
        """Read all files; each is split by itself, and then repeated by its weight."""
        self.check_tokenizer(tokenizer)
        train: list[Document] = []
        validation: list[Document] = []
        lines = []
        for source in self.sources:
            documents = list(self.documents(source, tokenizer))
            split = split_documents(documents, self.val_fraction, path=source.path)
            train += _repeated(split.train, source.weight)
            validation += split.validation
            lines += [source.described(len(documents), tokenizer), *_if_large(source.path)]
        for source in self.validation_sources:
            validation += self.documents(source, tokenizer)
        return DataSplit(train=train, validation=validation, described="\n".join(lines))

    def check_rows(self) -> None:
        """Check the files as far as possible without a tokenizer."""
        for source in (*self.sources, *self.validation_sources):
            deque(self.documents(source, None), maxlen=0)

    @property
    def validation_sources(self) -> list[Source]:
        """The files of `val_path`, if there is one."""
        if self.val_path is None:
            return []
        with belongs_to(f"{_ARGUMENTS}.val_path"):
            return self._recognised(self.val_path, weight=1.0, key="val_path")

    @cached_property
    def sources(self) -> list[Source]:
        """The files with their formats, which agree on whether rows have a part of an assistant's."""
        with belongs_to(f"{_ARGUMENTS}.path"):
            found = [
                s
                for path, w in self.weights.items()
                for s in self._recognised(path, weight=w, key="path")
            ]
            texts = [source for source in found if not source.format.has_assistant_part]
            if texts and len(texts) < len(found):
                other = next(source for source in found if source.format.has_assistant_part)
                raise ConfigError(
                    f"{texts[0].path} has {texts[0].format.shown} and {other.path} {other.format.shown}; a run trains "
                    "on texts, or on rows that say what the model is to write: leave one of the two out."
                )
        return found

    def _recognised(
        self, named: Named, *, weight: float, key: Literal["path", "val_path"]
    ) -> list[Source]:
        sources = []
        for file in files_named(named):
            kind = kind_of(file)
            if kind == "JSON" and self.streaming:
                raise _not_streamed(file)
            found = self._format_of(file, kind)
            sources.append(
                Source(named=named, path=file, kind=kind, format=found, weight=weight, key=key)
            )
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
            f"for those by {_ARGUMENTS}.columns: {{instruction: question, output: answer}} becomes a chat where the "
            "tokenizer has a chat template; {prompt: question, completion: answer} is taken as it is, without one.",
            key=f"{_ARGUMENTS}.columns",
        )

    def _renamed(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self.columns:
            return row
        return {**row, **{here: row[there] for here, there in self.columns.items() if there in row}}

    def documents(self, source: Source, tokenizer: Any) -> Iterator[Document]:
        """Make the document of each row; None as tokenizer checks the rows as far as possible without one.

        Raises:
            ConfigError: rows cannot be used, which is raised after the last row; or there is none.
        """
        with belongs_to(f"{_ARGUMENTS}.{source.key}"):
            yield from self._documents(source, tokenizer)

    def _documents(self, source: Source, tokenizer: Any) -> Iterator[Document]:
        num_good, bad = 0, []
        for number, row in read_rows(source.path, source.kind):
            try:
                if isinstance(row, ConfigError):
                    raise row
                document = document_of(
                    self._renamed(row),
                    source.format,
                    tokenizer,
                    variables=self.chat_template_kwargs,
                    origin=f"{source.path}:{number}",
                )
            except ConfigError as error:
                bad.append(BadRow(number=number, message=str(error)))
                if self.streaming and len(bad) == _MOST_BAD:  # they are held
                    told = f"{_MOST_BAD:,} rows cannot be used, and the file was not read beyond."
                    bad.append(BadRow(number=number, message=told))
                    break
                continue
            num_good += 1
            yield document
        if bad:
            reads = source.format.name
            if source.kind != "JSONL":
                num_good = 1
            raise bad_rows(source.path, bad, num_good=num_good, reads=reads, reader="DataFiles")
        if not num_good:
            raise ConfigError(f"the data file {source.path} is empty.")

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Refuse chats that the tokenizer cannot render, and values that its template does not use."""
        formats = {source.format.name for source in self.sources}
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


def _if_large(path: Path) -> list[str]:
    """Return a line about a file whose tokens take much memory."""
    num_bytes = 0 if path.is_dir() else path.stat().st_size
    if num_bytes < _LARGE_BYTES:
        return []
    size = f"{num_bytes / 1024**3:.1f} GiB"
    return [f"{path} has {size}; {_ARGUMENTS}.streaming: true keeps its tokens on the disk"]


def _not_streamed(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is one JSON value, which can only be read as a whole; to stream it, write a row per line, "
        f"as by `jq -c '.[]' {path.name} > {path.stem}.jsonl`, or leave streaming out.",
        key=f"{_ARGUMENTS}.streaming",
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


def _repeated(documents: Sequence[Document], weight: float) -> list[Document]:
    """Return documents as often as an epoch has them; of a fraction, always the same ones."""
    whole, part = divmod(weight, 1.0)
    chosen = random.Random(_WEIGHT_SEED).sample(range(len(documents)), round(part * len(documents)))
    return [*documents] * int(whole) + [documents[index] for index in sorted(chosen)]
