"""Says of what stored tokens were made, so that they are used again for the same, and for nothing else."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

from thunder_memsave.finetune.data.data_files import DataFiles
from thunder_memsave.finetune.run_file.config import DataConfig
from thunder_memsave.settings.problems import ConfigError

_FORMAT = 1
"""Of the files; another number makes those of earlier versions unused."""
_PACKAGES = ("thunder-memsave", "transformers", "tokenizers")


def identity_of(dataset: DataFiles, config: DataConfig, tokenizer: Any) -> dict[str, Any]:
    """Return everything that the tokens and rows depend on, as plain values.

    Files are told apart by their path, size, and times of change: reading them whole would take as long as a start.

    Raises:
        ConfigError: a file is not there, or cannot be used.
    """
    sources = [
        [
            str(each.path.resolve()),
            each.kind,
            each.format.name,
            each.weight,
            each.key,
            _state(each.path),
        ]
        for each in (*dataset.sources, *dataset.validation_sources)
    ]
    template = str(tokenizer.chat_template)
    return {
        "format": _FORMAT,
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "sources": sources,
        "columns": dataset.columns,
        "val_fraction": dataset.val_fraction,
        "chat_template_kwargs": dataset.chat_template_kwargs,
        "max_seq_length": config.max_seq_length,
        "packing": config.packing,
        "max_documents_per_row": config.max_documents_per_row,
        "train_on": config.train_on,
        "tokenizer": key_of([tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map]),
        "chat_template": key_of(template),
        # Some templates write it.
        "today": str(datetime.date.today()) if "strftime_now" in template else None,
    }


def check_unchanged(
    identity: dict[str, Any], dataset: DataFiles, config: DataConfig, tokenizer: Any
) -> None:
    """Refuse what was read from files that changed meanwhile."""
    if identity_of(dataset, config, tokenizer) != identity:
        raise ConfigError(
            "the data files changed while they were read; start again when nothing writes to them.",
            key="data.dataset.init_args.path",
        )


def key_of(value: Any) -> str:
    """Return a hash of plain values."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _state(path: Path) -> list[list[Any]]:
    """Return name, size and times of a file, or of all files of a directory."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [_state_of_file(file) for file in files]


def _state_of_file(path: Path) -> list[Any]:
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"cannot read the data file {path}: {error.strerror}.") from error
    # The second time changes with every write and cannot be set, as by `cp -p`.
    return [path.name, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
