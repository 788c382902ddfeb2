"""Preference tuning: losses of the log-probabilities of whole completions, averaged over the examples of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from thunder_memsave.finetune.data.packing import Batch
from thunder_memsave.finetune.data.preferences.examples import KINDS
from thunder_memsave.finetune.data.preferences.rows import PreferenceBatch, PreferenceRows
from thunder_memsave.finetune.data.tokenize import IGNORED
from thunder_memsave.finetune.model.documents_apart import MaskKind
from thunder_memsave.finetune.objectives.causal_lm import model_inputs, target_inputs
from thunder_memsave.finetune.objectives.completions import log_probabilities, summed_by_document
from thunder_memsave.finetune.objectives.objective import Objective, Predictions
from thunder_memsave.finetune.objectives.preference_losses import (
    Terms,
    dpo_terms,
    kto_terms,
    orpo_terms,
)
from thunder_memsave.finetune.objectives.supervised import flops_of_tokens
from thunder_memsave.finetune.run_file.config import PreferenceConfig


@dataclass(frozen=True, kw_only=True)
class PreferenceTuning(Objective[PreferenceBatch]):
    """What all losses of preferences share."""

    settings: PreferenceConfig
    mask: MaskKind
    length: int
    """Tokens per row."""
    num_documents: int
    """Texts for which a row of tokens has room."""
    counts_targets: bool = True
    """As for `SupervisedFineTuning`."""

    @override
    def model_inputs(self, batch: PreferenceBatch) -> dict[str, Any]:
        return model_inputs(batch.texts, mask=self.mask)

    @override
    def loss_inputs(self, batch: PreferenceBatch) -> dict[str, Any]:
        return {**self._targets(batch.texts), "is_example": batch.is_example}

    def terms(self, output: Any, **inputs: Any) -> Terms:
        """Return the loss of each example, and what is measured of it; arguments as for `loss`."""
        raise NotImplementedError

    @override
    def loss(self, output: Any, **inputs: Any) -> Tensor:
        return self.summed(output, **inputs)[0]

    @override
    def summed(self, output: Any, **inputs: Any) -> tuple[Tensor, Tensor]:
        terms, is_example = self.terms(output, **inputs), inputs["is_example"]
        return (terms.losses * is_example).sum(), terms.sums(is_example)

    @override
    def evaluated(self, output: Any, **inputs: Any) -> Tensor:
        loss, sums = self.summed(output, **inputs)
        return torch.cat([loss[None], sums]).double()

    @override
    def evaluation(self, sums: Tensor, weight: Tensor) -> dict[str, float]:
        loss, *others = sums.tolist()
        found = self.measured(others, float(weight))
        return {
            "val_loss": loss / float(weight),
            **{f"val_{name}": value for name, value in found.items()},
        }

    @override
    def predicted(self, output: Any, **inputs: Any) -> Tensor:
        values = log_probabilities(output.logits, inputs["targets"], inputs.get("num_targets"))
        return summed_by_document(values, inputs["document_ends"])

    def reference_inputs(self, batch: PreferenceBatch) -> list[dict[str, Any]]:
        """Return the calls of `predict_step` whose results are a batch's reference: texts, and mismatched ones."""
        return [
            {"inputs": model_inputs(each, mask=self.mask), "loss_inputs": self._targets(each)}
            for each in (batch.texts, batch.mismatched)
            if each is not None
        ]

    def _targets(self, texts: Batch) -> dict[str, Any]:
        counted = target_inputs(texts, are_counted=self.counts_targets)
        return {**counted, "document_ends": texts.document_ends}

    @override
    def weight(self, batch: PreferenceBatch) -> Tensor:
        return batch.is_example.sum()

    @override
    def blank(self, num_rows: int) -> PreferenceBatch:
        is_packed, kind = self.mask != "none", KINDS[self.settings.loss]
        rows = PreferenceRows(
            examples=(),
            places=(),
            length=self.length,
            kind=kind,
            examples_per_row=self.num_documents // kind.num_samples if is_packed else 1,
            is_packed=is_packed,
            pad_id=0,
        )
        return rows.lay_out([None] * num_rows)

    @override
    def step_metrics(
        self, batches: Sequence[PreferenceBatch], *, weight: float, num_ranks: int
    ) -> dict[str, float]:
        num_inputs = sum(batch.texts.input_ids.numel() for batch in batches) * num_ranks
        return {"num_input_tokens": float(num_inputs)}

    @override
    def flops_per_token(self, model: Any) -> float | None:
        return flops_of_tokens(model, length=self.length)


class DirectPreferenceOptimization(PreferenceTuning):
    """DPO (arXiv 2305.18290): a pair's margin over the reference, by a logistic loss."""

    needs_reference = True
    train_metrics = ("reward_accuracy", "reward_margin", "chosen_reward", "rejected_reward")
    evaluation_metrics = ("val_loss", *(f"val_{name}" for name in train_metrics))

    @override
    def loss_inputs(self, batch: PreferenceBatch) -> dict[str, Any]:
        return {**super().loss_inputs(batch), "reference": batch.reference}

    @override
    def terms(self, output: Any, **inputs: Any) -> Terms:
        scores = self.predicted(output, **inputs).view(-1, 2)
        return dpo_terms(scores - inputs["reference"], beta=self.settings.beta)

    @override
    def measured(self, sums: Sequence[float], weight: float) -> dict[str, float]:
        return dict(zip(self.train_metrics, (each / weight for each in sums), strict=True))


