"""Reads the data of a run and lays it into rows, before the processes wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from thunder_memsave.finetune.data.documents import Dataset, Document
from thunder_memsave.finetune.data.packing import Rows, pack, pad
from thunder_memsave.finetune.data.tokenize import Sample, TokenizedData, tokenize
from thunder_memsave.finetune.run_file.classes.class_spec import build
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.settings.problems import ConfigError

DATA_MODULE = "thunder_memsave.finetune.data"


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedData:
    """The rows of a run."""

    train: Rows
    validation: Rows | None
    summary: str
    """One line per set for the user: documents, rows, and what was cut."""

    example: Sample
    """The first training sample, for `describe_sample`."""


def prepare_data(config: RunConfig, tokenizer: Any) -> PreparedData:
    """Load, tokenize and pack both sets.

    Raises:
        ConfigError: the dataset's class, arguments, files or rows cannot be used.
    """
    where = "data.dataset"
    dataset: Dataset = build(config.data.dataset, where=where, default_module=DATA_MODULE)
    _check_train_on(dataset, config)
    split = dataset.load(tokenizer)
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
    pad_id = tokenizer.pad_token_id
    pad_id = 0 if pad_id is None else pad_id
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
    return rows, _summary(name, data, rows)


def _summary(name: str, data: TokenizedData, rows: Rows) -> str:
    num_targets = sum(sample.num_targets for sample in data.samples)
    text = (
        f"{name}: {data.num_documents} documents, {num_targets:,} target tokens "
        f"in {len(rows)} rows of {rows.length}"
    )
    if data.num_truncated:
        text += (
            f"\n{name}: {data.num_truncated} documents ({100 * data.num_truncated / data.num_documents:.3g} %) are "
            f"longer than data.max_seq_length ({rows.length}): {data.num_cut_tokens:,} tokens at their ends are left "
            f"out; the longest has {data.longest:,}"
        )
    if data.num_without_targets:
        text += (
            f"\n{name}: {data.num_without_targets} documents are left out, for nothing that is trained on is within "
            f"their first {rows.length} tokens"
        )
    return text
