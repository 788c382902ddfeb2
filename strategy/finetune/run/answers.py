"""Says what a run's model answers at evaluations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from thunder_memsave.finetune.data.prompts import prompts_of
from thunder_memsave.finetune.model.documents_apart import mask_kind
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.training.generated import Generated
from thunder_memsave.settings.problems import ConfigError

if TYPE_CHECKING:
    from thunder_memsave.finetune.run.job import Job


def check_answers(config: RunConfig, *, has_validation: bool) -> None:
    """Refuse to ask for answers where there are no prompts.

    Raises:
        ConfigError: there are none.
    """
    if config.eval.answers and not has_validation:
        raise ConfigError(
            f"eval.answers is {config.eval.answers}, but the run has no validation data to take prompts from; give "
            "data.dataset.init_args a val_path or a val_fraction, or leave eval.answers out.",
            key="eval.answers",
        )


def generated_of(job: Job) -> Generated | None:
    """Return the prompts of the validation set that the run file asks for; None if there are none."""
    config = job.config
    if not config.eval.answers or job.data.validation is None:
        return None
    return Generated(
        prompts=prompts_of(job.data.validation, config.eval.answers),
        tokenizer=job.tokenizer,
        path=job.directory.answers,
        mask=mask_kind(config),
        length=config.data.max_seq_length,
        max_new_tokens=config.eval.max_new_tokens,
        ends=_ends(job.model, job.tokenizer),
    )


def _ends(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer: the tokenizer's, and those of the model's generation config."""
    own: Any = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    of_model = own if isinstance(own, list) else [own]
    return frozenset(int(each) for each in (*of_model, tokenizer.eos_token_id) if each is not None)
