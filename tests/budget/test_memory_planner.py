"""A step stays within its budget, takes the predicted bytes, and computes the same bits as one that keeps all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness import models
from harness.fabric import make_fabric
from harness.memory import measured_peak_bytes
from thunder_memsave import ThunderMemsaveStrategy
from thunder_memsave.budget import plan_request
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.budget.planned_call import PlannedCall
from thunder_memsave.compiler.compile_call import CallCompiler
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.errors import BudgetError
from thunder_memsave.fabric.forward_module import ForwardModule
from thunder_memsave.finetune.model.documents_apart import take_boundaries
from thunder_memsave.measure.step_memory import StepMemoryError
from thunder_memsave.ops.families.packed_attention import boundaries_of
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import Plan, StepMemory
from thunder_memsave.planner.search.solve import solve
from thunder_memsave.settings.value_kinds import BytesOrFraction

# Fractions of the peak of keep_all.
PARTS = (0.9, 0.7, 0.5, 0.35, 0.25)
KEEP_ALL = MemoryConfig(policy="keep_all")
VOCAB_SIZE = 16  # few logits, so that blocks hold most of the memory


class Block(nn.Module):
    """A residual of two layers with dropout between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 6 * width), nn.Linear(6 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.down(nn.functional.dropout(hidden, 0.1, self.training))


class Stack(nn.Module):
    """Blocks, each of which can be a checkpointed region of the user's."""

    def __init__(self, num_blocks: int = 12, width: int = 8, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> tuple[Tensor]:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return (x.square().mean(),)


def stack(**settings: Any) -> tuple[nn.Module, dict[str, Any]]:
    return Stack(**settings), {"x": torch.randn(512, 8)}


def language_model(
    build: Callable[..., nn.Module], num_layers: int, **settings: Any
) -> tuple[nn.Module, dict[str, Any]]:
    ids = torch.randint(3, VOCAB_SIZE, (8, 32))
    model = build(num_layers, vocab_size=VOCAB_SIZE, **settings)
    return model, {"input_ids": ids, "labels": ids}


def packed(num_layers: int) -> tuple[nn.Module, dict[str, Any]]:
    """Rows of one to three documents: the longest has the length for which a step is planned."""
    model, batch = language_model(models.llama, num_layers)
    take_boundaries(model)
    ends = torch.tensor([[32, 32, 32], [5, 7, 31], [16, 32, 32], [0, 0, 0]], dtype=torch.int32)
    return model, {**batch, "attention_mask": boundaries_of(ends.repeat(2, 1), 32)}


def lora(num_layers: int) -> tuple[nn.Module, dict[str, Any]]:
    """Adapters on frozen weights, as peft adds them."""
    import peft

    model: Any
    model, batch = language_model(models.qwen2, num_layers)
    config = peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1)
    adapted: Any = peft.get_peft_model(model, config)
    return adapted.base_model.model, batch


GPT2_DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
BERT_DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "stack": stack,
    "deep stack": partial(stack, num_blocks=32),
    "gpt2": partial(language_model, models.gpt2, 3, **GPT2_DROPOUT),
    "llama": partial(language_model, models.llama, 3),
    "qwen2": partial(language_model, models.qwen2, 3, tie_word_embeddings=True),
    "bert": partial(language_model, models.bert, 3, **BERT_DROPOUT),
    "packed": partial(packed, 3),
    "lora": partial(lora, 2),
    "deep llama": partial(language_model, models.llama, 20),
}


@dataclass
class Step:
    """The results of a step."""

    loss: Tensor
    gradients: list[Tensor | None]
    generator: Tensor
    """State of the generator afterwards."""

    def equals(self, other: Step) -> bool:
        pairs = zip(self._tensors(), other._tensors(), strict=True)
        return all((a is b is None) or torch.equal(a, b) for a, b in pairs)  # type: ignore[arg-type]

    def _tensors(self) -> list[Tensor | None]:
        return [self.loss, *self.gradients, self.generator]


