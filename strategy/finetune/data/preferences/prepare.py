"""Makes the rows of both sets of a run that is tuned on preferences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from thunder_memsave.finetune.data.data_files import DataFiles
from thunder_memsave.finetune.data.documents import Dataset, DataSplit, Document
from thunder_memsave.finetune.data.preferences.examples import KINDS, Examples, labelled, pairs
from thunder_memsave.finetune.data.preferences.rows import PreferenceRows, laid_into_rows
from thunder_memsave.finetune.data.tokenize import pad_id_of
from thunder_memsave.finetune.run_file.config import PreferenceConfig, RunConfig
from thunder_memsave.settings.problems import ConfigError

_STREAMING = "data.dataset.init_args.streaming"


def check_preferences(dataset: Dataset, config: RunConfig) -> None:
    """Refuse data for preferences that a run cannot learn from, and pairs for a run without preferences.

    Raises:
        ConfigError: says which it is.
    """
    section = config.preference
    if section is None:
        if isinstance(dataset, DataFiles):
            for source in (*dataset.sources, *dataset.validation_sources):
                if source.format.name == "pair":
                    raise _pairs_without_preference(str(source.path))
        return
    if not dataset.has_assistant_part:
        raise ConfigError(
            f"preference.loss is {section.loss}, but rows of {type(dataset).__name__} do not tell apart what an "
            "assistant wrote; give rows with 'chosen' and 'rejected', or remove the section.",
            key="preference",
        )
    if isinstance(dataset, DataFiles) and dataset.streaming:
        raise ConfigError(
            f"{_STREAMING} is true, but data for preference tuning is held in memory; leave it out.",
            key=_STREAMING,
        )


def refuse_pairs(documents: Sequence[Document]) -> None:
    """Refuse pairs for a run without preferences, from a user's own class."""
    for document in documents:
        if document.rejected is not None:
            raise _pairs_without_preference(document.origin)


def _pairs_without_preference(origin: str) -> ConfigError:
    return ConfigError(
        f"the rows of {origin} are pairs of preferences, and the run file does not say what to do with them; add the "
        "section preference: {loss: dpo}, or name the key to learn from, as by format: messages and columns: "
        "{messages: chosen} under data.dataset.init_args.",
        key="data.dataset",
    )


def preference_rows(
    split: DataSplit, config: RunConfig, tokenizer: Any
) -> tuple[PreferenceRows, PreferenceRows | None, str]:
    """Return the rows of both sets, and a summary for the user.

    Raises:
        ConfigError: rows cannot be used, or nothing is left of them.
    """
    train, summary = _rows(split.train, config, tokenizer, name="train")
    validation = None
    if split.validation:
        validation, more = _rows(split.validation, config, tokenizer, name="validation")
        summary = f"{summary}\n{more}"
        # One shape of batch for both.
        room = max(train.examples_per_row, validation.examples_per_row)
        train = replace(train, examples_per_row=room)
        validation = replace(validation, examples_per_row=room)
    return train, validation, summary


def _rows(
    documents: Sequence[Document], config: RunConfig, tokenizer: Any, *, name: str
) -> tuple[PreferenceRows, str]:
    section, data = config.preference, config.data
    assert section is not None
    kind = KINDS[section.loss]
    # Both texts of a pair share a packed row.
    longest = data.max_seq_length // kind.num_samples if data.packing else data.max_seq_length
    make = labelled if section.loss == "kto" else pairs
    found = make(documents, tokenizer, longest=longest, name=name)
    if not found.examples:
        raise ConfigError(
            f"none of the {len(documents)} {name} documents has completions to learn from within {longest} tokens; "
            "look at data.max_seq_length and the data.",
            key="data.max_seq_length",
        )
    most = data.max_documents_per_row
    rows = laid_into_rows(
        found.examples,
        length=data.max_seq_length,
        kind=kind,
        pad_id=pad_id_of(tokenizer),
        packing=data.packing,
        max_examples=None if most is None else most // kind.num_samples,
        # Runs that differ only in their seed are compared on the same validation rows.
        seed=config.train.seed if name == "train" else 0,
    )
    return rows, _summary(found, rows, section, name=name, longest=longest)


def _summary(
    found: Examples, rows: PreferenceRows, section: PreferenceConfig, *, name: str, longest: int
) -> str:
    noun = "labelled texts" if section.loss == "kto" else "pairs"
    text = (
        f"{name}: {len(found.examples)} {noun}, {found.counts.num_targets:,} target tokens "
        f"in {len(rows)} rows of {rows.length}"
    )
    if section.loss == "kto":
        text += f"; {sum(e.is_desirable for e in found.examples)} are desirable"
    text += found.counts.cut_off(name, f"{longest} tokens")
    if found.num_left_out:
        text += (
            f"\n{name}: {found.num_left_out} {noun} are left out, for the completion of a text is beyond its first "
            f"{longest} tokens"
        )
    return text
