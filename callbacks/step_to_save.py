"""One checkpoint to save: its contents, and how all ranks write and commit it."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn

from thunder_memsave.callbacks.all_ranks import on_all_ranks
from thunder_memsave.callbacks.step_directories import (
    commit_step,
    partial_directory,
    remove_partial,
)
from thunder_memsave.checkpoints.commit import save_synced, sync_directory
from thunder_memsave.checkpoints.manifest import (
    STATE,
    FileRecord,
    Manifest,
    files_in,
    record_file,
    share_of_files,
    write_manifest,
)
from thunder_memsave.sharding.rows import whole_shape

_PACKAGES = ("thunder-memsave", "torch", "lightning-thunder", "lightning")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepToSave:
    """A checkpoint before it is written."""

    directory: Path
    """Directory of the run's checkpoints."""
    manifest: Manifest
    """Description of everything but the files."""
    write_state: Callable[[Path], None]
    """Writes modules, optimizers and the rest, as `fabric.save` does. A collective."""
    random_state: Mapping[str, Any]
    """States of this rank's random generators."""
    after_commit: Callable[[], None]
    """Runs on rank 0 after the commit, before any rank goes on."""

    def commit(self, fabric: Fabric, *, group: dist.ProcessGroup | None = None) -> Path:
        """Write the checkpoint, and rename it to its final name once all of it is on the disk. A collective.

        Args:
            fabric: Launched.
            group: A group of all ranks, for the agreement; None means the default one.

        Returns:
            The checkpoint's path, on every rank.

        Raises:
            DiskError: a file could not be written; on all ranks.
        """
        partial = partial_directory(self.directory, self.manifest.step)
        first = fabric.is_global_zero
        on_all_ranks(fabric, lambda: _make(partial) if first else None, group=group)
        on_all_ranks(fabric, lambda: self.write_state(partial / STATE), group=group)
        file = partial / random_file(fabric.global_rank)
        on_all_ranks(fabric, lambda: save_synced(dict(self.random_state), file), group=group)
        files: dict[str, FileRecord] = {}
        for share in on_all_ranks(fabric, lambda: _record_share(fabric, partial), group=group):
            files.update(share)
        manifest = dataclasses.replace(self.manifest, files=files)
        final, *_ = on_all_ranks(
            fabric, lambda: self._finish(partial, manifest) if first else None, group=group
        )
        assert final is not None
        return final

    def _finish(self, partial: Path, manifest: Manifest) -> Path:
        write_manifest(partial, manifest)
        if (partial / STATE).is_dir():
            sync_directory(partial / STATE)
        sync_directory(partial)
        final = commit_step(partial)
        self.after_commit()
        return final


def describe(
    fabric: Fabric,
    state: Mapping[str, Any],
    *,
    step: int,
    metrics: Mapping[str, float],
    config: Mapping[str, Any] | None,
) -> Manifest:
    """Describe a checkpoint of this moment, except for its files.

    Args:
        fabric: Launched.
        state: The saved state, by key.
        step: Finished optimizer steps.
        metrics: Metrics of the evaluation at this very step, if there was one.
        config: The run file.
    """
    modules = {key: value for key, value in state.items() if isinstance(value, nn.Module)}
    versions = {package: importlib.metadata.version(package) for package in _PACKAGES}
    return Manifest(
        step=step,
        world_size=fabric.world_size,
        sharding=_sharding_of(fabric),
        versions={"python": platform.python_version(), **versions},
        values={k: v for k, v in state.items() if isinstance(v, int | float | str)},
        tensors={key: tensors_of(module) for key, module in modules.items()},
        files={},
        metrics=dict(metrics),
        config=config,
        precision=str(fabric.strategy.precision.precision),
        plan_sha256=_plan_hash(fabric),
    )


def random_file(rank: int) -> str:
    """Return the name of a rank's random state inside a checkpoint."""
    return f"random-{rank:05d}.pt"


def tensors_of(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return a manifest's entry for a module's weights, by name: whole `shape`, `dtype` and `is_trained`."""
    return {
        name: {
            "shape": list(whole_shape(tensor)),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "is_trained": tensor.requires_grad,
        }
        for name, tensor in module.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    }


def _make(partial: Path) -> None:
    remove_partial(partial.parent, own=partial)
    partial.mkdir(parents=True)


def _record_share(fabric: Fabric, directory: Path) -> dict[str, FileRecord]:
    names = share_of_files(
        files_in(directory), rank=fabric.global_rank, world_size=fabric.world_size
    )
    return {name: record_file(directory, name) for name in names}


def _sharding_of(fabric: Fabric) -> str:
    data_parallel = getattr(fabric.strategy, "data_parallel", None)
    return "none" if data_parallel is None else str(data_parallel.mode)


def _plan_hash(fabric: Fabric) -> str | None:
    """Hash the plan's actions and budget, for strategies that plan."""
    plan = getattr(fabric.strategy, "plan", None)
    if plan is None:
        return None
    planned = repr((plan.budget_bytes, plan.actions))
    return hashlib.sha256(planned.encode()).hexdigest()
