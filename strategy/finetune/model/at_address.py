"""Brings a model from an address, such as `s3://bucket/models/llama`, to a directory of this machine, once."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path

from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

from thunder_memsave.checkpoints.addresses import AddressError, FilesAtAddress
from thunder_memsave.finetune.model.safetensors_files import sync_file
from thunder_memsave.measure.disk_table import cache_directory
from thunder_memsave.settings.problems import ConfigError

_KEY = "model.name_or_path"
_WEIGHTS_SUFFIX = ".safetensors"
_PARTIAL = ".partial"


# A second call in this process returns the same files, even if others are written there in between.
@lru_cache(maxsize=8)
def model_from_address(address: str, *, files: Collection[str], with_weights: bool) -> Path:
    """Copy a model's files, unless this machine has them; return their directory.

    One process of the machine copies while the others wait. What was copied is used again as long as the address
    lists the same files, of the same sizes and times or checksums.

    Args:
        address: Of a directory as transformers writes it.
        files: Names of the files to copy if they are there.
        with_weights: Whether to copy the weights, too.

    Raises:
        ConfigError: the address cannot be read, has no such file, or the disk is full.
    """
    try:
        source = FilesAtAddress(address)
        versions = {
            name: version
            for name, version in source.versions().items()
            if name in files or (with_weights and name.endswith(_WEIGHTS_SUFFIX))
        }
        if not versions:
            what = "neither a config.json nor weights" if with_weights else "no tokenizer"
            raise ConfigError(
                f"{_KEY} is {address!r}, which has {what}; check the address.", key=_KEY
            )
        return _copied(source, versions)
    except (AddressError, OSError) as error:
        raise ConfigError(
            f"{_KEY}: {error}; correct the address, or try again when it can be read.", key=_KEY
        ) from error


def _copied(source: FilesAtAddress, versions: Mapping[str, str]) -> Path:
    text = repr((source.address, sorted(versions.items())))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    directory = cache_directory() / "models" / f"{source.address.rpartition('/')[2]}-{digest}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(directory.with_name(f"{directory.name}.lock")):
        if not directory.is_dir():
            _copy(source, versions, directory)
    return directory


def _copy(source: FilesAtAddress, names: Collection[str], directory: Path) -> None:
    """Copy all files; the directory is there once they are."""
    print(f"copying {source.address} to {directory}", file=sys.stderr, flush=True)
    partial = directory.with_name(f"{directory.name}{_PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)  # of a start that was killed
    partial.mkdir()
    try:
        for number, name in enumerate(sorted(names), start=1):
            print(f"[{number}/{len(names)}] {name}", file=sys.stderr, flush=True)
            source.get(name, partial / name)
            sync_file(partial / name)
        os.rename(partial, directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
