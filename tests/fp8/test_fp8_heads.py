"""A head in fp8 stays a linear layer before its loss, with the bits of the plain composition, and the log says so."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.fp8_linears import EagerTwin, fp8_module, linears_of, ops, state_of
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.frontend.rewrites import linear_losses
from thunder_memsave.frontend.rewrites.late_tensor import LateTensor

ROWS, LENGTH, WIDTH, CLASSES = 2, 9, 16, 48
RECIPES = ("delayed", "current", "block")
SENTENCE = (
    "The loss of 'head' is not computed in tiles of tokens, because that linear layer computes in fp8: its logits, "
    "2 x 9 x 48, exist whole, and so do their gradients. Add 'head' to fp8.skip_modules to have the loss in tiles."
)


@pytest.fixture(autouse=True)
def _small_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_losses, "FEWEST_LOGITS", 1)


class Model(nn.Module):
    """A head, trained or frozen or tied, on a layer that is trained."""

    def __init__(self, *, frozen: bool = False, tied: bool = False, returns: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.returns = returns
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.head.requires_grad_(not frozen)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        logits = self.head(torch.tanh(self.layer(self.embedding(ids))))
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        return (loss, logits) if self.returns else (loss,)


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    ids = torch.randint(0, CLASSES, (ROWS, LENGTH))
    targets = ids.roll(1, 1)
    targets[0, :4] = -100
    return ids, targets


def gradient_of_layer(model: nn.Module) -> Tensor:
    assert isinstance(model, Model)
    assert model.layer.weight.grad is not None
    return model.layer.weight.grad


def in_tiles(module: CompiledModule) -> bool:
    symbols = module.captures[-1].forward_traces[-1].bound_symbols
    return any(b.sym.name.startswith("linear_cross_entropy") for b in symbols)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", [{}, {"frozen": True}, {"tied": True}], ids=str)
def test_loss_gradients_and_scales_are_those_of_the_plain_composition(
    kind: dict[str, Any], recipe: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(**kind)
    module = fp8_module(model, recipe=recipe)
    twin = EagerTwin(module)
    for seed in range(3):  # the scales of `delayed` are 1 at first
        ours, theirs = module(*batch(seed))[0], twin(*batch(seed))[0]
        assert torch.equal(ours, theirs)
        (ours * 0.25).backward()  # as one of four micro-batches
        (theirs * 0.25).backward()
        for (name, p), q in zip(model.named_parameters(), twin.model.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None and q.grad is not None:
                assert torch.equal(p.grad, q.grad), name
        for linears in (linears_of(module), twin.linears):
            linears.update(None)
        state = state_of(twin.linears)
        assert all(torch.equal(v, state[k]) for k, v in state_of(linears_of(module)).items())
    assert not in_tiles(module)
    assert len(ops(module.captures[-1].forward_traces[-1], "gemm")) == 2
    assert [r.getMessage() for r in caplog.records if "tiles" in r.getMessage()] == [SENTENCE]


def test_a_head_that_is_kept_in_fp8_alone_stays_too(caplog: pytest.LogCaptureFixture) -> None:
    modules = [
        fp8_module(Model(frozen=True), frozen_weights=storage) for storage in ("fp8", "compute")
    ]
    kept, beside = (module(*batch())[0] for module in modules)
    assert torch.equal(kept, beside)
    for loss in (kept, beside):
        loss.backward()
    ours, theirs = (gradient_of_layer(module.module) for module in modules)
    assert torch.equal(ours, theirs)
    assert [r.getMessage() for r in caplog.records if "tiles" in r.getMessage()] == [SENTENCE] * 2


@pytest.mark.parametrize("skipped", ["head.base_layer", "lora_B"])
def test_of_a_head_with_lora_the_part_in_fp8_is_named(
    skipped: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = peft.LoraConfig(r=16, target_modules=["head"])
    peft.inject_adapter_in_model(config, model := Model())
    module = fp8_module(model, skip_modules=(skipped,))
    module(*batch())[0].backward()
    assert not in_tiles(module)
    left = "head.lora_B.default" if skipped == "head.base_layer" else "head.base_layer"
    assert f"The loss of '{left}' is not computed in tiles" in caplog.text


def test_logits_that_are_returned_are_computed(caplog: pytest.LogCaptureFixture) -> None:
    module = fp8_module(Model(returns=True))
    loss, logits = module(*batch())
    assert not isinstance(logits, LateTensor)
    (loss + logits.square().mean()).backward()
    assert SENTENCE in caplog.text


def test_a_head_that_is_left_out_of_fp8_has_its_loss_in_tiles(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = fp8_module(Model(), skip_modules=("head",))
    module(*batch())[0].backward()
    assert in_tiles(module)
    assert len(ops(module.captures[-1].forward_traces[-1], "gemm")) == 1
    assert "tiles" not in caplog.text
