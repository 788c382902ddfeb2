"""Brings a model from an address, such as `s3://bucket/models/llama`, to a directory of this machine, once."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path

from thunder_memsave.checkpoints.addresses import AddressError, FilesAtAddress
from thunder_memsave.finetune.disk_cache import cached
from thunder_memsave.finetune.model.safetensors_files import sync_file
from thunder_memsave.measure.disk_table import cache_directory
from thunder_memsave.settings.problems import ConfigError

_KEY = "model.name_or_path"
_WEIGHTS_SUFFIX = ".safetensors"


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
    key = f"{source.address.rpartition('/')[2]}-{digest}"

    def copy(directory: Path) -> None:
        print(f"copying {source.address} to {root / key}", file=sys.stderr, flush=True)
        for number, name in enumerate(sorted(versions), start=1):
            print(f"[{number}/{len(versions)}] {name}", file=sys.stderr, flush=True)
            source.get(name, directory / name)
            sync_file(directory / name)

    root = cache_directory() / "models"
    waits_for = f"another process, which copies {source.address}"
    return cached(root, key, copy, is_whole=lambda _: True, waits_for=waits_for)
