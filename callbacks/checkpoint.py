"""Saves the whole state of a run every n steps; a run goes on from there bit-exactly."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from thunder_memsave.callbacks.random_state import random_state, set_random_state

_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL_PREFIX = ".partial-"
_INFO = "checkpoint.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """What can be said of a checkpoint without loading it."""

    path: Path
    world_size: int
    """How many ranks wrote it; each has its own random state, so as many must go on."""

    values: dict[str, Any]
    """The plain entries of the state, such as `step`."""


class ModelCheckpoint:
    """Writes `step-<n>/` directories, each complete or not there at all.

    A directory holds what `fabric.save` writes, every rank's random state, and `checkpoint.json`.
    It gets its name by a rename when all ranks are done, so that a kill at any time leaves the
    checkpoints before it as they were. All ranks write to the same file system.

    Args:
        directory: Where to.
        every_n_steps: Steps between two checkpoints; None saves at the end only.
        keep_last: How many stay. A run that went back to an earlier checkpoint replaces the later
            ones with its first.
    """

    def __init__(
        self, directory: str | Path, *, every_n_steps: int | None = None, keep_last: int = 2
    ) -> None:
        self.directory = Path(directory)
        self.every_n_steps = every_n_steps
        self.keep_last = keep_last
        self._saved_step: int | None = None
        self._is_resumed = False

    def on_train_start(self, *, step: int) -> None:
        """Note the step that the run starts from: its checkpoint is there."""
        self._saved_step = step or None
        self._is_resumed = step > 0

    def on_train_batch_end(self, *, fabric: Fabric, step: int, state: Mapping[str, Any]) -> None:
        """Save if it is time."""
        if self.every_n_steps is not None and step % self.every_n_steps == 0:
            self.save(fabric, state, step=step)

    def on_train_end(self, *, fabric: Fabric, step: int, state: Mapping[str, Any]) -> None:
        """Save the end, unless its step was saved already."""
        if self._saved_step != step:
            self.save(fabric, state, step=step)

    def save(self, fabric: Fabric, state: Mapping[str, Any], *, step: int) -> Path:
        """Write one checkpoint. A collective; every rank returns its path."""
        final = self.directory / f"step-{step:08d}"
        partial = self.directory / f"{_PARTIAL_PREFIX}{final.name}"
        if fabric.is_global_zero:
            self._remove_partial()
            partial.mkdir(parents=True)
        fabric.barrier()
        fabric.save(partial / "state", dict(state))
        torch.save(random_state(fabric.device), partial / _random_file(fabric.global_rank))
        fabric.barrier()
        if fabric.is_global_zero:
            _write_info(partial, state, world_size=fabric.world_size)
            _commit(partial, final)
            self._prune(step)
        fabric.barrier()
        self._saved_step = step
        fabric.call("on_save_checkpoint", fabric=fabric, step=step, path=final)
        return final

    def _remove_partial(self) -> None:
        for left_over in self.directory.glob(f"{_PARTIAL_PREFIX}*"):
            shutil.rmtree(left_over)

    def _prune(self, step: int) -> None:
        found = list_checkpoints(self.directory)
        until_here = [path for path in found if _step_of(path) <= step]
        # Later ones are of the way that a resumed run left, and `auto` must not go on from them.
        left = found[len(until_here) :] if self._is_resumed else []
        for old in [*until_here[: -self.keep_last], *left]:
            # Renamed first: a kill while files go would leave half a checkpoint under its name.
            doomed = old.with_name(f"{_PARTIAL_PREFIX}{old.name}")
            os.replace(old, doomed)
            shutil.rmtree(doomed)


def list_checkpoints(directory: Path) -> list[Path]:
    """List the complete checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def read_info(path: Path) -> CheckpointInfo:
    """Read what a checkpoint says of itself."""
    content = json.loads((path / _INFO).read_text(encoding="utf-8"))
    return CheckpointInfo(path=path, world_size=content["world_size"], values=content["values"])


def load_checkpoint(fabric: Fabric, info: CheckpointInfo, state: dict[str, Any]) -> None:
    """Fill `state` from a checkpoint and put back this rank's random state. A collective."""
    fabric.load(info.path / "state", state)
    file = info.path / _random_file(fabric.global_rank)
    set_random_state(torch.load(file, weights_only=True), fabric.device)


def _random_file(rank: int) -> str:
    return f"random-{rank:05d}.pt"


def _write_info(directory: Path, state: Mapping[str, Any], *, world_size: int) -> None:
    values = {key: value for key, value in state.items() if isinstance(value, int | float | str)}
    content = {"world_size": world_size, "values": values}
    (directory / _INFO).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _commit(partial: Path, final: Path) -> None:
    """Give a finished directory its name, also over one that an earlier attempt left."""
    if final.exists():
        old = final.with_name(f"{_PARTIAL_PREFIX}old-{final.name}")
        os.replace(final, old)
        os.replace(partial, final)
        shutil.rmtree(old)
    else:
        os.replace(partial, final)