@dataclass
class Model:
    """One model, compiled for many budgets from one capture."""

    module: nn.Module
    batch: dict[str, Any]
    _traced: dict[tuple[bool, bool], Any] = field(default_factory=dict)

    def planned(
        self,
        memory: MemoryConfig = KEEP_ALL,
        *,
        budget_bytes: int | None = None,
        step_memory: StepMemory | None = None,
    ) -> CompiledModule:
        planner = MemoryPlanner(
            memory,
            device=device("cpu"),
            budget_bytes=budget_bytes,
            step_memory=lambda: step_memory or StepMemory(),
        )
        return CompiledModule(self.module, planner=planner)

    def step(self, compiled: nn.Module) -> Step:
        """Run a step; the first one captures and plans."""
        with self._one_capture():
            torch.manual_seed(7)
            loss = compiled(**self.batch)[0]
            loss.backward()
        step = Step(
            loss.detach(), [p.grad for p in self.module.parameters()], torch.get_rng_state()
        )
        self.module.zero_grad()
        return step

    def measured_bytes(self, compiled: nn.Module) -> int:
        """Return the peak of a step beside parameters and the batch."""

        def run() -> None:
            outputs = compiled(**self.batch)  # the caller is taken to hold all of them
            outputs[0].backward()

        measured = measured_peak_bytes(run)
        self.module.zero_grad()
        return measured

    @contextmanager
    def _one_capture(self) -> Iterator[None]:
        capture = CallCompiler._traced
        state = (self.module.training, torch.is_grad_enabled())

        def once(*args: Any) -> Any:
            if state not in self._traced:
                traced = capture(*args)
                self._traced[state] = (traced, set(traced.lowered.trace.names))
            traced, names = self._traced[state]
            # Passes add names; a plan is found again only for values of the same names.
            traced.lowered.trace.names = set(names)
            return traced

        with patch.object(CallCompiler, "_traced", once):
            yield


def made(name: str) -> Model:
    torch.manual_seed(0)
    module, batch = MODELS[name]()
    return Model(module.train(), batch)


def the_call(compiled: CompiledModule) -> PlannedCall:
    assert compiled.planner is not None
    return compiled.planner.calls[-1]


def the_plan(compiled: CompiledModule) -> Plan:
    plan = the_call(compiled).plan
    assert plan is not None
    return plan


def held_bytes(call: PlannedCall) -> int:
    """Return the bytes of arguments and others that are live before a step."""
    return sum(call.program.storages[s].nbytes for s in call.program.held) + call.memory.other_bytes


def predicted_bytes(compiled: CompiledModule) -> int:
    """Return the predicted peak of a step beside its arguments."""
    call = the_call(compiled)
    return call.profile.peak_bytes - held_bytes(call)


@contextmanager
def solving_for(seconds: float) -> Iterator[None]:
    """Limit the solver's time: the plans are good enough to be checked."""
    with patch.object(plan_request, "solve", partial(solve, time_limit_s=seconds)):
        yield


def check(model: Model, compiled: CompiledModule, reference: Step, budget_bytes: int) -> Plan:
    assert model.step(compiled).equals(reference)
    call, plan = the_call(compiled), the_plan(compiled)
    measured = model.measured_bytes(compiled)
    assert measured == predicted_bytes(compiled)
    assert measured + held_bytes(call) <= budget_bytes
    assert plan.predicted_peak_bytes == call.profile.peak_bytes
    assert plan.budget_bytes == budget_bytes
    return plan


def floor_bytes(model: Model) -> int:
    """Return the smallest budget for which the error says that there is a plan."""
    with pytest.raises(BudgetError, match="no plan was found that stays within it") as error:
        model.step(model.planned(MemoryConfig(), budget_bytes=1))
    assert error.value.smallest_bytes is not None
    assert error.value.bound_bytes is not None
    assert error.value.bound_bytes <= error.value.smallest_bytes
    return error.value.smallest_bytes


def check_budgets(name: str, parts: tuple[float, ...]) -> list[int]:
    model = made(name)
    compiled = model.planned()
    reference = model.step(compiled)
    keep_all_bytes = the_plan(compiled).predicted_peak_bytes
    assert model.measured_bytes(compiled) == predicted_bytes(compiled)
    floor = floor_bytes(model)
    budgets = [floor, *sorted(b for p in parts if (b := int(p * keep_all_bytes)) > floor)]
    times = []
    for budget in budgets:
        plan = check(model, model.planned(MemoryConfig(), budget_bytes=budget), reference, budget)
        times.append(plan.recompute_us)
    assert times == sorted(times, reverse=True)
    return budgets


