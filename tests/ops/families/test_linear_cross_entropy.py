"""The loss of a linear layer in tiles: PyTorch's numbers, the bytes that are predicted, and no work without need."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.memory import measured_memory, measured_peak_bytes
from thunder_memsave.aten.record import AtenRecord
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.ops.families import linear_cross_entropy as operation
from thunder_memsave.ops.families import loss_sums
from thunder_memsave.ops.families.loss_sums import Gradients, Wanted
from thunder_memsave.ops.families.tiled_loss import (
    IGNORED,
    TILE_BYTES,
    Head,
    LossOptions,
    losses_in_tiles,
    tile_rows,
)
from thunder_memsave.planner.cost import costs_us
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import StepMemory

TOKENS, WIDTH, CLASSES, RANK = 37, 16, 50, 3
PLAIN = LossOptions()
ALL = LossOptions(label_smoothing=0.1, z_loss=0.01, soft_cap=5.0, logit_scale=0.5)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
EVERY_OPERAND = Wanted(hidden=True, weight=True, bias=True, adapter=True)


def operands(dtype: torch.dtype, ignored: float) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    shapes = ((TOKENS, WIDTH + RANK), (CLASSES, WIDTH), (CLASSES,), (CLASSES, RANK))
    targets = torch.randint(0, CLASSES, (TOKENS,))
    targets[torch.rand(TOKENS) < ignored] = IGNORED
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes], targets


def composed(tensors: Sequence[Tensor], targets: Tensor, reduction: str, of: LossOptions) -> Tensor:
    """Compute the loss by PyTorch's functions."""
    hidden, weight, bias, adapter = tensors
    logits = F.linear(hidden[:, :WIDTH], weight, bias) + hidden[:, WIDTH:] @ adapter.T
    logits = logits if logits.dtype is torch.float64 else logits.float()
    logits = logits * of.logit_scale
    if of.soft_cap is not None:
        logits = of.soft_cap * torch.tanh(logits / of.soft_cap)
    loss = F.cross_entropy(logits, targets, reduction=reduction, label_smoothing=of.label_smoothing)
    if not of.z_loss:
        return loss
    is_kept = targets != IGNORED
    more = of.z_loss * logits.logsumexp(-1).square() * is_kept
    if reduction == "none":
        return loss + more
    return loss + more.sum() / (is_kept.sum() if reduction == "mean" else 1)


