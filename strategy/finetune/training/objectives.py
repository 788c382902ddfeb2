"""Finds the objective of a run file."""

from __future__ import annotations

from typing import Any

from thunder_memsave.finetune.data.objective import Objective
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.training.loss import mask_kind
from thunder_memsave.finetune.training.supervised import SupervisedFineTuning


def objective_of(config: RunConfig) -> Objective[Any]:
    """Make what the run trains for, planning counts and evaluations report."""
    return SupervisedFineTuning(mask=mask_kind(config), length=config.data.max_seq_length)
