"""A head in fp8 has its loss in tiles of tokens, with the numbers of the plain composition, and no logits whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.fp8_linears import EagerTwin, fp8_module, linears_of, ops, state_of
from harness.memory import measured_peak_bytes
from thunder_memsave.aten.record import AtenRecord
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import CompileConfig, MemoryConfig
from thunder_memsave.errors import BudgetError, LateTensorError
from thunder_memsave.frontend.rewrites import linear_losses
from thunder_memsave.frontend.rewrites.late_tensor import LateTensor
from thunder_memsave.ops.families import tiled_loss
from thunder_memsave.ops.families.tiled_fp8_loss import BLOCK
from thunder_memsave.planner.devices import device

ROWS, LENGTH, WIDTH, CLASSES = 2, 180, 32, 64
RECIPES = ("delayed", "current", "block", "mxfp8")
KINDS: tuple[dict[str, Any], ...] = ({}, {"frozen": True}, {"tied": True})
FORWARD, BACKWARD = "linear_cross_entropy_in_fp8", "linear_cross_entropy_in_fp8_backward"
SENTENCE = (
    "The loss of {0!r} is not computed in tiles of tokens, because that linear layer computes in fp8 and is a part of "
    "a head with LoRA: its logits, 2 x 180 x 64, exist whole, and so do their gradients. Add {0!r} to fp8.skip_modules "
    "to have the loss in tiles."
)


@pytest.fixture(autouse=True)
def _small_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_losses, "FEWEST_LOGITS", 1)


@contextmanager
def small_tiles() -> Iterator[None]:
    """Let there be three tiles in float32, and four in bfloat16; in blocks, tiles of 128 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled_loss, "TILE_BYTES", CLASSES * (4 + 2) * 130)
        yield


class Model(nn.Module):
    """A head, trained or frozen or tied, on a layer that is trained."""

    def __init__(
        self,
        *,
        frozen: bool = False,
        tied: bool = False,
        bias: bool = False,
        returns: bool = False,
        shifts: bool = False,
        reduction: Literal["mean", "sum", "none"] = "mean",
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.returns, self.shifts, self.reduction = returns, shifts, reduction
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.head.requires_grad_(not frozen)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        logits = self.head(torch.tanh(self.layer(self.embedding(ids))))
        taken = logits
        if self.shifts:  # the last token has the largest hidden state, and no loss
            taken, targets = logits[:, :-1], targets[:, 1:]
        rows = taken.float().flatten(0, 1)
        loss = F.cross_entropy(rows, targets.flatten(), reduction=self.reduction)
        return (loss, logits) if self.returns else (loss,)


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    ids = torch.randint(0, CLASSES, (ROWS, LENGTH))
    targets = ids.roll(1, 1)
    targets[0, :40] = -100
    return ids, targets


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def losses_in(module: CompiledModule) -> list[str]:
    """Return the operations of the loss, of forward and then of backward."""
    found = module.captures[-1]
    symbols = [
        bsym.sym.name
        for traces in (found.forward_traces, found.backward_traces or [None])
        if traces[-1] is not None
        for bsym in traces[-1].bound_symbols
    ]
    return [name for name in symbols if name.startswith("linear_cross_entropy")]


SUMS = 2e-6
"""Of the largest number: how far sums of float32 are apart whose terms a CPU's products add in another order."""


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    scale = float(theirs.double().abs().max())
    assert float((ours.double() - theirs.double()).abs().max()) <= tolerance * scale


class Compared:
    """Steps of a model beside those of the plain composition."""

    def __init__(self, model: Model, recipe: str, dtype: torch.dtype = torch.float32) -> None:
        self.is_tied = model.head.weight is model.embedding.weight
        self.module = fp8_module(model.to(dtype), recipe=recipe)
        self.twin = EagerTwin(self.module)

    def step(self, seed: int, *, tolerance: float) -> None:
        """Compare; gradients to hidden states have the same bits, that of the weight is within the tolerance."""
        for model in (self.module.module, self.twin.model):
            model.zero_grad()
        ours, theirs = self.module(*batch(seed))[0], self.twin(*batch(seed))[0]
        of_each_token = torch.linspace(0.2, 0.3, ours.numel()).view(ours.shape)
        ours.backward(of_each_token)  # as one of four micro-batches
        theirs.backward(of_each_token)
        if ours.ndim:
            assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0)  # one sum over the tokens
        found, expected = gradients(self.module.module), gradients(self.twin.model)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            is_of_sum = name.startswith("head") or self.is_tied
            assert_close(gradient, expected[name], tolerance if is_of_sum else 0.0)
        for linears in (linears_of(self.module), self.twin.linears):
            linears.update(None)
        state = state_of(self.twin.linears)
        for name, value in state_of(linears_of(self.module)).items():
            assert torch.equal(value, state[name]), name


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_loss_gradients_and_scales_are_those_of_the_plain_composition(
    kind: dict[str, Any], recipe: str, caplog: pytest.LogCaptureFixture
) -> None:
    compared = Compared(Model(**kind), recipe)
    for seed in range(3):  # the scales of `delayed` are 1 at first
        compared.step(seed, tolerance=SUMS)  # products skip the ignored tokens
    assert losses_in(compared.module) == [FORWARD, BACKWARD]
    assert len(ops(compared.module.captures[-1].forward_traces[-1], "gemm")) == 1
    assert "tiles" not in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", [*KINDS, {"bias": True}, {"reduction": "none"}], ids=str)