def in_tiles(
    tensors: Sequence[Tensor],
    targets: Tensor,
    reduction: str,
    of: LossOptions,
    rows: int,
    num_kept: Tensor | None = None,
    *,
    is_on_cuda: bool = False,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return the loss, its gradients and the cotangent that they are for."""
    options = (of.label_smoothing, of.z_loss, of.soft_cap, of.logit_scale)
    settings = (TOKENS, WIDTH, CLASSES, RANK, reduction, *options, rows, is_on_cuda, False)
    kernel = operation._kernel_for(EVERY_OPERAND, reduction)  # type: ignore[arg-type]
    values = [*(t.detach() for t in tensors), targets, num_kept, *settings]
    results = kernel.run(*values)
    results = results if isinstance(results, tuple) else (results,)
    named = {
        **dict(zip(kernel.takes, values, strict=True)),
        **dict(zip(kernel.results, results, strict=True)),
    }
    grad = torch.linspace(0.5, 1.5, results[0].numel(), dtype=results[0].dtype)
    grad = grad.reshape(results[0].shape)
    gradients: list[Tensor] = []
    for derivative in kernel.derivatives:
        found = derivative.run(grad, *(named[n] for n in derivative.reads))
        gradients += found if isinstance(found, tuple) else [found]
    return results[0], gradients, grad


def relative_error(found: Tensor, expected: Tensor) -> float:
    scale = expected.double().abs().max().clamp(min=1e-30)
    return float((found.double() - expected.double()).abs().max() / scale)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "all"])
def test_loss_and_gradients_are_those_of_pytorch(dtype: torch.dtype, options: LossOptions) -> None:
    for reduction, ignored, rows in product(
        ("mean", "sum", "none"), (0.0, 0.3, 0.9, 1.0), (1, 7, TOKENS)
    ):
        tensors, targets = operands(dtype, ignored)
        loss, found, grad = in_tiles(tensors, targets, reduction, options, rows)
        expected = composed(tensors, targets, reduction, options)
        torch.testing.assert_close(
            loss, expected.detach(), rtol=TOLERANCE[dtype], atol=1e-7, equal_nan=True
        )
        gradients = torch.autograd.grad(expected, tensors, grad)
        if ignored == 1.0:
            assert not any(g.any() for g in found), "a token that is ignored has no gradient"
            continue
        errors = list(map(relative_error, found, gradients))
        assert max(errors) < TOLERANCE[dtype], (reduction, ignored, rows, errors)


def test_a_class_that_is_ruled_out_has_pytorchs_loss_and_gradients() -> None:
    options = LossOptions(z_loss=0.01)
    tensors, targets = operands(torch.float64, ignored=0.3)
    targets[targets == 0] = 1
    with torch.no_grad():
        tensors[2][0] = -torch.inf
    loss, gradients, grad = in_tiles(tensors, targets, "mean", options, rows=7)
    expected = composed(tensors, targets, "mean", options)
    expected.backward(grad)
    assert relative_error(loss, expected.detach()) <= 1e-12
    for t, found in zip((tensors[0], tensors[1]), gradients[:2], strict=True):
        assert t.grad is not None
        assert relative_error(found, t.grad) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_in_lower_precision_the_error_is_that_of_pytorch(
    dtype: torch.dtype, reduction: str
) -> None:
    for ignored, rows in product((0.0, 0.5), (5, TOKENS)):
        tensors, targets = operands(dtype, ignored)
        loss, found, grad = in_tiles(tensors, targets, reduction, PLAIN, rows)
        exact_tensors = [t.detach().double().requires_grad_() for t in tensors]
        exact = composed(exact_tensors, targets, reduction, PLAIN)
        theirs = composed(tensors, targets, reduction, PLAIN)
        exact_loss, their_loss = exact.detach(), theirs.detach()
        most = 2 * relative_error(their_loss, exact_loss) + torch.finfo(dtype).eps / 8
        assert relative_error(loss, exact_loss) <= most
        exact_gradients = torch.autograd.grad(exact, exact_tensors, grad.double())
        of_theirs = torch.autograd.grad(theirs, tensors, grad)
        for mine, plain, right in zip(found, of_theirs, exact_gradients, strict=True):
            most = 2 * relative_error(plain, right) + torch.finfo(dtype).eps  # of sums of tiles
            assert relative_error(mine, right) <= most


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_on_cuda_sums_are_added_up_within_products(
    reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(total: Tensor, left: Tensor, right: Tensor) -> None:
        total.add_(left.float() @ right.float())

    monkeypatch.setattr(loss_sums, "add_wide_product", add)
    tensors, targets = operands(torch.bfloat16, 0.3)
    _, found, grad = in_tiles(tensors, targets, reduction, PLAIN, 5, is_on_cuda=True)
    exact_tensors = [t.detach().double().requires_grad_() for t in tensors]
    exact = composed(exact_tensors, targets, reduction, PLAIN)
    for mine, right in zip(
        found, torch.autograd.grad(exact, exact_tensors, grad.double()), strict=True
    ):
        assert relative_error(mine, right) <= 4 * torch.finfo(torch.bfloat16).eps


def test_on_cuda_no_product_is_made_beside_the_sum() -> None:
    peak_bytes, flops = {}, {}
    for is_on_cuda in (False, True):
        with FakeTensorMode(allow_non_fake_inputs=True):
            tensors, targets = operands(torch.bfloat16, 0.0)
            of_weight = torch.empty_like(tensors[1])
            wanted = Wanted(hidden=False, weight=True, bias=False)
            head = Head(tensors[1], None)
            with torch.no_grad(), AtenRecord((*tensors, targets, of_weight)) as record:
                losses_in_tiles(
                    *(tensors[0][:, :WIDTH], head, targets, PLAIN),
                    rows_per_tile=5,
                    is_on_cuda=is_on_cuda,
                    factors=torch.ones(()),
                    wanted=wanted,
                    make_gradients=partial(Gradients, None, of_weight, None),
                )
        peak_bytes[is_on_cuda], flops[is_on_cuda] = record.peak_bytes, record.flops
    assert flops[True] == flops[False] > 0
    assert peak_bytes[True] < peak_bytes[False]


def test_tiles_beside_a_large_sum_are_larger() -> None:
    alone = tile_rows(8192, 128_256, torch.bfloat16, PLAIN)
    beside = tile_rows(8192, 128_256, torch.bfloat16, PLAIN, width=4096)
    assert 4 * alone < beside < 8192
    assert beside * 128_256 * 6 <= 4 * 128_256 * 4096 // 2
    assert tile_rows(8192, 1000, torch.bfloat16, PLAIN, width=64) == 8192


def test_a_token_that_is_ignored_costs_nothing_on_a_cpu() -> None:
    flops = {}
    for num_ignored in (0, 20, TOKENS):
        tensors, targets = operands(torch.float32, 0.0)
        targets[:num_ignored] = IGNORED
        with torch.no_grad(), AtenRecord() as record:
            in_tiles(tensors, targets, "mean", PLAIN, 5)
        flops[num_ignored] = record.flops
    assert flops[20] * TOKENS == flops[0] * (TOKENS - 20)
    assert flops[TOKENS] == 0


def test_a_number_of_kept_targets_that_is_given_saves_the_same_work_and_keeps_the_bits() -> None:
    for reduction, ignored in product(("mean", "sum", "none"), (0.0, 0.3, 1.0)):
        tensors, targets = operands(torch.float32, ignored)
        kept = (targets != IGNORED).sum()
        with torch.no_grad(), AtenRecord() as counted:
            expected = in_tiles(tensors, targets, reduction, ALL, 5)
        with torch.no_grad(), AtenRecord() as given:
            found = in_tiles(tensors, targets, reduction, ALL, 5, kept)
        assert given.flops == counted.flops
        for mine, theirs in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0.0, atol=0.0, equal_nan=True)


def test_a_number_of_kept_targets_that_is_too_small_is_an_error() -> None:
    tensors, targets = operands(torch.float32, 0.3)
    kept = (targets != IGNORED).sum()
    in_tiles(tensors, targets, "mean", PLAIN, 5, kept + 1)
    with pytest.raises(RuntimeError, match="targets are kept, which was given as their number"):
        in_tiles(tensors, targets, "mean", PLAIN, 5, kept - 1)


def test_an_unknown_target_is_refused_as_by_pytorch() -> None:
    tensors, targets = operands(torch.float32, 0.0)
    targets[3] = CLASSES
    with pytest.raises(IndexError, match="Target 50 is out of bounds: there are 50 classes"):
        in_tiles(tensors, targets, "mean", PLAIN, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "all"])
def test_a_tile_has_a_bound_whatever_the_vocabulary_and_length(
    dtype: torch.dtype, options: LossOptions
) -> None:
    num_copies = (4 if dtype is torch.float32 else 6) + 4 * (options.soft_cap is not None)
    for num_tokens, num_classes in product((1, 2048, 10**6), (10, 32_000, 128_256, 10**6)):
        rows = tile_rows(num_tokens, num_classes, dtype, options)
        assert rows >= 1
        assert rows == 1 or rows * num_classes * num_copies <= TILE_BYTES < 256 * 2**20


WIDTH_OF_HEAD = 8


class LayerAndHead(nn.Module):
    """A layer and a head over a large vocabulary, with the loss."""

    def __init__(self, num_classes: int, *, is_trained: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH_OF_HEAD, WIDTH_OF_HEAD)
        self.head = nn.Linear(WIDTH_OF_HEAD, num_classes, bias=False)
        self.head.requires_grad_(is_trained)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layer(x)), targets)


class Run:
    """Steps of `Head`, planned."""

    def __init__(
        self,
        num_tokens: int,
        num_classes: int,
        *,
        is_trained: bool,
        policy: Literal["plan", "recompute_all"] = "plan",
        budget: int | None = None,
        between: int = 0,
    ) -> None:
        self.head = LayerAndHead(num_classes, is_trained=is_trained)
        self.planner = MemoryPlanner(
            MemoryConfig(policy=policy),
            device=device("cpu"),
            budget_bytes=budget,
            step_memory=lambda: StepMemory(between_bytes=between),
        )
        self.compiled = CompiledModule(self.head, planner=self.planner)
        self.x = torch.randn(num_tokens, WIDTH_OF_HEAD)
        self.targets = torch.randint(0, num_classes, (num_tokens,))
        self.step()

    def step(self) -> None:
        self.head.zero_grad()
        self.compiled(self.x, self.targets).backward()

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.head.parameters() if p.grad is not None]

    def in_forward(self) -> list[str]:
        trace = self.compiled.captures[-1].forward_traces[-1]
        return [b.sym.name for b in trace.bound_symbols if "cross_entropy" in b.sym.name]

    def predicted_bytes(self) -> int:
        call = self.planner.calls[-1]
        held = sum(call.program.storages[s].nbytes for s in call.program.held)
        return call.profile.peak_bytes - held

    def measured_bytes(self) -> int:
        self.head.zero_grad()
        return measured_peak_bytes(self.step)

    def between_bytes(self) -> int:
        """Bytes that live between forward and backward, beside the loss."""
        self.head.zero_grad()
        return measured_memory(lambda: self.compiled(self.x, self.targets)).end_bytes - 4


@pytest.mark.parametrize(
    ("num_tokens", "num_classes", "is_trained"), [(1024, 128_256, False), (600, 90_000, True)]
)
def test_its_bytes_are_those_that_are_predicted(
    num_tokens: int, num_classes: int, is_trained: bool
) -> None:
    kept = Run(num_tokens, num_classes, is_trained=is_trained)
    again = Run(num_tokens, num_classes, is_trained=is_trained, policy="recompute_all")
    assert [r.measured_bytes() for r in (kept, again)] == [
        r.predicted_bytes() for r in (kept, again)
    ]
    num_rows = num_tokens + is_trained * num_classes
    assert kept.between_bytes() == 4 * WIDTH_OF_HEAD * num_rows
    assert again.between_bytes() == 0
    assert all(map(torch.equal, kept.gradients(), again.gradients()))


class InFloat32(LayerAndHead):
    """The same with a loss in float32."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layer(x)).float(), targets)


def test_its_products_are_priced_in_the_dtype_that_they_read() -> None:
    head = InFloat32(20_000, is_trained=True).bfloat16()
    planner = MemoryPlanner(MemoryConfig(), device=device("h100"), budget_bytes=None)
    compiled = CompiledModule(head, planner=planner)
    x = torch.randn(64, WIDTH_OF_HEAD, dtype=torch.bfloat16)
    compiled(x, torch.arange(64)).backward()
    ops = planner.calls[-1].graph.ops
    (op,) = [o for o in ops if o.symbol == "linear_cross_entropy_hidden_weight"]
    assert (op.dtype, op.alone and op.alone.dtype) == ("bfloat16", "bfloat16")


def test_a_budget_moves_the_gradients_to_backward_for_the_price_of_the_loss() -> None:
    free = Run(64, 20_000, is_trained=True, between=2**24)
    peak = free.planner.calls[-1].profile.peak_bytes
    tight = Run(64, 20_000, is_trained=True, between=2**24, budget=peak - 1)
    assert free.in_forward() == ["linear_cross_entropy_hidden_weight"]
    assert tight.in_forward() == ["linear_cross_entropy_alone"]
    # The gradients of 64 hidden states give way to the hidden states.
    assert peak - tight.planner.calls[-1].profile.peak_bytes == 4 * WIDTH_OF_HEAD * 20_000
    assert all(map(torch.equal, free.gradients(), tight.gradients()))
    graph = free.planner.calls[-1].graph
    (number,) = [i for i, o in enumerate(graph.ops) if o.alone is not None]
    op = graph.ops[number]
    assert op.alone is not None
    assert op.flops == 3 * op.alone.flops  # for logits, and gradients of hidden states and weight
    assert costs_us(graph, device("cpu"), {op.key: 9.0, op.alone.key: 7.0})[number] == 7.0
