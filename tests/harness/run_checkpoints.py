"""Makes checkpoints of a tiny run, and changes them as tests need."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn

from thunder_memsave.callbacks import ModelCheckpoint
from thunder_memsave.checkpoints.manifest import (
    files_in,
    read_manifest,
    record_file,
    write_manifest,
)


def make_state(fabric: Fabric, value: float, *, step: int) -> dict[str, Any]:
    """Return the state of a run: a model with a frozen bias, and its AdamW after one update; nothing is compiled."""
    torch.manual_seed(0)  # alike on all ranks
    model = nn.Linear(5, 3)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([model.weight], lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    weight = next(p for p in model.parameters() if p.requires_grad)
    with torch.no_grad():
        weight.fill_(value)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": step, "name": "run"}


def save(fabric: Fabric, directory: Path, *, step: int, **more: Any) -> Path:
    """Save a checkpoint whose weights tell its step."""
    state = make_state(fabric, float(step), step=step) | more
    return ModelCheckpoint(directory, keep_last=9).save(fabric, state, step=step)


def weight_of(state: dict[str, Any]) -> float:
    """Read the step from a weight, rounded, because the update has moved it a little."""
    return round(float(next(state["model"].parameters()).data.flatten()[0]) + 0.1, 1)


def sign_again(path: Path) -> None:
    """Make the manifest fit the files as they are, as the author of a hostile checkpoint would."""
    manifest = read_manifest(path)
    names = [name for name in files_in(path) if (path / name).is_file()]
    files = {name: record_file(path, name) for name in names if not (path / name).is_symlink()}
    for name in ("manifest.json", "manifest.sha256"):
        (path / name).unlink()
    write_manifest(path, dataclasses.replace(manifest, files=files))
