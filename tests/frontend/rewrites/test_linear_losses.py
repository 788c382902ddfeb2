"""The loss of a linear layer is one operator, with the same numbers; what only resembles one stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.frontend.rewrites import linear_losses
from thunder_memsave.ops.families.counted_targets import counted_targets
from thunder_memsave.sharding.rows import gather_rows
from thunder_memsave.sharding.sharded_parameter import is_sharded

ROWS, LENGTH, WIDTH, CLASSES = 2, 9, 16, 50
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _small_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_losses, "FEWEST_LOGITS", 1)


class Model(nn.Module):
    def __init__(self, loss: Loss, *, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss = loss
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.head, torch.tanh(self.layer(self.embedding(ids))), targets)


def plain(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten())


def shifted(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = head(hidden).float()[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), targets[..., 1:].reshape(-1))


def of_transformers(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = head(hidden[:, slice(0, None), :]).float()
    targets = F.pad(targets, (0, 1), value=-100)[..., 1:].contiguous()
    loss = F.cross_entropy(
        logits.view(-1, CLASSES), targets.view(-1), ignore_index=-100, reduction="sum"
    )
    return loss / 7


def with_columns(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden).transpose(1, 2), targets, label_smoothing=0.1)


def capped(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = torch.tanh(head(hidden) * 0.7 / 3.0) * 3.0
    return F.cross_entropy(logits.reshape(-1, CLASSES), targets.flatten())


def per_token(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(head(hidden).permute(0, 2, 1), targets, reduction="none")
    return (losses * torch.linspace(0.5, 1.5, LENGTH)).sum()


def ignoring_a_class(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden[:, 0]), targets[:, 0].clamp(min=0), ignore_index=3)


def ignoring_three(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten(), ignore_index=3)


def last_tokens(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden)[:, -1], targets[:, -1])


def with_an_adapter(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    more = F.linear(F.linear(hidden, torch.ones(2, WIDTH)), torch.ones(CLASSES, 2))
    return F.cross_entropy((head(hidden) + more * 0.1).flatten(0, 1), targets.flatten())


def counted(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    num_kept = torch.tensor(ROWS * LENGTH - 4)
    return F.cross_entropy(head(hidden).flatten(0, 1), counted_targets(targets, num_kept).view(-1))


JOINED: tuple[Loss, ...] = (
    *(counted, plain, shifted, of_transformers, with_columns, capped, per_token),
    *(ignoring_a_class, last_tokens, with_an_adapter),
)


def weighted(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 1.5, CLASSES)
    return F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten(), weight)


def read_twice(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = head(hidden).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten()) + logits.mean()


def with_two_adapters(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    more = [F.linear(F.linear(hidden, torch.ones(2, WIDTH)), torch.ones(CLASSES, 2)) for _ in "ab"]
    return F.cross_entropy((head(hidden) + more[0] + more[1]).flatten(0, 1), targets.flatten())


def of_probabilities(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    wanted = F.one_hot(targets.clamp(min=0), CLASSES).float() * 0.9 + 0.1 / CLASSES
    return F.cross_entropy(head(hidden).flatten(0, 1), wanted.flatten(0, 1))


def some_classes(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = head(hidden)[..., : CLASSES - 1].flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten().clamp(max=CLASSES - 2))


def tokens_as_classes(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden), targets[:, :1].clamp(0, LENGTH - 1).expand(-1, CLASSES))


def without_gradients(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    with torch.no_grad():
        logits = head(hidden).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten()) + hidden.sum()


def masked(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = head(hidden).flatten(0, 1).masked_fill(torch.arange(CLASSES) == 0, -1e4)
    return F.cross_entropy(logits, targets.flatten().clamp(min=1))


def some_classes_by_an_ellipsis(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = head(hidden)[:, :, : CLASSES - 1, ...].flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten().clamp(max=CLASSES - 2))


def of_a_vector(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden[0], head.weight[0]).unsqueeze(0)  # type: ignore[index]
    return F.cross_entropy(logits, targets[0, :1].clamp(0, LENGTH - 1))


LEFT_ALONE: tuple[Loss, ...] = (
    *(some_classes_by_an_ellipsis, of_a_vector),
    *(weighted, read_twice, with_two_adapters, of_probabilities, some_classes),
    *(tokens_as_classes, without_gradients, masked),
)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, CLASSES, (ROWS, LENGTH))
    targets = ids.roll(1, 1)
    targets[0, :4] = -100
    return ids, targets


def check(model: Model, *, rtol: float = 1e-5, atol: float = 1e-7) -> CompiledModule:
    """Compare the loss and all gradients with eager's, backward twice."""
    eager, compiled = copy.deepcopy(model), CompiledModule(model)
    losses = [call(*batch()) for call in (eager, compiled)]
    assert losses[0].dtype is losses[1].dtype
    torch.testing.assert_close(losses[1], losses[0], rtol=rtol, atol=atol)
    for loss in losses:
        loss.backward(retain_graph=True)
        loss.backward()
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=rtol, atol=atol)
    return compiled


