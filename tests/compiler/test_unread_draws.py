"""Draws that nothing reads are drawn, in their places: what comes after them has the numbers that eager has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.fused_steps import step
from thunder_memsave.compiler.compiled_module import CompiledModule

DRAWS: dict[str, Callable[[Tensor], object]] = {
    "rand_like": torch.rand_like,
    "rand": lambda h: torch.rand(3),
    "of a value that nothing else reads": lambda h: torch.bernoulli((h * 0).sigmoid()),
    "in place": lambda h: h.new_empty(3).normal_(),
    "dropout, of which the draw is a part": lambda h: F.dropout(h, 0.5, training=True),
    "attention": lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=0.5),
    "multinomial": lambda h: torch.multinomial(h.abs() + 0.1, 1),
}


class Drawn(nn.Module):
    """Draws before a draw that is read, and between and after."""

    def __init__(self, draw: Callable[[Tensor], object], layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            self.draw(x)
            x = layer(x)
            self.draw(x)
            x = x * torch.rand_like(x)
        self.draw(x)
        return x


def ran(call: Callable[[Tensor], Tensor], model: nn.Module, *, trains: bool) -> list[Tensor]:
    found = []
    model.zero_grad()
    for _ in range(2):
        torch.manual_seed(1)
        with torch.set_grad_enabled(trains):
            result = call(torch.ones(4, 8))
        found += [result.detach(), torch.get_rng_state()]
        if trains:
            result.sum().backward()
            found.append(torch.get_rng_state())
    return [*found, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("name", DRAWS)
def test_what_is_drawn_later_is_what_eager_draws(name: str, trains: bool) -> None:
    torch.manual_seed(0)
    model = Drawn(DRAWS[name])
    expected = ran(model, model, trains=trains)
    found = ran(CompiledModule(model), model, trains=trains)
    assert len(found) == len(expected) > 3
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("layers", [6, 20])
def test_equal_layers_draw_each(layers: int) -> None:
    torch.manual_seed(0)
    model = Drawn(torch.rand_like, layers=layers)
    expected = ran(model, model, trains=True)
    found = ran(CompiledModule(model), model, trains=True)
    assert all(map(torch.equal, found, expected))


def test_what_is_recomputed_is_drawn_once_and_the_peak_is_as_predicted() -> None:
    class Summed(Drawn):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum()

    def build() -> nn.Module:
        return Summed(torch.rand_like, layers=3)

    inputs = {"x": torch.randn(4, 8, requires_grad=True)}
    kept, again = (
        step(build, inputs, fusion=False, policy=p) for p in ("keep_all", "recompute_all")
    )
    assert all(map(torch.equal, kept.bits, again.bits))
    for each in (kept, again):
        assert each.measured_bytes == each.predicted_bytes
