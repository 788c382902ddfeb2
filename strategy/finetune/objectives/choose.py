"""Chooses the objective of a run file."""

from __future__ import annotations

from typing import Any

from thunder_memsave.finetune.objectives.causal_lm import mask_kind
from thunder_memsave.finetune.objectives.objective import Objective
from thunder_memsave.finetune.objectives.supervised import SupervisedFineTuning
from thunder_memsave.finetune.run_file.config import RunConfig


def objective_of(config: RunConfig) -> Objective[Any]:
    """Make the objective that the run trains for, and that planning and evaluations use."""
    return SupervisedFineTuning(mask=mask_kind(config), length=config.data.max_seq_length)
