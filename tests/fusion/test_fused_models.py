"""Models of transformers: a fused step has the bits of an unfused one, whatever the plan, and the bytes predicted."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from harness.distributed import SOAK_HANG_S
from harness.effort import little_effort
from harness.fused_steps import MODELS, Ran, step
from thunder_memsave.errors import BudgetError
from thunder_memsave.fusion import inductor

IDS = torch.randint(101, (4, 32), generator=torch.Generator().manual_seed(0))
INPUTS = {"input_ids": IDS, "labels": IDS}


KINDS = ("float32", "bfloat16", "autocast", "fp8")
PARTS = ("mm", "attention", "bernoulli", "dropout")


def _step(name: str, kind: str, **settings: Any) -> Ran:
    def build() -> nn.Module:
        dtype = torch.bfloat16 if kind in ("bfloat16", "fp8") else torch.float32
        return MODELS[name]().to(dtype)

    casts = torch.autocast("cpu", torch.bfloat16) if kind == "autocast" else nullcontext()
    return step(build, INPUTS, around=casts, fp8=kind == "fp8", **settings)


def _planned(name: str, kind: str, budget_bytes: int) -> dict[str, Any]:
    """Return the settings of a plan within a budget, or within the smallest that there is."""
    settings = {"policy": "plan", "budget_bytes": budget_bytes}
    try:
        for fusion in (False, True):
            _step(name, kind, fusion=fusion, **settings)
    except BudgetError as error:
        return {**settings, "budget_bytes": error.smallest_bytes}
    return settings


@pytest.mark.soak
@pytest.mark.timeout(SOAK_HANG_S)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_every_plan_has_the_same_bits_fused_and_the_bytes_predicted(name: str, kind: str) -> None:
    if (reason := inductor.why_unavailable("cpu")) is not None:
        pytest.skip(reason)
    with little_effort(1.0):
        unfused = _step(name, kind, fusion=False)
        largest_bytes = unfused.call.profile.peak_bytes
        policies: list[dict[str, Any]] = [{"policy": "keep_all"}, {"policy": "recompute_all"}]
        policies += [_planned(name, kind, int(part * largest_bytes)) for part in (0.8, 0.6)]
        for settings in policies:
            fused, alone = (_step(name, kind, fusion=f, **settings) for f in (True, False))
            assert len(fused.bits) == len(unfused.bits) > 10
            assert all(map(torch.equal, fused.bits, unfused.bits))
            assert fused.num_regions > 0 or name == "bert"
            assert fused.measured_bytes == fused.predicted_bytes
            if (
                settings["policy"] == "plan"
            ):  # its prices know what fuses: it may recompute other values
                assert fused.call.profile.peak_bytes <= settings["budget_bytes"]
                continue
            assert fused.predicted_bytes <= alone.predicted_bytes
            assert fused.order_of(*PARTS) == alone.order_of(*PARTS) != []
