"""Finds a model's files: in a directory, at an address, or on the Hugging Face hub, through the hub's own cache."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]
from huggingface_hub.utils import tqdm as hub_tqdm  # type: ignore[attr-defined]
from safetensors import SafetensorError, safe_open

from thunder_memsave.compat.foreign_messages import first_line
from thunder_memsave.finetune.model.at_address import model_from_address
from thunder_memsave.finetune.run_file.config import ModelConfig
from thunder_memsave.settings.fsspec_address import is_address
from thunder_memsave.settings.problems import ConfigError

_KEY = "model.name_or_path"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_MODEL_FILES = ("config.json", "generation_config.json", _INDEX)
_MAX_NAMED = 5

# An owner's name, if any, and the model's; `./x`, `../x`, `x/y/z` and `/x` are paths.
_HUB_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")


def is_hub_name(settings: ModelConfig) -> bool:
    """Tell whether the model is not a local directory, and may be one on the hub."""
    name = settings.name_or_path
    return not _as_path(name).is_dir() and _HUB_NAME.fullmatch(name) is not None


def model_directory(settings: ModelConfig) -> Path:
    """Find the directory with the tokenizer and, unless `model.config` is given, config and weights.

    From the hub or an address only these files are fetched, none in other formats and none from subdirectories.
    One process per machine downloads while the others wait. A second call in this process returns
    the same snapshot, even if somebody pushes in between.

    Raises:
        ConfigError: there is no such model, or its files cannot be fetched or used.
    """
    name, revision = settings.name_or_path, settings.revision
    with_weights = settings.config is None
    path = _as_path(name)
    is_elsewhere = is_address(name)
    if not path.is_dir() and not is_elsewhere:
        directory = _from_hub(name, revision, with_weights)
    elif revision is not None:
        what = "an address" if is_elsewhere else f"the directory {path}"
        raise ConfigError(
            f"model.revision is {revision!r}, but model.name_or_path is {what}; "
            "revisions are the hub's: leave it out.",
            key="model.revision",
        )
    elif is_elsewhere:
        directory = model_from_address(name, files=_small(with_weights), with_weights=with_weights)
    else:
        directory = path
    if with_weights:
        _check_weights(directory)
    return directory


def _small(with_weights: bool) -> tuple[str, ...]:
    """Names of the files beside the weights."""
    return (*_TOKENIZER_FILES, *_MODEL_FILES) if with_weights else _TOKENIZER_FILES


def _as_path(name: str) -> Path:
    return Path(name).expanduser()


# A directory is not remembered: a relative path means another one when the process works elsewhere.
@lru_cache(maxsize=8)
def _from_hub(name: str, revision: str | None, with_weights: bool) -> Path:
    if _HUB_NAME.fullmatch(name) is None:
        raise ConfigError(
            f"model.name_or_path is {name!r}, which is not a directory here, and no name on the "
            "hub either, such as org/name; check the path.",
            key=_KEY,
        )
    with _only_one_process(name):
        directory = _fetch(name, revision, files=_small(with_weights), progress=False)
        if with_weights:
            _fetch_weights(name, directory)
    return directory


def _fetch_weights(name: str, directory: Path) -> None:
    missing = [file for file in _weight_files(directory) if not (directory / file).exists()]
    if not missing:
        return
    if not constants.is_offline_mode():
        count = f"{len(missing)} weight file{'s' if len(missing) > 1 else ''}"
        print(f"fetching {count} of {name} from the hub", file=sys.stderr, flush=True)
    # By its commit, which is the snapshot's name: the branch may have moved.
    _fetch(name, directory.name, files=(*missing, "config.json"), progress=True)


def _fetch(name: str, revision: str | None, *, files: Sequence[str], progress: bool) -> Path:
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(files),
                tqdm_class=hub_tqdm if progress else _NoBar,
            )
        )
    except RevisionNotFoundError as error:
        raise ConfigError(
            f"model.revision is {revision!r}, which {name} does not have on the hub; name one of "
            "its branches, tags or commits.",
            key="model.revision",
        ) from error
    except (HTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise ConfigError(
            f"model.name_or_path is {name!r}, {_why(error, name)}", key=_KEY
        ) from error


def _why(error: Exception, name: str) -> str:
    """Explain the hub's error and what to do, to continue a sentence."""
    if isinstance(error, GatedRepoError):
        return (
            "whose licence must be accepted on its page on the hub; after that, log in here with "
            "`hf auth login`."
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            "which is neither a directory here nor a model on the hub; check the spelling, or if "
            "it is private, log in with `hf auth login`."
        )
    if isinstance(error, LocalEntryNotFoundError) and constants.is_offline_mode():
        return (
            "which is not a directory here and not wholly in the hub's cache, and HF_HUB_OFFLINE "
            f"is set; unset it, or fetch the model with `hf download {name}`."
        )
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        return _why(error.__cause__, name)
    if isinstance(error, HfHubHTTPError):
        return f"which the hub refuses to give: {_first_line(error)}"
    if isinstance(error, HFValidationError):
        return f"which cannot be a name on the hub: {_first_line(error)}"
    return (
        f"which is not a directory here, and fetching it from the hub failed: {_first_line(error)} "
        "Check the network and the disk, or name a local directory."
    )


def _first_line(error: Exception) -> str:
    return f"{first_line(error).rstrip('.')}."


class _NoBar(hub_tqdm):
    """An invisible progress bar, for small files."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "disable": True})  # type: ignore[no-untyped-call]


@contextmanager
def _only_one_process(name: str) -> Iterator[None]:
    """Let one process of this user on this machine go on at a time, per model."""
    # A lock beside the cache would be simpler, but a cache may be read-only, or shared by machines.
    key = f"{constants.HF_HUB_CACHE} {name}"
    number = sha256(key.encode()).hexdigest()[:16]
    lock = Path(tempfile.gettempdir()) / f"thunder_memsave-{os.getuid()}-{number}.lock"
    with WeakFileLock(lock):
        yield


def _weight_files(directory: Path) -> list[str]:
    index = directory / _INDEX
    if not index.is_file():
        return [_WEIGHTS]
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"model.name_or_path: {index} is damaged ({type(error).__name__}: {error}); get it "
            "again.",
            key=_KEY,
        ) from error


def _check_weights(directory: Path) -> None:
    """Open every file, which detects missing and truncated ones; values are not read."""
    files = _weight_files(directory)
    missing = [file for file in files if not (directory / file).exists()]
    if missing == [_WEIGHTS]:
        raise ConfigError(
            f"model.name_or_path: {directory} has neither {_WEIGHTS} nor {_INDEX}"
            f"{_other_weights(directory)}; weights are read from safetensors files, which "
            "save_pretrained of transformers writes.",
            key=_KEY,
        )
    if missing:
        more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        raise ConfigError(
            f"model.name_or_path: {directory / _INDEX} names {len(files)} files, of which "
            f"{', '.join(missing[:_MAX_NAMED])}{more} cannot be found; get the model again.",
            key=_KEY,
        )
    for file in files:
        _check_whole(directory / file)


def _other_weights(directory: Path) -> str:
    others = sorted(file.name for file in directory.iterdir() if file.suffix in (".bin", ".gguf"))
    return f", only {others[0]}" if others else ""


def _check_whole(path: Path) -> None:
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"model.name_or_path: {path} is damaged or cut short ({error}); delete it and get it "
            "again.",
            key=_KEY,
        ) from error
