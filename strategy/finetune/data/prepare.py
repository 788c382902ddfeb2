"""Reads the data of a run and lays it into rows, before the processes wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from thunder_memsave.finetune.data.batches import Order
from thunder_memsave.finetune.data.data_files import DataFiles
from thunder_memsave.finetune.data.documents import Dataset, DataSplit, Document
from thunder_memsave.finetune.data.packing import Rows, pack, pad
from thunder_memsave.finetune.data.preferences.prepare import (
    check_preferences,
    preference_rows,
    refuse_pairs,
)
from thunder_memsave.finetune.data.preferences.rows import PreferenceRows
from thunder_memsave.finetune.data.stored.stored_data import stored_data
from thunder_memsave.finetune.data.tokenize import Sample, pad_id_of, tokenize
from thunder_memsave.finetune.run_file.classes.class_spec import build
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.settings.problems import ConfigError

DATA_MODULE = "thunder_memsave.finetune.data"


RowsT = TypeVar("RowsT", Rows, PreferenceRows)


@dataclass(frozen=True, kw_only=True)
class PreparedData(Generic[RowsT]):
    """The rows of a run."""

    train: RowsT
    validation: RowsT | None
    summary: str
    """One line per set for the user: documents, rows, and what was cut."""

    example: Sample
    """The first training sample, for `describe_sample`."""

    rejected: Sample | None = None
    """The one that it is preferred to, in a pair."""

    order: Order = "listed"
    """How an epoch's order of the training rows is made."""


def prepare_data(config: RunConfig, tokenizer: Any) -> PreparedData[Any]:
    """Load, tokenize and pack both sets.

    Raises:
        ConfigError: the dataset's class, arguments, files or rows cannot be used.
    """
    where = "data.dataset"
    dataset: Dataset = build(config.data.dataset, where=where, default_module=DATA_MODULE)
    _check_train_on(dataset, config)
    check_preferences(dataset, config)
    if isinstance(dataset, DataFiles) and dataset.streaming:
        return _streamed(dataset, config, tokenizer)
    split = dataset.load(tokenizer)
    if config.preference is not None:
        return _preferences(split, config, tokenizer)
    refuse_pairs(split.train)
    train, summary = _rows(split.train, dataset, config, tokenizer, name="train")
    validation = None
    if split.validation:
        validation, more = _rows(split.validation, dataset, config, tokenizer, name="validation")
        summary = f"{summary}\n{more}"
        # One shape of batch for both.
        num_documents = max(train.num_documents, validation.num_documents)
        train = replace(train, num_documents=num_documents)
        validation = replace(validation, num_documents=num_documents)
    if split.described:
        summary = f"{split.described}\n{summary}"
    return PreparedData(
        train=train, validation=validation, summary=summary, example=train.samples[0]
    )


def _preferences(
    split: DataSplit, config: RunConfig, tokenizer: Any
) -> PreparedData[PreferenceRows]:
    train, validation, summary = preference_rows(split, config, tokenizer)
    first, *others = train.examples[0].samples
    return PreparedData(
        train=train,
        validation=validation,
        summary=f"{split.described}\n{summary}" if split.described else summary,
        example=first,
        rejected=others[0] if others else None,
    )


def _streamed(dataset: DataFiles, config: RunConfig, tokenizer: Any) -> PreparedData[Rows]:
    data = stored_data(dataset, config.data, tokenizer)
    return PreparedData(
        train=data.train,
        validation=data.validation,
        summary=data.summary,
        example=data.train.samples[0],
        order="computed",
    )


def _check_train_on(dataset: Dataset, config: RunConfig) -> None:
    if config.data.train_on == "assistant" and not dataset.has_assistant_part:
        raise ConfigError(
            f"data.train_on is 'assistant', but rows of {type(dataset).__name__} do not tell apart "
            "what an assistant wrote; set it to 'all' or leave it out.",
            key="data.train_on",
        )


def _rows(
    documents: Sequence[Document], dataset: Dataset, config: RunConfig, tokenizer: Any, *, name: str
) -> tuple[Rows, str]:
    length = config.data.max_seq_length
    data = tokenize(
        documents,
        tokenizer,
        max_seq_length=length,
        assistant_only=dataset.has_assistant_part and config.data.train_on != "all",
        continue_long=dataset.continues_in_next_row,
        name=name,
    )
    pad_id = pad_id_of(tokenizer)
    if config.data.packing:
        # Runs that differ only in their seed are compared on the same validation rows, even if their number is limited.
        seed = config.train.seed if name == "train" else 0
        rows = pack(
            data.samples,
            length=length,
            pad_id=pad_id,
            seed=seed,
            max_documents=config.data.max_documents_per_row,
        )
    else:
        rows = pad(data.samples, length=length, pad_id=pad_id)
    return rows, data.counts.described(name, num_rows=len(rows), length=length)
