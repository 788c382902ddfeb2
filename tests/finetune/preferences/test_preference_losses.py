"""The formulas of the losses, in float64 and at their ends; and rows that have no example."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from thunder_memsave.finetune.objectives.completions import summed_by_document
from thunder_memsave.finetune.objectives.preference_losses import dpo_terms, kto_terms, orpo_terms

FLOAT32 = 1e-6


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_dpo_is_the_papers_equation() -> None:
    ratios = torch.tensor([[0.5, -0.25], [-3.0, 1.0]])
    terms = dpo_terms(ratios, beta=0.4)
    expected = [-math.log(sigmoid(0.4 * (a - b))) for a, b in ratios.tolist()]
    assert terms.losses.tolist() == pytest.approx(expected, rel=FLOAT32)
    accuracy, margin, chosen, rejected = terms.sums(torch.ones(2)).tolist()
    assert accuracy == 1
    assert margin == pytest.approx(0.4 * (0.75 - 4), rel=FLOAT32)
    assert (chosen, rejected) == pytest.approx((0.4 * -2.5, 0.4 * 0.75), rel=FLOAT32)


def test_kto_is_the_papers_equation() -> None:
    ratios, desirable = torch.tensor([0.5, -0.25, 2.0]), torch.tensor([1.0, 0.0, 0.0])
    terms = kto_terms(
        ratios, is_desirable=desirable, kl=torch.tensor(0.75), beta=0.4, weights=(1.5, 0.5)
    )
    expected = [
        1.5 * (1 - sigmoid(0.4 * (0.5 - 0.75))),
        0.5 * (1 - sigmoid(0.4 * (0.75 + 0.25))),
        0.5 * (1 - sigmoid(0.4 * (0.75 - 2.0))),
    ]
    assert terms.losses.tolist() == pytest.approx(expected, rel=FLOAT32)


@pytest.mark.parametrize("mean", [-1e-4, -0.1, -0.6931, -0.6932, -3.0, -40.0])
def test_odds_keep_their_digits(mean: float) -> None:
    scores = torch.tensor([[mean * 4, -2.0 * 3]])
    terms = orpo_terms(
        scores,
        torch.tensor([[4.0, 3.0]]),
        nll=torch.tensor([8.0]),
        num_tokens=torch.tensor([6.0]),
        pairs_per_token=torch.tensor(1 / 6),
        is_example=torch.ones(1),
        beta=0.2,
    )
    odds = mean - math.log(-math.expm1(mean))
    other = -2.0 - math.log(-math.expm1(-2.0))
    expected = 8.0 / 6 - 0.2 * math.log(sigmoid(odds - other))
    assert float(terms.losses[0]) == pytest.approx(expected, rel=2e-6)


def test_room_without_an_example_has_no_loss_and_no_gradient() -> None:
    scores = torch.tensor([[-2.0, -3.0], [0.0, 0.0]], requires_grad=True)
    is_example = torch.tensor([1.0, 0.0])
    terms = orpo_terms(
        scores,
        torch.tensor([[2.0, 2.0], [0.0, 0.0]]),
        nll=torch.tensor([3.0, 0.0]),
        num_tokens=torch.tensor([4.0, 0.0]),
        pairs_per_token=torch.tensor(0.25),
        is_example=is_example,
        beta=0.1,
    )
    (gradient,) = torch.autograd.grad((terms.losses * is_example).sum(), scores)
    assert gradient.isfinite().all()
    assert gradient[1].tolist() == [0.0, 0.0]
    assert terms.sums(is_example).isfinite().all()


def test_sums_are_those_of_each_document() -> None:
    values = torch.arange(10.0).view(2, 5)
    ends = torch.tensor([[2, 5, 5], [1, 1, 4]], dtype=torch.int32)
    assert summed_by_document(values, ends).tolist() == [1.0, 9.0, 0.0, 5.0, 0.0, 21.0]


def test_a_documents_sum_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    values = torch.randn(1, 64)

    def sums(before: Tensor) -> Tensor:
        row = torch.cat([before, values[:, 8:]], dim=1)
        return summed_by_document(row, torch.tensor([[8, 64]], dtype=torch.int32))[1]

    assert torch.equal(sums(values[:, :8]), sums(1e4 * values[:, :8]))
