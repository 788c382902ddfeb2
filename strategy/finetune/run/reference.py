"""Computes what the model at the start of a run says of its data, once, and keeps it beside the run.

Preference losses compare with that model. Their rows hold its log-probabilities, so that no second model is in memory
while it trains, and no step makes a second pass for it. A run that is resumed reads them again if they are of the same
data and weights, by a hash of both; otherwise they are computed before its checkpoint is loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from lightning.fabric import Fabric
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from thunder_memsave.checkpoints.commit import write_file
from thunder_memsave.finetune.data.batches import NO_ROW, Sharding, make_batch, ordered_rows
from thunder_memsave.finetune.data.counting import Counting
from thunder_memsave.finetune.data.preferences.rows import PreferenceRows
from thunder_memsave.finetune.model.safetensors_files import sync_file
from thunder_memsave.finetune.objectives.loss_in_model import put_loss_in
from thunder_memsave.finetune.objectives.preference import PreferenceTuning
from thunder_memsave.finetune.run.job import Job
from thunder_memsave.finetune.training.ahead import to_device
from thunder_memsave.finetune.training.ask_model import AskedModel, sum_over_ranks
from thunder_memsave.materialize.pending_weights import fingerprint_of_files

_KEY = "of"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """Log-probabilities of completions, for each set of rows: float32 of (examples, samples)."""

    key: str
    """Hash of data and weights."""
    values: Mapping[str, Tensor]

    def keep(self, path: Path) -> None:
        """Write a file, whole or not at all, unless it is there."""
        if _read(path, self.key) is not None:
            return

        def write(temporary: Path) -> None:
            save_file(dict(self.values), temporary, metadata={_KEY: self.key})
            sync_file(temporary)

        write_file(path, write)


def reference_key(job: Job) -> str | None:
    """Return a hash of the data and of the weights that a run starts from, before these are read.

    None: the run needs no reference.
    """
    if not job.objective.needs_reference:
        return None
    rows = {name: each.fingerprint for name, each in _sets(job).items()}
    model = job.config.model
    made = [rows, fingerprint_of_files(job.model), model.config, job.config.train.seed]
    text = json.dumps(made, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def reference_of(fabric: Fabric, module: nn.Module, job: Job, *, key: str, path: Path) -> Reference:
    """Read the reference of a run, or compute it. A collective.

    Args:
        fabric: Launched.
        module: The result of `fabric.setup`, with the weights that the run starts from.
        job: The run.
        key: Of `reference_key`.
        path: Where an earlier start has kept it.
    """
    own = _read(path, key) if fabric.is_global_zero else None
    kept: Reference | None = fabric.broadcast(own)
    if kept is not None:
        return kept
    values = {
        name: _computed(fabric, module, job, rows, name=name) for name, rows in _sets(job).items()
    }
    return Reference(key=key, values=values)


def with_reference(job: Job, reference: Reference) -> Job:
    """Return the run with rows that hold the reference's log-probabilities."""
    sets = {name: rows.with_reference(reference.values[name]) for name, rows in _sets(job).items()}
    data = replace(job.data, train=sets["train"], validation=sets.get("validation"))
    return replace(job, data=data)


def _sets(job: Job) -> dict[str, PreferenceRows]:
    both = {"train": job.data.train, "validation": job.data.validation}
    return {name: rows for name, rows in both.items() if isinstance(rows, PreferenceRows)}


def _read(path: Path, key: str) -> Reference | None:
    """Read a file; None if there is none, it is damaged, or it is of other data or weights."""
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get(_KEY) != key:
                return None
            values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
    return Reference(key=key, values=values)


@torch.no_grad()
def _computed(
    fabric: Fabric, module: nn.Module, job: Job, rows: PreferenceRows, *, name: str
) -> Tensor:
    objective = job.objective
    assert isinstance(objective, PreferenceTuning), "it needs a reference"
    put_loss_in(job.model, objective)
    asked = AskedModel(fabric=fabric, model=module, is_training=False)
    sharding = job.sharding(rank=fabric.global_rank)
    was_training = module.training
    module.eval()
    found = torch.zeros(len(rows.examples), rows.num_scores)
    counting = Counting(
        f"reference log-probabilities of {name} rows", total=_num_own(rows, sharding)
    )
    for chosen in ordered_rows(len(rows), sharding):
        batch = to_device(fabric, make_batch(rows, chosen))
        scores = [asked.predict(**inputs) for inputs in objective.reference_inputs(batch)]
        num_examples = len(batch.is_example)
        table = torch.cat([each.view(num_examples, -1) for each in scores], dim=1).float().cpu()
        numbers = rows.numbers_of([None if row == NO_ROW else row for row in chosen])
        for number, values in zip(numbers, table, strict=True):
            if number is not None:
                found[number] = values
        counting.add(len(chosen))
    module.train(was_training)
    return sum_over_ranks(fabric, found.to(fabric.device)).cpu()


def _num_own(rows: PreferenceRows, sharding: Sharding) -> int:
    """Count the rows of this rank, with those that fill its last pass."""
    per_pass = sharding.micro_batch_size * sharding.world_size
    return -(-len(rows) // per_pass) * sharding.micro_batch_size
