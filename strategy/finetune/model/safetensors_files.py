"""Writes a model's weights as safetensors files of limited size, one in memory at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSpec:
    """Name, shape and dtype of a weight to write."""

    name: str
    """Name in the file."""
    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight in the file."""
        return self.shape.numel() * self.dtype.itemsize


def write_weights(
    directory: Path,
    weights: Iterable[WeightSpec],
    read: Callable[[WeightSpec], Tensor],
    *,
    max_file_bytes: int,
) -> int:
    """Write files and, if several, their index, as transformers does; all are on the disk on return.

    Args:
        directory: Directory to write to.
        weights: Weights in the order in which they are read and written.
        read: Returns a weight, which is cast to its dtype.
        max_file_bytes: Largest file; a larger weight gets a file of its own.

    Returns:
        The bytes of all weights.
    """
    shards = _shards(weights, max_file_bytes)
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = (
            _SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        tensors = {w.name: read(w).to(w.dtype).contiguous() for w in shard}
        save_file(tensors, directory / name, metadata={"format": "pt"})
        del tensors
        sync_file(directory / name)
        file_of.update(dict.fromkeys((w.name for w in shard), name))
    num_bytes = sum(w.num_bytes for shard in shards for w in shard)
    if len(shards) > 1:
        _write_index(directory / _INDEX, file_of, num_bytes)
    return num_bytes


def sync_file(path: Path) -> None:
    """Sync a file's bytes to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _shards(weights: Iterable[WeightSpec], max_file_bytes: int) -> list[list[WeightSpec]]:
    shards: list[list[WeightSpec]] = [[]]
    for weight in weights:
        size = sum(w.num_bytes for w in shards[-1])
        if shards[-1] and size + weight.num_bytes > max_file_bytes:
            shards.append([])
        shards[-1].append(weight)
    return shards


def _write_index(path: Path, file_of: Mapping[str, str], num_bytes: int) -> None:
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(file_of.items()))}
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    sync_file(path)
