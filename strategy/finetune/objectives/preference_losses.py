"""The losses of preference tuning as functions of log-probabilities, per example.

All tensors have the shape (examples,), or (pairs, 2) with the chosen text first, and are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

_LOG_HALF = -0.6931472


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """The loss of each example, and what is measured of it."""

    losses: Tensor
    measured: tuple[Tensor, ...]

    def sums(self, is_example: Tensor) -> Tensor:
        """Sum what is measured over the examples, without a gradient."""
        return torch.stack([(each.detach() * is_example).sum() for each in self.measured])


def dpo_terms(log_ratios: Tensor, *, beta: float) -> Terms:
    """Return the losses -log sigmoid(beta * (chosen - rejected)), equation 7 of arXiv 2305.18290.

    Args:
        log_ratios: Log-probabilities less the reference's, (pairs, 2).
        beta: Of the equation.
    """
    rewards = beta * log_ratios
    margin = rewards[:, 0] - rewards[:, 1]
    return Terms(losses=-logsigmoid(margin), measured=_of_rewards(rewards))


def orpo_terms(
    scores: Tensor,
    lengths: Tensor,
    *,
    nll: Tensor,
    num_tokens: Tensor,
    pairs_per_token: Tensor,
    is_example: Tensor,
    beta: float,
) -> Terms:
    """Return a part of the mean cross-entropy for each pair, and -beta * log sigmoid(log odds ratio).

    Equations 4, 6 and 7 of arXiv 2403.07691, with the mean log-probability per token of a completion.

    Args:
        scores: Summed log-probabilities of completions, (pairs, 2).
        lengths: Their tokens, (pairs, 2).
        nll: Summed cross-entropy of the chosen text, prompt included.
        num_tokens: Tokens that it sums over.
        pairs_per_token: Pairs of the step over all of these tokens, a scalar: the losses' mean over pairs then has the
            mean of the cross-entropy over tokens.
        is_example: 0 for room without a pair.
        beta: Weight of the odds ratio.
    """
    # A text without tokens has the probability 1, whose odds are infinite.
    means = torch.where(is_example[:, None] > 0, scores / lengths.clamp(min=1), -1.0)
    log_odds = means - _log_of_complement(means)
    ratio = logsigmoid(log_odds[:, 0] - log_odds[:, 1])
    losses = nll * pairs_per_token - beta * ratio
    return Terms(losses=losses, measured=(*_of_rewards(beta * means), ratio, nll, num_tokens))


def kto_terms(
    log_ratios: Tensor,
    *,
    is_desirable: Tensor,
    kl: Tensor,
    beta: float,
    weights: tuple[float, float],
) -> Terms:
    """Return weight * (1 - sigmoid(+-beta * (log ratio - kl))), equation 8 of arXiv 2402.01306.

    Args:
        log_ratios: Log-probabilities less the reference's.
        is_desirable: 1 or 0.
        kl: The reference point, a scalar.
        beta: Of the equation.
        weights: Of desirable texts and of the others.
    """
    sign = 2 * is_desirable - 1
    weight = weights[0] * is_desirable + weights[1] * (1 - is_desirable)
    losses = weight * (1 - torch.sigmoid(sign * beta * (log_ratios - kl)))
    rewards = beta * log_ratios
    measured = (
        is_desirable,
        rewards * is_desirable,
        rewards * (1 - is_desirable),
        kl.expand(rewards.shape),
    )
    return Terms(losses=losses, measured=measured)


def _of_rewards(rewards: Tensor) -> tuple[Tensor, ...]:
    """Return accuracy, margin and both rewards of each pair."""
    chosen, rejected = rewards[:, 0], rewards[:, 1]
    return (chosen > rejected).float(), chosen - rejected, chosen, rejected


def _log_of_complement(log_probability: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0, by the branch that keeps its digits (Maechler 2012)."""
    near = torch.log(-torch.expm1(log_probability.clamp(min=_LOG_HALF)))
    far = torch.log1p(-torch.exp(log_probability.clamp(max=_LOG_HALF)))
    return torch.where(log_probability > _LOG_HALF, near, far)
