"""Stochastic rounding to bfloat16 keeps the mean."""

from __future__ import annotations

import torch

from thunder_memsave.optim.noise import rounded_to_bfloat16


def test_rounding_is_up_as_often_as_the_mean_wants() -> None:
    third = 1 + 2**-7 / 3  # bfloat16 has steps of 1/128 above 1
    found = rounded_to_bfloat16(torch.full((100, 1000), third), key=3, first_row=0).float()
    assert set(found.unique().tolist()) == {1.0, 1 + 2**-7}
    assert abs(found.double().mean() - third) < 1e-4
    kept = torch.tensor([[0.0, -2.5, 1.0, float("inf"), -float("inf")]])
    assert torch.equal(rounded_to_bfloat16(kept.clone(), key=9, first_row=2).float(), kept)