def test_so_are_they_of_several_tiles(
    kind: dict[str, Any], recipe: str, dtype: torch.dtype
) -> None:
    with small_tiles():
        compared = Compared(Model(**kind), recipe, dtype)
        for seed in range(3):
            compared.step(seed, tolerance=SUMS if dtype is torch.float32 else 2**-7)
    (rows,) = {b.args[-1] for b in losses_of(compared.module)}
    num_tiles = 3 if dtype is torch.float32 else 4
    assert rows == (BLOCK if recipe in ("block", "mxfp8") else ROWS * LENGTH // num_tiles)


def losses_of(module: CompiledModule) -> list[Any]:
    symbols = module.captures[-1].forward_traces[-1].bound_symbols
    return [b for b in symbols if b.sym.name == FORWARD]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_hidden_states_without_a_loss_have_a_part_in_the_scale(
    reduction: Literal["mean", "none"], recipe: str
) -> None:
    with small_tiles():
        compared = Compared(Model(shifts=True, reduction=reduction), recipe)
        for seed in range(2):
            compared.step(seed, tolerance=SUMS)
    assert losses_in(compared.module) == [FORWARD, BACKWARD]


@pytest.mark.parametrize("recipe", RECIPES)
def test_logits_are_computed_as_often_as_the_recipe_needs(recipe: str) -> None:
    product = 2 * ROWS * LENGTH * WIDTH * CLASSES
    # `mxfp8` appends zeros to the tokens that the gradient of a weight sums over.
    summed = 384 / (ROWS * LENGTH) if recipe == "mxfp8" else 1
    found = {}
    for name in ("one tile", "tiles"):
        with small_tiles() if name == "tiles" else pytest.MonkeyPatch.context():
            module = fp8_module(Model(), recipe=recipe)
            ids, _ = batch()
            losses = module(ids, ids)[0]
        with AtenRecord() as record:
            losses.backward()
        of_layer = (1 + summed) * 2 * ROWS * LENGTH * WIDTH * WIDTH
        found[name] = (record.flops - of_layer) / product + 1 - summed
    # Logits, and the gradients of hidden states and weight.
    assert found == {"one tile": 3, "tiles": 4 if recipe == "current" else 3}


def test_forward_records_the_amax_of_its_operands_and_backward_that_of_gradients() -> None:
    with small_tiles():
        module = fp8_module(Model(), recipe="delayed")
        loss = module(*batch())[0]
    state = linears_of(module).by_name["head"].state
    assert state is not None
    assert state.forward_amax_history[0].gt(0).all()
    assert not state.backward_amax_history.any()
    loss.backward(retain_graph=True)
    recorded = state.backward_amax_history.clone()
    assert recorded[0].gt(0).all()
    first = gradients(module.module)["head.weight"].clone()
    loss.backward()  # a second one records and computes the same
    assert torch.equal(recorded, state.backward_amax_history)
    assert torch.equal(gradients(module.module)["head.weight"], 2 * first)


def test_an_evaluation_has_the_loss_in_tiles_and_records_nothing() -> None:
    module = fp8_module(Model(), recipe="delayed")
    expected = module(*batch())[0]
    before = state_of(linears_of(module))
    with torch.no_grad():
        assert torch.equal(module(*batch())[0], expected)
    (evaluation,) = [c for c in module.captures if not c.backward_traces]
    assert FORWARD in [b.sym.name for b in evaluation.forward_traces[-1].bound_symbols]
    after = state_of(linears_of(module))
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_backwards_of_two_micro_batches_may_follow_both_forwards() -> None:
    module = fp8_module(Model(), recipe="delayed")
    losses = [module(*batch(seed))[0] for seed in range(2)]
    for loss in losses:
        loss.backward()
    assert gradients(module.module)["head.weight"].any()


def test_a_head_that_is_kept_in_fp8_alone_has_its_loss_in_tiles_too() -> None:
    modules = [
        fp8_module(Model(frozen=True), frozen_weights=storage) for storage in ("fp8", "compute")
    ]
    kept, beside = (module(*batch())[0] for module in modules)
    assert torch.equal(kept, beside)
    for loss in (kept, beside):
        loss.backward()
    ours, theirs = (gradients(module.module)["layer.weight"] for module in modules)
    assert torch.equal(ours, theirs)
    assert all(losses_in(module) == [FORWARD, BACKWARD] for module in modules)


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize("recipe", RECIPES)
def test_transformer_engine_has_the_same_numbers_with_emulated_kernels(recipe: str) -> None:
    with small_tiles():
        modules = [
            fp8_module(Model(), recipe=recipe, backend=name)
            for name in ("torch", "transformer_engine")
        ]
        for seed in range(2):
            found = [module(*batch(seed))[0] for module in modules]
            torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=0.0)
            for loss in found:
                loss.backward()
    ours, theirs = (gradients(module.module) for module in modules)
    for name, gradient in ours.items():
        assert_close(gradient, theirs[name], 1e-5)
    assert losses_in(modules[1]) == [FORWARD, BACKWARD]


