"""Chooses the objective of a run file."""

from __future__ import annotations

from typing import Any

from thunder_memsave.finetune.data.preferences.examples import KINDS
from thunder_memsave.finetune.model.documents_apart import mask_kind
from thunder_memsave.finetune.objectives.objective import Objective
from thunder_memsave.finetune.objectives.preference import PREFERENCES
from thunder_memsave.finetune.objectives.supervised import SupervisedFineTuning
from thunder_memsave.finetune.run_file.config import RunConfig

_TOKENS = 64
"""Tokens of a document are assumed to be so many where the data is not read."""


def objective_of(config: RunConfig, *, num_documents: int | None = None) -> Objective[Any]:
    """Make the objective that the run trains for, and that planning and evaluations use.

    Args:
        config: The run.
        num_documents: Documents for which each row of the data has room; None if the data is not known.
    """
    length, most = config.data.max_seq_length, config.data.max_documents_per_row
    mask, section = mask_kind(config), config.preference
    # A CUDA graph asks the host for no number of rows.
    counts_targets = config.strategy.cuda_graphs is False
    if section is None:
        expected = most or max(1, length // _TOKENS)
        return SupervisedFineTuning(
            mask=mask,
            length=length,
            num_documents=num_documents or expected,
            counts_targets=counts_targets,
        )
    num_samples = KINDS[section.loss].num_samples
    expected = max(num_samples, (most or length // _TOKENS) // num_samples * num_samples)
    return PREFERENCES[section.loss](
        settings=section,
        mask=mask,
        length=length,
        num_documents=num_documents or expected,
        counts_targets=counts_targets,
    )