@pytest.mark.parametrize(
    ("name", "parts"), [("stack", PARTS[:2]), ("gpt2", ()), ("llama", (0.7,)), ("packed", (0.7,))]
)
def test_a_step_stays_within_its_budget_to_the_byte_with_the_bits_of_keeping_all(
    name: str, parts: tuple[float, ...]
) -> None:
    with solving_for(0.3):
        budgets = check_budgets(name, parts)
    assert len(budgets) == 1 + len(parts)  # all of them are above the least that is possible


@pytest.mark.soak
@pytest.mark.parametrize("name", MODELS)
def test_every_model_at_every_budget(name: str) -> None:
    budgets = check_budgets(name, PARTS)
    assert name != "deep stack" or len(budgets) == 1 + len(PARTS)


@pytest.fixture(scope="module")
def small() -> Model:
    torch.manual_seed(0)
    module, batch = stack(num_blocks=2)
    return Model(module.train(), batch)


def actions(plan: Plan, module: str) -> set[str]:
    """Return the kinds of actions for the activations of a module and those within it."""
    inside = [d for d in plan.decisions if f"{d.module}.".startswith(f"{module}.")]
    return {plan.actions[d.name].kind for d in inside}


def test_policies_keep_all_or_recompute_all_with_the_same_bits(small: Model) -> None:
    kept, again = small.planned(), small.planned(MemoryConfig(policy="recompute_all"))
    reference = small.step(kept)
    assert small.step(again).equals(reference)
    assert the_plan(kept).recompute_us == 0 < the_plan(again).recompute_us
    assert the_plan(again).saved_bytes < the_plan(kept).saved_bytes
    assert small.measured_bytes(again) == predicted_bytes(again)
    assert the_plan(again).budget_bytes is None


def test_pinned_modules_are_kept_or_recomputed(small: Model) -> None:
    memory = MemoryConfig(keep=("blocks.0",), recompute=("blocks.1.up",))
    compiled = small.planned(memory)
    reference = small.step(small.planned())
    assert small.step(compiled).equals(reference)
    assert actions(the_plan(compiled), "blocks.0.up") == {"keep"}
    assert actions(the_plan(compiled), "blocks.1.up") == {"recompute"}
    assert small.measured_bytes(compiled) == predicted_bytes(compiled)


def test_regions_of_torch_checkpoint_are_recomputed_whatever_the_policy(small: Model) -> None:
    torch.manual_seed(0)
    module, batch = stack(num_blocks=2, checkpoints=True)
    module.load_state_dict(small.module.state_dict())
    model = Model(module.train(), {**small.batch})
    assert batch.keys() == small.batch.keys()
    plain, compiled = small.planned(), model.planned()
    assert model.step(compiled).equals(small.step(plain))
    assert "keep" in actions(the_plan(plain), "blocks.0.up")
    assert the_plan(compiled).saved_bytes < the_plan(plain).saved_bytes
    assert model.measured_bytes(compiled) == predicted_bytes(compiled)


def test_without_gradients_a_call_is_simulated_to_the_byte(small: Model) -> None:
    compiled = small.planned()
    with torch.no_grad():
        compiled(**small.batch)
        measured = measured_peak_bytes(lambda: compiled(**small.batch))
    assert the_call(compiled).plan is None
    assert measured == predicted_bytes(compiled) > 0