def is_joined(compiled: CompiledModule) -> bool:
    symbols = compiled.captures[-1].forward_traces[-1].bound_symbols
    names = [b.sym.name for b in symbols]
    found = any(n.startswith("linear_cross_entropy") for n in names)
    assert found != any("log_softmax" in n for n in names)
    return found


@pytest.mark.parametrize("loss", JOINED, ids=lambda f: f.__name__)
def test_it_is_found_as_people_write_it(loss: Loss) -> None:
    assert is_joined(check(Model(loss)))


def test_a_number_of_kept_targets_is_part_of_it() -> None:
    for loss in (counted, plain):
        compiled = CompiledModule(Model(loss))
        compiled(*batch()).backward()
        (of_loss,) = (
            b
            for b in compiled.captures[-1].forward_traces[-1].bound_symbols
            if b.sym.name.startswith("linear_cross_entropy")
        )
        assert (of_loss.args[5] is not None) is (loss is counted)


def test_counted_targets_are_a_copy_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_losses, "FEWEST_LOGITS", ROWS * LENGTH * CLASSES + 1)
    assert not is_joined(check(Model(counted), rtol=0.0, atol=0.0))


@pytest.mark.parametrize("loss", LEFT_ALONE, ids=lambda f: f.__name__)
def test_what_the_operator_does_not_compute_is_left_alone(loss: Loss) -> None:
    assert not is_joined(check(Model(loss)))


def test_few_logits_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_losses, "FEWEST_LOGITS", ROWS * LENGTH * CLASSES + 1)
    assert not is_joined(check(Model(plain), rtol=0.0, atol=0.0))


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_heads_may_be_tied_biased_or_frozen(frozen: bool) -> None:
    for model in (Model(plain, tied=True), Model(plain, bias=True), Model(per_token, bias=True)):
        model.head.requires_grad_(not frozen)
        assert is_joined(check(model))


@pytest.mark.parametrize("is_shifted", [False, True], ids=["plain", "shifted"])
@pytest.mark.parametrize("options", [{}, {"lora_dropout": 0.5}, {"use_rslora": True}], ids=str)
def test_heads_may_have_lora(options: dict[str, Any], is_shifted: bool) -> None:
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["head"], **options)
    peft.inject_adapter_in_model(config, model := Model(shifted if is_shifted else plain))
    torch.manual_seed(2)
    for name, p in model.named_parameters():
        p.requires_grad_("lora" in name or "layer" in name)
        if "lora_B" in name:
            nn.init.normal_(p)
    eager, compiled = copy.deepcopy(model), CompiledModule(model)
    for call in (eager, compiled):
        torch.manual_seed(3)
        call(*batch()).backward()
    assert is_joined(compiled)
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)
    with torch.autocast("cpu", torch.bfloat16):
        assert is_joined(check(Model(with_an_adapter), rtol=0.02, atol=1e-3))


def test_dtypes_and_autocast() -> None:
    assert is_joined(check(Model(plain).double(), rtol=1e-12, atol=1e-14))
    assert is_joined(check(Model(shifted).bfloat16(), rtol=0.02, atol=1e-3))
    with torch.autocast("cpu", torch.bfloat16):
        assert is_joined(check(Model(shifted), rtol=0.02, atol=1e-3))


