"""Trained weights that only fp8 products read are gathered as fp8 numbers, with the bits of gathers in bfloat16.

With the recipe `block` these come with their scales.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.predicted_peaks import peak_on_a_rank
from thunder_memsave.ops.families.collectives import gathers

NUM_RANKS, NUM_STEPS, WIDTH = 3, 2, 32
DELAYED = {"recipe": "delayed", "backend": "torch", "amax_history_len": 2}
CURRENT = {"recipe": "current", "backend": "torch"}
BLOCK = {"recipe": "block", "backend": "torch"}
WIDER = {"delayed": 48, "current": 48, "block": 3 * 128}
"""With the recipe `block`, a width at which each rank has a block of rows."""


class Net(nn.Module):
    """32 rows on 3 ranks are padded, and no whole blocks; the last layer's weight is read by others too."""

    def __init__(self, wider: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, wider)
        self.down = nn.Linear(wider, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.down(torch.tanh(self.up(x))))
        return (self.shared(x) + x @ self.shared.weight.sin()).square().mean()


def batch(rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(16, WIDTH, generator=generator) * (1 + number)


def after_steps(fp8: dict[str, Any], **settings: Any) -> tuple[list[Tensor], Any, Any]:
    """Return losses, gradients, weights, scales and histories, the module, and Fabric."""
    fabric = make_fabric(devices=NUM_RANKS, fp8=fp8, timeout="2min", **settings)
    torch.manual_seed(0)
    model = Net(WIDER[fp8["recipe"]])
    module, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found: list[Tensor] = []
    for number in range(NUM_STEPS):
        losses = []
        for part in range(2):  # micro-batches: the history has the largest of both
            with fabric.no_backward_sync(module, enabled=part == 0):
                x = batch(fabric.global_rank, 2 * number + part)
                # Then the first weight is read in backward too.
                loss = module(x.requires_grad_(fp8 is BLOCK))
                fabric.backward(loss)
            losses.append(loss.detach())
        found += [*losses, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    found += [b.clone() for b in module.state_dict().values()]
    return found, module, fabric


def dtypes_of_gathers(module: Any) -> list[list[str]]:
    """Return the dtypes of gathered matrices, in forward and backward."""
    capture = module._forward_module.captures[0]
    traces = (capture.forward_traces[-1], capture.backward_traces[-1])
    return [
        sorted(str(w.dtype) for b in t.bound_symbols for _, w in gathers(b) if len(w.shape) > 1)
        for t in traces
    ]


def check_peak(fabric: Any, module: Any) -> None:
    """The peak of a step is the predicted one."""
    x = batch(fabric.global_rank, 0)
    with fabric.no_backward_sync(module):
        fabric.backward(module(x))
    measured = peak_on_a_rank(module, lambda: fabric.backward(module(x)))
    module.zero_grad()
    predicted = fabric.strategy._planned_call().profile.peak_bytes
    assert x.nbytes + measured == pytest.approx(predicted, rel=0.01)


@on_fabric_rank
def check_steps(fp8: dict[str, Any]) -> None:
    for precision in ("32-true", "bf16-mixed"):
        for sharding in ("zero2", "zero3"):
            settings = {"sharding": sharding, "precision": precision}
            expected, plain, _ = after_steps(fp8, **settings, leave_out=("gather_in_fp8",))
            found, module, fabric = after_steps(fp8, **settings)
            assert len(expected) == len(found)
            assert all(map(torch.equal, expected, found)), settings
            forward, backward = dtypes_of_gathers(module)
            assert sum("float8" in d for d in forward) == 2, forward
            assert not any("float8" in d for d in dtypes_of_gathers(plain)[0])
            # The gradient of the batch, which the first weight would be read for, is not asked for.
            assert sum("float8" in d for d in backward) == (1 if sharding == "zero3" else 0)
            if (
                precision == "32-true"
            ):  # else Fabric's cast of the batch, outside of the module, is as large as it
                check_peak(fabric, module)
            module.eval()
            with torch.no_grad():
                assert torch.equal(module(batch(0, 0)), plain.eval()(batch(0, 0)))


@on_fabric_rank
def check_blocks() -> None:
    for sharding in ("zero2", "zero3"):
        settings = {"sharding": sharding, "precision": "bf16-mixed"}
        expected, _, _ = after_steps(BLOCK, **settings, leave_out=("gather_in_fp8",))
        found, module, _ = after_steps(BLOCK, **settings)
        assert all(map(torch.equal, expected, found)), settings
        forward, backward = dtypes_of_gathers(module)
        # `down` has no whole blocks on a rank, and `shared` other readers.
        assert sum("float8" in d for d in forward) == 1
        symbols = module._forward_module.captures[0].forward_traces[-1].bound_symbols
        (cast,) = (
            b
            for b in symbols
            if b.sym.name == "fp8_quantize_block_torch" and b.args[0].name == "t_up_weight"
        )
        made = {o.name for o in cast.output}
        of_up = {w.shape for b in symbols for s, w in gathers(b) if s.name in made}
        assert of_up == {(384, WIDTH), (3, 1)}
        again = [d for d in backward if "float8" in d]
        assert len(again) == (1 if sharding == "zero3" else 0)


@pytest.mark.parametrize(
    "fp8",
    [
        pytest.param(DELAYED, id="delayed"),
        pytest.param(CURRENT, id="current", marks=pytest.mark.soak),
    ],
)
def test_steps_have_the_bits_of_gathers_in_the_compute_dtype(fp8: dict[str, Any]) -> None:
    run_on_fabric_ranks(check_steps, NUM_RANKS, fp8)


def test_whole_blocks_are_gathered_with_their_scales() -> None:
    run_on_fabric_ranks(check_blocks, NUM_RANKS)