def test_other_memory_of_a_step_counts_against_the_budget_too(small: Model) -> None:
    """Gradients of earlier micro-batches, and the optimizer's state."""
    free = small.planned()
    small.step(free)
    free_bytes = the_plan(free).predicted_peak_bytes
    memory = StepMemory(optimizer_bytes=free_bytes // 4)
    compiled = small.planned(MemoryConfig(), budget_bytes=free_bytes, step_memory=memory)
    small.step(compiled)
    assert the_plan(compiled).recompute_us > 0
    assert small.measured_bytes(compiled) + held_bytes(the_call(compiled)) <= free_bytes * 3 // 4


def test_a_second_run_finds_its_plan_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(part: float) -> tuple[Step, Plan]:
        torch.manual_seed(0)
        module, batch = stack(num_blocks=2)
        model = Model(module.train(), batch)
        compiled = model.planned(MemoryConfig(), budget_bytes=int(part * 2**20))
        return model.step(compiled), the_plan(compiled)

    first, plan = run(0.52)
    assert plan.recompute_us > 0

    def refuse(*args: Any, **kwargs: Any) -> Plan:
        raise AssertionError("solved again")

    monkeypatch.setattr(plan_request, "solve", refuse)
    second, found = run(0.52)
    assert second.equals(first)
    assert found == plan
    with pytest.raises(AssertionError, match="solved again"):
        run(0.51)


def test_fabric_says_its_plan(small: Model) -> None:
    fabric = make_fabric(memory=MemoryConfig(policy="recompute_all"))
    strategy = fabric.strategy
    assert isinstance(strategy, ThunderMemsaveStrategy)
    assert strategy.plan is None
    with pytest.raises(RuntimeError, match=r"no plan yet: .* Run one step first"):
        strategy.explain()
    original = Stack(2)
    model, _ = fabric.setup(original, torch.optim.AdamW(original.parameters()))
    fabric.backward(model(**small.batch)[0])
    assert strategy.plan is not None
    assert actions(strategy.plan, "blocks.1.up") == {"recompute"}
    text = strategy.explain()
    assert "recompute time" in text
    assert "blocks.*.up" in text
    assert Path(__file__).name in text


def test_fabric_says_the_plan_of_the_model_that_was_compiled_last() -> None:
    fabric = make_fabric()
    strategy = fabric.strategy
    assert isinstance(strategy, ThunderMemsaveStrategy)
    models = [fabric.setup(nn.Sequential(nn.Linear(4, width), nn.GELU())) for width in (2, 3, 5, 7)]
    for num_rows in (1, 2):  # the second is a capture of its own
        for model in models:
            fabric.backward(model(torch.ones(num_rows, 4)).sum())
            assert isinstance(model._forward_module, ForwardModule)
            planner = model._forward_module.planner
            assert planner is not None
            assert strategy.plan is not None
            assert strategy.plan is planner.calls[-1].plan


def test_gradients_of_earlier_micro_batches_are_planned_for() -> None:
    fabric = make_fabric(memory=MemoryConfig(policy="keep_all"))
    strategy = fabric.strategy
    assert isinstance(strategy, ThunderMemsaveStrategy)
    original = Stack(2)
    model, _ = fabric.setup(original, torch.optim.SGD(original.parameters()))
    with fabric.no_backward_sync(model):
        fabric.backward(model(torch.randn(512, 8))[0])
    assert isinstance(model._forward_module, ForwardModule)
    planner = model._forward_module.planner
    assert planner is not None
    gradient_bytes = sum(p.numel() * p.element_size() for p in original.parameters())
    assert planner.calls[-1].memory.gradient_bytes == gradient_bytes


@pytest.mark.parametrize("lengths", [(128, 512), (512, 128), (128, 256, 512)])
def test_a_batch_longer_than_the_first_is_within_the_budget_too(
    lengths: tuple[int, ...], small: Model, caplog: pytest.LogCaptureFixture
) -> None:
    whole = small.planned()
    small.step(whole)
    budget_bytes = the_plan(whole).predicted_peak_bytes * 8 // 10
    compiled = small.planned(MemoryConfig(), budget_bytes=budget_bytes)
    for length in lengths:
        x = small.batch["x"][:length].clone()

        def step(x: Tensor = x) -> None:
            compiled(x=x)[0].backward()

        step()
        small.module.zero_grad()
        measured_bytes = held_bytes(the_call(compiled)) + measured_peak_bytes(step)
        assert measured_bytes == the_call(compiled).profile.peak_bytes <= budget_bytes
        small.module.zero_grad()
    assert "this batch needs" not in caplog.text


def test_an_optimizer_whose_memory_is_not_known_needs_its_bytes_from_the_script(
    small: Model, caplog: pytest.LogCaptureFixture
) -> None:
    fabric = make_fabric(memory=MemoryConfig(budget=BytesOrFraction(2**30)))
    strategy = fabric.strategy
    assert isinstance(strategy, ThunderMemsaveStrategy)
    original = Stack(2)
    model, optimizer = fabric.setup(original, torch.optim.LBFGS(original.parameters()))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**small.batch)[0]
        fabric.backward(loss)
        return loss

    with pytest.raises(StepMemoryError, match=r"LBFGS needs is not known: .*count_caller\(other"):
        optimizer.step(closure)
    strategy.count_caller(other_bytes=10**6)
    optimizer.step(closure)
    assert "the plan counts no optimizer" in caplog.text
    assert strategy.plan is not None
    assert strategy.plan.predicted_peak_bytes > 10**6