class OddsRatioOptimization(PreferenceTuning):
    """ORPO (arXiv 2403.07691): cross-entropy of chosen texts, prompts included, and the log odds ratio of a pair.

    The cross-entropy is the mean over tokens of all chosen texts of a step, the other term the mean over its pairs.
    """

    train_metrics = (
        *("reward_accuracy", "reward_margin", "chosen_reward", "rejected_reward"),
        *("log_odds_ratio", "nll_loss"),
    )
    evaluation_metrics = ("val_loss", *(f"val_{name}" for name in train_metrics))

    @override
    def loss_inputs(self, batch: PreferenceBatch) -> dict[str, Any]:
        return {
            **super().loss_inputs(batch),
            "is_completion": batch.is_completion,
            "pairs_per_token": batch.shared,
        }

    @override
    def terms(self, output: Any, **inputs: Any) -> Terms:
        targets, ends = inputs["targets"], inputs["document_ends"]
        values = log_probabilities(output.logits, targets, inputs.get("num_targets"))
        is_completion = inputs["is_completion"]
        scores = summed_by_document(values * is_completion, ends).view(-1, 2)
        lengths = summed_by_document(is_completion.float(), ends).view(-1, 2)
        nll = -summed_by_document(values, ends).view(-1, 2)[:, 0]
        num_tokens = summed_by_document((targets != IGNORED).float(), ends).view(-1, 2)[:, 0]
        return orpo_terms(
            scores,
            lengths,
            nll=nll,
            num_tokens=num_tokens,
            pairs_per_token=inputs["pairs_per_token"],
            is_example=inputs["is_example"],
            beta=self.settings.beta,
        )

    @override
    def before_step(
        self, batches: Sequence[PreferenceBatch], model: Predictions
    ) -> Sequence[PreferenceBatch]:
        if not model.is_training:
            return batches  # `evaluation` knows all tokens
        counted = torch.zeros(2, device=batches[0].is_example.device)
        for batch in batches:
            counted += torch.stack([batch.is_example.sum(), _chosen_tokens(batch)])
        num_pairs, num_tokens = model.sum_over_ranks(counted)
        return [replace(batch, shared=num_pairs / num_tokens) for batch in batches]

    @override
    def evaluation(self, sums: Tensor, weight: Tensor) -> dict[str, float]:
        found = super().evaluation(sums, weight)
        return {**found, "val_loss": found["val_loss"] + found["val_nll_loss"]}

    @override
    def measured(self, sums: Sequence[float], weight: float) -> dict[str, float]:
        *means, nll, num_tokens = sums
        values = [*(each / weight for each in means), nll / num_tokens]
        return dict(zip(self.train_metrics, values, strict=True))


class KahnemanTverskyOptimization(PreferenceTuning):
    """KTO (arXiv 2402.01306): texts that are desirable or not, each against the reference and a reference point.

    The reference point is the mean, over the examples of a step and all ranks, of how much more probable the model
    makes a prompt's mismatched completion than the reference does; it is at least 0 and has no gradient.
    """

    needs_reference = True
    train_metrics = ("chosen_reward", "rejected_reward", "reward_margin", "kl")
    evaluation_metrics = ("val_loss", *(f"val_{name}" for name in train_metrics))

    @override
    def loss_inputs(self, batch: PreferenceBatch) -> dict[str, Any]:
        return {
            **super().loss_inputs(batch),
            "is_desirable": batch.is_desirable,
            "reference": batch.reference,
            "kl": batch.shared,
        }

    @override
    def terms(self, output: Any, **inputs: Any) -> Terms:
        scores = self.predicted(output, **inputs)
        settings = self.settings
        return kto_terms(
            scores - inputs["reference"][:, 0],
            is_desirable=inputs["is_desirable"],
            kl=inputs["kl"],
            beta=settings.beta,
            weights=(settings.desirable_weight, settings.undesirable_weight),
        )

    @override
    def before_step(
        self, batches: Sequence[PreferenceBatch], model: Predictions
    ) -> Sequence[PreferenceBatch]:
        summed = torch.zeros(2, device=batches[0].is_example.device)
        for batch in batches:
            scores = model.predict(**self.reference_inputs(batch)[1])
            ratios = (scores - batch.reference[:, 1]) * batch.is_example
            summed += torch.stack([ratios.sum(), batch.is_example.sum()])
        total, number = model.sum_over_ranks(summed)
        kl = (total / number).clamp(min=0)
        return [replace(batch, shared=kl) for batch in batches]

    @override
    def measured(self, sums: Sequence[float], weight: float) -> dict[str, float]:
        num_desirable, chosen, rejected, kl = sums
        found = {"kl": kl / weight}
        if num_desirable:
            found["chosen_reward"] = chosen / num_desirable
        if num_desirable < weight:
            found["rejected_reward"] = rejected / (weight - num_desirable)
        if 0 < num_desirable < weight:
            found["reward_margin"] = found["chosen_reward"] - found["rejected_reward"]
        return found


PREFERENCES = {
    "dpo": DirectPreferenceOptimization,
    "orpo": OddsRatioOptimization,
    "kto": KahnemanTverskyOptimization,
}


def _chosen_tokens(batch: PreferenceBatch) -> Tensor:
    """Count the targets of chosen texts."""
    counted = (batch.texts.targets != IGNORED).float()
    return summed_by_document(counted, batch.texts.document_ends).view(-1, 2)[:, 0].sum()
