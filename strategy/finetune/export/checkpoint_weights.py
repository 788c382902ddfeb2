"""Reads the model in a run's checkpoint in one process, tensor by tensor, whatever the world size was."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from thunder_memsave.checkpoints.manifest import (
    STATE,
    DamagedCheckpointError,
    Manifest,
    read_manifest,
    require_files,
    require_layout,
)
from thunder_memsave.checkpoints.safe_metadata import read_metadata
from thunder_memsave.checkpoints.safe_reader import SafePlanner, SafeReader, require_stored
from thunder_memsave.checkpoints.sources import (
    StateDictSource,
    TensorSource,
    TensorSpec,
    load_mapped,
    require_tensors,
)

MODEL = "model"
"""The key of the model in a run's state."""


class ShardsSource:
    """Whole tensors, assembled from the rows that each process wrote."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            self._metadata: Metadata = read_metadata(directory)
        # It is not documented what unpickling raises for bytes that are no pickle.
        except Exception as error:
            raise DamagedCheckpointError(f"its .metadata cannot be read: {error}") from error
        places = self._metadata.planner_data.items()
        self._flat = {str(path[1]): flat for flat, path in places if path[0] == MODEL}

    def names(self) -> Iterable[str]:
        """Return the model's own names."""
        return self._flat.keys()

    def spec(self, name: str) -> TensorSpec:
        """Return shape and dtype."""
        entry = self._metadata.state_dict_metadata[self._flat[name]]
        assert isinstance(entry, TensorStorageMetadata)
        return TensorSpec(shape=entry.size, dtype=entry.properties.dtype)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Read a whole tensor, or some of its rows."""
        spec = self.spec(name)
        state: dict[str, Any] = {self._flat[name]: torch.empty(spec.shape, dtype=spec.dtype)}
        with warnings.catch_warnings():
            # DCP warns about a single process even if told so.
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or unini")
            self._load(state)
        whole: Tensor = state[self._flat[name]]
        return whole if rows is None else whole[rows]

    def _load(self, state: dict[str, Any]) -> None:
        reader, planner = (
            SafeReader(self._directory, self._metadata),
            SafePlanner(weights_only=True),
        )
        try:
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
        except dcp.CheckpointException as error:  # a BaseException
            raise DamagedCheckpointError(
                f"{next(iter(state))!r} cannot be read: {next(iter(error.failures.values()))[0]}"
            ) from error


def verified_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest and every file that it names, and check that none changed.

    Raises:
        DamagedCheckpointError: one changed, or the checkpoint is not whole.
        OSError: it cannot be read.
    """
    if checkpoint.is_symlink():
        raise DamagedCheckpointError(f"{checkpoint} is a link, and none is followed")
    manifest = read_manifest(checkpoint)
    require_layout(checkpoint, manifest)
    require_files(checkpoint, manifest, manifest.files)
    for name in manifest.files:
        if name.endswith(".pt") or name == STATE:
            require_stored(checkpoint / name)
    return manifest


def model_in(checkpoint: Path) -> TensorSource:
    """Open the model's tensors in a checkpoint that was verified.

    Raises:
        DamagedCheckpointError: its table of contents is invalid.
        ValueError: it holds something other than tensors.
    """
    state = checkpoint / STATE
    if state.is_dir():
        return ShardsSource(state)
    loaded: Mapping[str, Any] = load_mapped(state, weights_only=True)
    return StateDictSource(require_tensors(loaded[MODEL], state))