def test_in_float16_gradients_are_not_made_before_they_are_scaled() -> None:
    assert not is_joined(check(Model(shifted).half(), rtol=0.02, atol=1e-3))
    with torch.autocast("cpu", torch.float16):
        assert not is_joined(check(Model(shifted), rtol=0.02, atol=1e-3))


def test_the_usual_ignored_target_is_no_class_where_another_is_ignored() -> None:
    ids, targets = batch()
    targets[0, 0] = -100
    for run in (Model(ignoring_three), CompiledModule(Model(ignoring_three))):
        with pytest.raises(IndexError, match="is out of bounds"):
            run(ids, targets)


def test_without_gradients_it_is_the_loss_alone() -> None:
    model = Model(plain)
    compiled = CompiledModule(model)
    with torch.no_grad():
        found, expected = compiled(*batch()), model(*batch())
    torch.testing.assert_close(found, expected)
    symbols = compiled.captures[-1].forward_traces[-1].bound_symbols
    assert any(b.sym.name == "linear_cross_entropy_alone" for b in symbols)


class Varied(nn.Module):
    """A loss of a head that may be tied, biased, adapted, smoothed."""

    def __init__(self, *, tied: bool, bias: bool, lora: bool, smoothing: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.smoothing = smoothing
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.head: nn.Module = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        if lora:
            config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["head"])
            peft.inject_adapter_in_model(config, self)
            nn.init.normal_(self.head.lora_B["default"].weight)  # type: ignore[union-attr, index]

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.embedding(ids))).flatten(0, 1)
        logits = logits if logits.dtype is torch.float64 else logits.float()
        return F.cross_entropy(logits, targets.flatten(), label_smoothing=self.smoothing)


@pytest.mark.soak
@pytest.mark.parametrize("ignored", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tied", "bias", "lora", "smoothing"), list(product(*[(False, True)] * 3, (0.0, 0.1)))
)
def test_all_heads_in_all_dtypes(
    tied: bool, bias: bool, lora: bool, smoothing: float, dtype: torch.dtype, ignored: float
) -> None:
    model = Varied(tied=tied, bias=bias, lora=lora, smoothing=smoothing).to(dtype)
    exact = copy.deepcopy(model).double()
    ids, targets = batch()
    targets[torch.rand(targets.shape) < ignored] = -100
    compiled = CompiledModule(copy.deepcopy(model))
    runs: list[tuple[nn.Module, list[Tensor]]] = []
    for call in (compiled, model, exact):
        loss = call(ids, targets)
        loss.backward()
        gradients = [p.grad for p in call.parameters() if p.grad is not None]
        runs.append((call, [loss.detach(), *gradients]))
    assert is_joined(compiled)
    # A gradient in bfloat16 that two paths add up is rounded three times: both products, and their sum.
    most = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 3 * 2**-8}[dtype]
    for ours, theirs, right in zip(*(found for _, found in runs), strict=True):
        scale = right.abs().max()
        error, plain = ((t.double() - right).abs().max() / scale for t in (ours, theirs))
        assert error <= max(most, 2 * plain)


@on_fabric_rank
def _train_on_ranks() -> None:
    linear_losses.FEWEST_LOGITS = 1
    for mode, loss, tied in (
        ("zero2", plain, False),
        ("zero3", plain, True),
        ("zero3", per_token, False),
    ):
        eager = Model(loss, tied=tied)
        fabric = make_fabric(devices=2, sharding=mode)
        model: Any = fabric.setup(copy.deepcopy(eager))
        rows = [row.unsqueeze(0) for row in batch()[0]]
        mine = rows[fabric.global_rank]
        fabric.backward(model(mine, mine))
        for row in rows:
            (eager(row, row) / 2).backward()
        strategy: Any = fabric.strategy
        named: Any = model._original_module.named_parameters()
        for (name, p), expected in zip(named, eager.parameters(), strict=True):
            found = (
                gather_rows(p.grad, p.unsharded_shape, strategy.data_parallel)
                if is_sharded(p)
                else p.grad
            )
            torch.testing.assert_close(found, expected.grad, rtol=1e-5, atol=1e-7, msg=name)
        assert is_joined(model._forward_module)


def test_heads_may_be_sharded() -> None:
    run_on_fabric_ranks(_train_on_ranks, 2)
