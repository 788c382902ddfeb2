"""Finds the objective of a run file."""

from __future__ import annotations

from typing import Any

from thunder_memsave.finetune.config import RunConfig
from thunder_memsave.finetune.loss import mask_kind
from thunder_memsave.finetune.objective import Objective
from thunder_memsave.finetune.supervised import SupervisedFineTuning


def objective_of(config: RunConfig) -> Objective[Any]:
    """Make what the run trains for, planning counts and evaluations report."""
    return SupervisedFineTuning(mask=mask_kind(config), length=config.data.max_seq_length)
