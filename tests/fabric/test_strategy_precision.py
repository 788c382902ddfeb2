"""Each supported precision plugin computes as around an eager model; the others are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import (
    BitsandbytesPrecision,
    FSDPPrecision,
    MixedPrecision,
    Precision,
)
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from harness.fabric import make_fabric
from thunder_memsave import ConfigError, ThunderMemsaveStrategy
from thunder_memsave.fabric.precision import refuse_unsupported

# Relative to the largest value: a few roundings of the dtype in which the products are summed.
TOLERANCE = {
    "64-true": 1e-6,
    "32-true": 1e-6,
    "16-true": 2e-3,
    "bf16-true": 2e-2,
    "bf16-mixed": 2e-2,
}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.down = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.norm(self.up(x))))


def train(fabric: Fabric) -> tuple[list[float], dict[str, Tensor]]:
    model = Small()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(3):
        output = model(x)
        assert output.dtype == torch.float32
        loss = output.square().mean()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def check_equal_to_eager(tolerance: float, **precision: Any) -> None:
    eager = Fabric(accelerator="cpu", devices=1, **precision)
    expected_losses, expected = train(eager)
    losses, state = train(make_fabric(**precision))
    assert losses == pytest.approx(expected_losses, rel=tolerance)
    assert losses[-1] < losses[0]
    for name, value in state.items():
        assert value.dtype == expected[name].dtype
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("precision", ["64-true", "32-true", "16-true", "bf16-true", "bf16-mixed"])
def test_training_equals_eager(precision: str) -> None:
    check_equal_to_eager(TOLERANCE[precision], precision=precision)


def test_fabric_itself_replaces_16_mixed_on_the_cpu() -> None:
    with pytest.warns(match="AMP with fp16 is not supported on CPU"):
        fabric = make_fabric(precision="16-mixed")
    assert isinstance(fabric.strategy.precision, MixedPrecision)
    assert fabric.strategy.precision.precision == "bf16-mixed"


def test_a_16_mixed_plugin_equals_eager_with_its_scaler() -> None:
    eager = train(
        Fabric(accelerator="cpu", devices=1, plugins=[MixedPrecision("16-mixed", device="cpu")])
    )
    plugin = MixedPrecision("16-mixed", device="cpu")
    ours = train(make_fabric(plugins=[plugin]))
    assert ours[0] == pytest.approx(eager[0], rel=2e-3)
    assert type(plugin.scaler) is torch.amp.GradScaler  # one device has nobody to agree with


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        (BitsandbytesPrecision, "weights quantized by bitsandbytes cannot be captured"),
        (FSDPPrecision, "it configures torch's FSDP, which this strategy does not use"),
    ],
)
def test_a_plugin_that_does_not_work_is_refused_with_its_reason(
    plugin: type[Precision], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"{plugin.__name__} does not work with .*: {reason}"):
        ThunderMemsaveStrategy(precision=plugin.__new__(plugin))


def test_a_users_own_plugin_is_accepted() -> None:
    class Own(Precision):
        pass

    refuse_unsupported(Own())


def test_a_scaler_of_the_users_own_type_is_refused_when_sharded() -> None:
    from thunder_memsave.fabric.precision import share_found_inf

    class OwnScaler(torch.amp.GradScaler):
        pass

    plugin = MixedPrecision("16-mixed", device="cpu", scaler=OwnScaler("cpu"))
    with pytest.raises(ConfigError, match="OwnScaler decides for its own rank's shard only"):
        share_found_inf(plugin, None)  # type: ignore[arg-type]


def test_a_sharded_scaler_stays() -> None:
    from thunder_memsave.fabric.precision import share_found_inf

    scaler = ShardedGradScaler("cpu")
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    share_found_inf(plugin, None)  # type: ignore[arg-type]
    assert plugin.scaler is scaler