@pytest.mark.parametrize("skipped", ["head.base_layer", "lora_B"])
def test_of_a_head_with_lora_the_part_in_fp8_is_named(
    skipped: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = peft.LoraConfig(r=16, target_modules=["head"])
    peft.inject_adapter_in_model(config, model := Model())
    module = fp8_module(model, skip_modules=(skipped,))
    module(*batch())[0].backward()
    assert not losses_in(module)
    left = "head.lora_B.default" if skipped == "head.base_layer" else "head.base_layer"
    assert SENTENCE.format(left) in [r.getMessage() for r in caplog.records]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", [{}, {"frozen": True}, {"bias": True}], ids=str)
def test_logits_that_are_returned_are_made_when_they_are_read(
    kind: dict[str, Any], recipe: str
) -> None:
    module = fp8_module(Model(returns=True, **kind), recipe=recipe)
    twin = EagerTwin(module)
    for seed in range(2):
        (loss, logits), (_, expected) = module(*batch(seed)), twin(*batch(seed))
        assert isinstance(logits, LateTensor)
        before = state_of(linears_of(module))
        assert torch.equal(logits.detach() + 0.0, expected.detach())
        after = state_of(linears_of(module))
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        loss.backward()
        for linears in (linears_of(module), twin.linears):
            linears.update(None)
    assert losses_in(module) == [FORWARD, BACKWARD]


def test_logits_cannot_be_read_after_their_scales_changed() -> None:
    module = fp8_module(Model(returns=True, frozen=True), recipe="delayed")
    loss, logits = module(*batch())
    loss.backward()
    linears_of(module).update(None)  # as an optimizer's step does
    with pytest.raises(LateTensorError, match="or their scales have changed since the call"):
        logits.sum()


def test_returned_logits_are_computed_where_that_is_set() -> None:
    config = CompileConfig(return_logits=True)
    module = fp8_module(Model(returns=True), compile_config=config)
    loss, logits = module(*batch())
    assert not isinstance(logits, LateTensor)
    (loss + logits.square().mean()).backward()
    assert not losses_in(module)


def test_a_head_that_is_left_out_of_fp8_has_its_loss_in_tiles(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = fp8_module(Model(), skip_modules=("head",))
    module(*batch())[0].backward()
    assert losses_in(module)[0].startswith("linear_cross_entropy_hidden")
    assert len(ops(module.captures[-1].forward_traces[-1], "gemm")) == 1
    assert "tiles" not in caplog.text


NUM_TOKENS, MANY = 1024, 8192
LOGITS_BYTES = NUM_TOKENS * MANY * 4


class Wide(nn.Module):
    """A wide layer whose results backward reads, and a head over many classes."""

    def __init__(self, *, is_trained: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)
        self.head = nn.Linear(WIDTH, MANY, bias=False).requires_grad_(is_trained)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.down(torch.tanh(self.up(x)))).float()
        return F.cross_entropy(logits, targets)


class Planned:
    """A step within a budget."""

    def __init__(
        self, recipe: str, budget_bytes: int, *, is_trained: bool, dtype: torch.dtype
    ) -> None:
        model = Wide(is_trained=is_trained).to(dtype)
        x = torch.ones(NUM_TOKENS, WIDTH).cumsum(0).sin().to(dtype)
        targets = torch.arange(NUM_TOKENS) * 7 % MANY
        planner = MemoryPlanner(MemoryConfig(), device=device("cpu"), budget_bytes=budget_bytes)
        module = fp8_module(model, recipe=recipe, planner=planner)
        module(x, targets).backward()
        self.gradients = {name: g.clone() for name, g in gradients(model).items()}
        model.zero_grad()
        self.measured_bytes = measured_peak_bytes(lambda: module(x, targets).backward())
        call = planner.calls[-1]
        self.peak_bytes = call.profile.peak_bytes
        held = sum(call.program.storages[s].nbytes for s in call.program.held)
        held += sum(value.nbytes for value in state_of(linears_of(module)).values())
        self.predicted_bytes = self.peak_bytes - held
        self.tile_rows = {
            b.args[-1] for b in call.joint.bound_symbols if b.sym.name in (FORWARD, BACKWARD)
        }


_ALL_STEPS = list(itertools.product([torch.float32, torch.bfloat16], [False, True], RECIPES))
_QUICK_STEPS = ((torch.bfloat16, False, "delayed"),)


@pytest.mark.parametrize(
    ("dtype", "is_trained", "recipe"),
    [
        pytest.param(*step, marks=() if step in _QUICK_STEPS else pytest.mark.soak)
        for step in _ALL_STEPS
    ],
    ids=str,
)
def test_a_step_takes_the_predicted_bytes_with_tiles_of_any_size(
    dtype: torch.dtype, is_trained: bool, recipe: str
) -> None:
    settings: dict[str, Any] = {"is_trained": is_trained, "dtype": dtype}
    free = Planned(recipe, 2**40, **settings)
    with pytest.raises(BudgetError) as refused:
        Planned(recipe, 1, **settings)
    smallest_bytes = refused.value.smallest_bytes
    assert smallest_bytes is not None
    least = Planned(recipe, smallest_bytes, **settings)
    for step in (free, least):
        assert step.measured_bytes == step.predicted_bytes
    assert free.tile_rows != least.tile_rows
    assert least.peak_bytes <= smallest_bytes < free.peak_bytes - LOGITS_BYTES // 2
    assert least.measured_bytes < LOGITS_BYTES
    for name, gradient in least.gradients.items():
        assert_close(gradient, free.gradients[name], 2 * torch.finfo(dtype).eps + 1e-5)
