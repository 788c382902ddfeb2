from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import CausalLMOutput
from typing_extensions import override

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.language_model import sample_of
from thunder_memsave.callbacks import TrainingControl
from thunder_memsave.callbacks.hooks import HOOKS
from thunder_memsave.finetune.data.batches import Sharding, step_rows
from thunder_memsave.finetune.data.packing import Rows, pad
from thunder_memsave.finetune.data.tokenize import IGNORED
from thunder_memsave.finetune.objectives.loss_in_model import put_loss_in
from thunder_memsave.finetune.objectives.supervised import SupervisedFineTuning
from thunder_memsave.finetune.process import signals
from thunder_memsave.finetune.process.stop import NotFiniteError
from thunder_memsave.finetune.run_file.config import (
    EvalConfig,
    GuardsConfig,
    LRSchedulerConfig,
)
from thunder_memsave.finetune.training.evaluate import evaluate
from thunder_memsave.finetune.training.loop import LoopPlan, fit
from thunder_memsave.finetune.training.loop_state import LoopState

NUM_TOKENS = 11
OBJECTIVE = SupervisedFineTuning(mask="none", length=9)


class TinyModel(nn.Module):
    """Predicts the next token from the last one, in the form that transformers' models have."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_TOKENS, NUM_TOKENS)

    def forward(self, *, input_ids: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.table(input_ids))


class Witness:
    """Records which hooks were called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.metrics: list[dict[str, float]] = []
        self.evaluations: list[dict[str, float]] = []
        self.reason: str | None = None
        self.signal: signal.Signals | None = None
        self.end = 0

    def on_train_start(self, *, step: int, num_steps: int) -> None:
        self.calls.append(f"start {step}/{num_steps}")

    def on_train_batch_start(self) -> None:
        self.calls.append("step")

    def on_validation_end(self, *, step: int, metrics: dict[str, float]) -> None:
        self.calls.append(f"validated {step}")
        self.evaluations.append(metrics)

    def on_train_batch_end(self, *, step: int, metrics: dict[str, float]) -> None:
        self.calls.append(f"done {step}")
        self.metrics.append(metrics)

    def on_train_end(self, *, step: int) -> None:
        self.calls.append(f"end {step}")


def rows_of(*lengths: int) -> Rows:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for length in lengths:
        ids = torch.randint(NUM_TOKENS, (length,), generator=generator).tolist()
        samples.append(sample_of(ids))
    return pad(samples, length=max(lengths), pad_id=0)


def plan(**changes: Any) -> LoopPlan:
    settings: dict[str, Any] = {
        "num_steps": 3,
        "sharding": Sharding(global_batch_size=4, micro_batch_size=2),
        "seed": 0,
        "objective": OBJECTIVE,
        "max_grad_norm": None,
        "lr_scheduler": LRSchedulerConfig(warmup_steps=0, min_lr_ratio=1.0),
        "eval": EvalConfig(every_n_steps=2, max_batches=None),
    }
    return LoopPlan(**{**settings, **changes})


def train(
    rows: Rows,
    validation: Rows | None,
    plan: LoopPlan,
    *,
    start: int = 0,
    witness: Witness | None = None,
    loop_state: LoopState | None = None,
    fused: bool | None = None,
) -> Witness:
    witness = Witness() if witness is None else witness
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=[witness])
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=fused)
    module, optimizer = fabric.setup(model, optimizer)
    state = {"model": module, "optimizer": optimizer, "step": start}
    ending = fit(
        fabric,
        module,
        optimizer,
        train_rows=rows,
        validation_rows=validation,
        plan=plan,
        state=state,
        loop_state=loop_state,
    )
    witness.reason, witness.signal = ending.reason, ending.signal
    witness.end = int(state["step"])
    return witness


def test_hooks_come_in_order_and_an_evaluation_before_the_end_of_its_step() -> None:
    rows = rows_of(3, 4, 5, 6)
    assert train(rows, rows, plan()).calls == [
        "start 0/3",
        "validated 0",
        *("step", "done 1"),
        *("step", "validated 2", "done 2"),
        *("step", "validated 3", "done 3"),
        "end 3",
    ]


def test_a_resumed_loop_does_not_evaluate_its_start_again() -> None:
    rows = rows_of(3, 4, 5, 6)
    calls = train(rows, rows, plan(), start=2).calls
    assert calls == ["start 2/3", "step", "validated 3", "done 3", "end 3"]


def test_without_a_validation_set_nothing_is_evaluated() -> None:
    assert "validated 0" not in train(rows_of(3, 4), None, plan()).calls


def test_an_evaluation_has_the_perplexity_of_its_loss() -> None:
    rows = rows_of(3, 4, 5, 6)
    for metrics in train(rows, rows, plan()).evaluations:
        assert metrics["val_perplexity"] == math.exp(metrics["val_loss"])


class Stopper(Witness):
    """Asks for the end in one hook of one step."""

    def __init__(self, hook: str, step: int) -> None:
        super().__init__()
        self.hook, self.step = hook, step

    def _ask(self, hook: str, step: int, control: TrainingControl) -> None:
        if (hook, step) == (self.hook, self.step):
            control.stop("enough")

    @override
    def on_train_start(self, *, step: int, num_steps: int, control: TrainingControl) -> None:  # type: ignore[override]
        super().on_train_start(step=step, num_steps=num_steps)
        self._ask("start", step, control)

    @override
    def on_validation_end(  # type: ignore[override]
        self, *, step: int, metrics: dict[str, float], control: TrainingControl
    ) -> None:
        super().on_validation_end(step=step, metrics=metrics)
        self._ask("validation", step, control)

    @override
    def on_train_batch_end(  # type: ignore[override]
        self, *, step: int, metrics: dict[str, float], control: TrainingControl
    ) -> None:
        super().on_train_batch_end(step=step, metrics=metrics)
        self._ask("step", step, control)


class AfterOptimizer(Witness):
    """Records what Fabric calls without `Fabric.call`."""

    passed: frozenset[str] = frozenset()

    def on_after_optimizer_step(self, **arguments: Any) -> None:
        self.passed = frozenset(arguments)


def test_a_run_passes_to_each_hook_what_the_protocol_names(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: dict[str, set[str]] = {}
    call = Fabric.call

    def noted(fabric: Fabric, hook_name: str, /, **arguments: Any) -> None:
        passed[hook_name] = set(arguments)
        call(fabric, hook_name, **arguments)

    monkeypatch.setattr(Fabric, "call", noted)
    rows = rows_of(3, 4, 5, 6)
    witness = train(rows, rows, plan(), witness=AfterOptimizer())
    passed["on_after_optimizer_step"] = set(witness.passed)  # type: ignore[attr-defined]
    elsewhere = {"on_save_checkpoint", "on_rollback_start", "on_exception"}
    assert passed == {name: set(HOOKS[name]) for name in HOOKS.keys() - elsewhere}


def test_a_callback_that_asks_for_the_end_gets_it_with_an_evaluation() -> None:
    rows = rows_of(3, 4, 5, 6)
    witness = train(rows, rows, plan(num_steps=9), witness=Stopper("step", 3))
    assert witness.calls[-3:] == ["done 3", "validated 3", "end 3"]
    assert (witness.reason, witness.end) == ("enough", 3)


def test_an_evaluation_that_ends_the_training_is_not_repeated() -> None:
    rows = rows_of(3, 4, 5, 6)
    witness = train(rows, rows, plan(num_steps=9), witness=Stopper("validation", 2))
    assert witness.calls[-3:] == ["validated 2", "done 2", "end 2"]
    assert witness.reason == "enough"


def test_a_callback_may_ask_for_the_end_before_the_first_step() -> None:
    rows = rows_of(3, 4, 5, 6)
    witness = train(rows, rows, plan(), start=1, witness=Stopper("start", 1))
    assert witness.calls == ["start 1/3", "end 1"]


def test_a_training_that_comes_to_its_end_has_no_reason() -> None:
    rows = rows_of(3, 4, 5, 6)
    assert train(rows, None, plan(), witness=Stopper("step", 3)).reason is None


def test_what_one_rank_asks_for_ends_all() -> None:
    run_on_fabric_ranks(check_that_all_ranks_end, 2)


@on_fabric_rank
def check_that_all_ranks_end() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    witness = Stopper("step", 2) if rank == 1 else Witness()
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", callbacks=[witness])
    fabric.launch()
    assert fabric.global_rank == rank
    torch.manual_seed(0)
    model = fabric.setup(TinyModel())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.5))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    sharding = Sharding(global_batch_size=4, micro_batch_size=2, rank=rank, world_size=2)
    ending = fit(
        fabric,
        model,
        optimizer,  # type: ignore[arg-type]
        train_rows=rows_of(3, 4, 5, 6),
        validation_rows=None,
        plan=plan(num_steps=9, sharding=sharding),
        state=state,
    )
    assert (ending.reason, state["step"]) == ("enough", 2)


def test_the_loss_is_the_mean_over_the_tokens_of_the_global_batch() -> None:
    """It is not a mean of the micro-batches' means: their numbers of tokens differ."""
    rows = rows_of(2, 9, 3, 7, 5)
    steps = plan(num_steps=4)
    witness = train(rows, None, steps)
    torch.manual_seed(0)
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(4):
        chosen = [
            row
            for batch in step_rows(len(rows), steps.sharding, seed=0, step=step)
            for row in batch
            if row >= 0
        ]
        batch = rows.lay_out(chosen)
        targets = batch.targets.flatten()
        logits = model.table(batch.input_ids).flatten(0, 1)
        loss = cross_entropy(logits, targets, ignore_index=IGNORED)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        measured = witness.metrics[step]
        # float32 sums in another order
        assert measured["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
        assert measured["num_tokens"] == int((targets != IGNORED).sum())
        assert measured["num_input_tokens"] == 4 * rows.length


def test_the_gradient_norm_is_a_metric_with_and_without_clipping() -> None:
    rows = rows_of(3, 4, 5, 6)
    clipped, free = train(rows, None, plan(max_grad_norm=1e-3)), train(rows, None, plan())
    assert free.metrics[0]["grad_norm"] == clipped.metrics[0]["grad_norm"] > 1e-3
    assert free.metrics[1]["loss"] < clipped.metrics[1]["loss"]


class Poison(torch.autograd.Function):
    """The identity, with non-finite gradients."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * float("inf")


def poison(logits: Tensor) -> Tensor:
    return Poison.apply(logits)  # type: ignore[no-untyped-call]


class PoisonedModel(TinyModel):
    """Fails in its third step, either in the loss or in the gradients only."""

    def __init__(self, *, in_loss: bool) -> None:
        super().__init__()
        self.in_loss = in_loss
        self.num_calls = 0
        self.before = torch.empty(0)

    def forward(self, *, input_ids: Tensor, use_cache: bool) -> Any:
        self.num_calls += 1
        logits = self.table(input_ids)
        if self.num_calls == 5:  # two forward passes per step
            self.before = self.table.weight.detach().clone()
            logits = logits * float("nan") if self.in_loss else poison(logits)
        return SimpleNamespace(logits=logits)


class PoisonedRun:
    """Four rows, whose third step has a non-finite loss or gradient."""

    def __init__(
        self, *, in_loss: bool, callbacks: Sequence[object] = (), fused: bool | None = None
    ) -> None:
        self.model = PoisonedModel(in_loss=in_loss)
        self.fabric = Fabric(accelerator="cpu", devices=1, callbacks=list(callbacks))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, fused=fused)
        module, self.optimizer = self.fabric.setup(self.model, optimizer)
        self.state: dict[str, Any] = {"model": module, "optimizer": self.optimizer, "step": 0}

    def fit(self, **changes: Any) -> None:
        fit(
            self.fabric,
            self.state["model"],
            self.optimizer,
            train_rows=rows_of(3, 4, 5, 6),
            validation_rows=None,
            plan=plan(**changes),
            state=self.state,
        )


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("in_loss", [True, False])
def test_a_step_whose_loss_or_gradients_are_not_finite_changes_no_weight(
    in_loss: bool, max_grad_norm: float | None
) -> None:
    witness = Witness()
    run = PoisonedRun(in_loss=in_loss, callbacks=[witness])
    with pytest.raises(NotFiniteError, match=r"step 3 was not taken.*it was 0\.5 in this step"):
        run.fit(num_steps=4, max_grad_norm=max_grad_norm)
    assert torch.equal(run.model.table.weight, run.model.before)
    assert run.state["step"] == 2
    assert witness.calls[-2:] == ["done 2", "step"]


@pytest.mark.parametrize("in_loss", [True, False])
@pytest.mark.parametrize("every", [1, 2, 4])
def test_a_bad_step_that_is_found_later_changed_no_weight_and_nor_did_those_after_it(
    in_loss: bool, every: int
) -> None:
    """The fused kernel leaves the step out on the device, before any host knows."""
    witness = Witness()
    run = PoisonedRun(in_loss=in_loss, callbacks=[witness], fused=True)
    with pytest.raises(NotFiniteError, match=r"step 3 was not taken.*it was 0\.5 in this step"):
        run.fit(num_steps=9, log_every_n_steps=every)
    assert torch.equal(run.model.table.weight, run.model.before)
    assert run.state["step"] == 2
    assert [bool(metrics) for metrics in witness.metrics[:3]] == [True, True, False][: every + 1]
    assert all(isinstance(m["loss"], float) for m in witness.metrics[:2])


@pytest.mark.parametrize("every", [2, 3, 9])
def test_reading_later_changes_no_number(every: int) -> None:
    rows = rows_of(3, 4, 5, 6)
    at_once = train(rows, rows, plan(num_steps=7), fused=True)
    later = train(rows, rows, plan(num_steps=7, log_every_n_steps=every), fused=True)
    assert later.metrics == at_once.metrics
    assert later.evaluations == at_once.evaluations
    assert later.calls == at_once.calls


class SeesTensors(Witness):
    """Notes in which steps the loss is still on the device when the step ends."""

    saves: frozenset[int] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.unread: list[int] = []

    def saves_after(self, step: int) -> bool:
        return step in self.saves

    @override
    def on_train_batch_end(  # type: ignore[override]
        self, *, step: int, metrics: dict[str, float], state: dict[str, Any]
    ) -> None:
        super().on_train_batch_end(step=step, metrics=metrics)
        if isinstance(metrics["loss"], Tensor):
            self.unread.append(step)


def test_all_is_read_at_log_lines_and_before_anything_is_evaluated_or_saved() -> None:
    rows, witness = rows_of(3, 4, 5, 6), SeesTensors()
    witness.saves = frozenset({6})
    steps = plan(num_steps=9, log_every_n_steps=4, eval=EvalConfig(every_n_steps=3))
    train(rows, rows, steps, witness=witness, fused=True)
    assert witness.unread == [1, 2, 5, 7]
    assert all(isinstance(m["loss"], float) for m in witness.metrics)


def test_a_callback_that_may_save_after_any_step_sees_numbers() -> None:
    rows, witness = rows_of(3, 4, 5, 6), SeesTensors()
    witness.saves_after = None  # type: ignore[assignment,method-assign]
    train(rows, None, plan(num_steps=4, log_every_n_steps=4), witness=witness, fused=True)
    assert witness.unread == []


def test_a_guard_that_decides_about_each_step_reads_each_step() -> None:
    rows = rows_of(3, 4, 5, 6)
    for guards in (GuardsConfig(nonfinite="skip"), GuardsConfig(loss_spike="stop")):
        witness = SeesTensors()
        steps = plan(num_steps=4, log_every_n_steps=4, guards=guards)
        train(rows, None, steps, witness=witness, fused=True)
        assert witness.unread == []


@pytest.mark.parametrize("in_loss", [True, False])
def test_a_step_that_is_not_finite_can_be_left_out(
    in_loss: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = PoisonedRun(in_loss=in_loss)
    run.fit(num_steps=3, guards=GuardsConfig(nonfinite="skip"))
    assert torch.equal(run.model.table.weight, run.model.before)
    assert run.state["step"] == 3
    assert "step 3 was not taken: its loss is " in caplog.text


class Linears(nn.Module):
    """Predicts the next token from the last one, with a linear in fp8."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_TOKENS, 16)
        self.linear = nn.Linear(16, 16)
        self.lm_head = nn.Linear(16, NUM_TOKENS)

    def forward(self, *, input_ids: Tensor, use_cache: bool) -> CausalLMOutput:
        return CausalLMOutput(logits=self.lm_head(self.linear(self.table(input_ids))))


class Poisoner:
    """Makes the gradients of every step infinite."""

    def on_before_optimizer_step(self, *, model: Any) -> None:
        model.table.weight.grad.fill_(math.inf)


def test_a_step_that_is_left_out_ends_the_step_of_fp8_scales_too() -> None:
    fabric = make_fabric(sharding="none", fp8={"amax_history_len": 4})
    torch.manual_seed(0)
    model = Linears()
    module, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
    fabric._callbacks.append(Poisoner())
    before = model.table.weight.detach().clone()
    fit(
        fabric,
        module,
        optimizer,
        train_rows=rows_of(3, 4, 5, 6),
        validation_rows=None,
        plan=plan(num_steps=1, guards=GuardsConfig(nonfinite="skip")),
        state={"model": module, "optimizer": optimizer, "step": 0},
    )
    assert torch.equal(model.table.weight, before)
    this_step, *_, last_step = module.linear.fp8_scaling.forward_amax_history[:, 0].tolist()
    assert this_step == 0.0
    assert last_step > 0.0


class Signalled(Witness):
    """Gets a signal in one hook of one step."""

    def __init__(self, hook: str, step: int, number: signal.Signals) -> None:
        super().__init__()
        self.at = (hook, step)
        self.number = number

    def _signal(self, hook: str, step: int) -> None:
        if (hook, step) == self.at:
            signal.raise_signal(self.number)

    def on_validation_start(self, *, step: int) -> None:
        self._signal("validation", step)

    def on_before_optimizer_step(self, *, step: int) -> None:
        if self.at == ("first", step):
            with suppress(KeyboardInterrupt):  # as libraries do
                signal.raise_signal(self.number)

    @override
    def on_train_batch_end(self, *, step: int, metrics: dict[str, float]) -> None:
        super().on_train_batch_end(step=step, metrics=metrics)
        self._signal("step", step)

    @override
    def on_train_end(self, *, step: int) -> None:
        super().on_train_end(step=step)
        self._signal("end", step)


@contextmanager
def watched() -> Iterator[None]:
    """Handle Ctrl-C as in a process of its own: pytest-xdist's workers ignore it."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    signals.watch_signals()
    try:
        yield
    finally:
        signals.stop_watching()
        signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_run_with_its_step_and_without_an_evaluation(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    rows, witness = rows_of(3, 4, 5, 6), Signalled("step", 3, number)
    with watched():
        train(rows, rows, plan(num_steps=9), witness=witness)
    assert witness.calls[-2:] == ["done 3", "end 3"]
    assert (witness.end, witness.signal, witness.reason) == (3, number, None)


def test_a_signal_whose_exception_a_library_swallowed_in_the_first_step_ends_the_run_after_it() -> (
    None
):
    rows, witness = rows_of(3, 4, 5, 6), Signalled("first", 0, signal.SIGTERM)
    with watched():
        train(rows, None, plan(num_steps=9), witness=witness)
    assert witness.calls[-2:] == ["done 1", "end 1"]
    assert witness.signal == signal.SIGTERM


def test_a_signal_in_the_evaluation_of_the_first_step_saves_that_step() -> None:
    rows, witness = rows_of(*[3] * 24), Signalled("validation", 1, signal.SIGTERM)
    every = plan(num_steps=9, eval=EvalConfig(every_n_steps=1, max_batches=None))
    with watched():
        train(rows, rows, every, witness=witness)
    assert witness.calls[-3:] == ["step", "done 1", "end 1"]
    assert (witness.end, witness.signal) == (1, signal.SIGTERM)


def test_a_signal_before_the_first_step_ends_the_run_at_once() -> None:
    rows, witness = rows_of(3, 4, 5, 6), Signalled("validation", 0, signal.SIGTERM)
    with watched(), pytest.raises(KeyboardInterrupt):
        train(rows, rows, plan(), witness=witness)
    assert witness.calls == ["start 0/3"]


def test_a_signal_cuts_an_evaluation_short_which_the_resumed_run_takes() -> None:
    rows, few = rows_of(*[3] * 24), rows_of(*[3] * 4)
    for step, end in ((2, ["done 2", "end 2"]), (4, ["done 4", "end 4"])):
        witness, memory = Signalled("validation", step, signal.SIGTERM), LoopState()
        with watched():
            train(few, rows, plan(num_steps=4), witness=witness, loop_state=memory)
        assert witness.calls[-2:] == end
        assert witness.signal == signal.SIGTERM
        resumed = train(few, rows, plan(num_steps=4), start=step, loop_state=memory)
        assert resumed.calls[:2] == [f"start {step}/4", f"validated {step}"]
        assert not memory.validation_is_due


def test_a_signal_while_the_end_is_saved_is_the_runs_ending() -> None:
    witness = Signalled("end", 3, signal.SIGUSR1)
    with watched():
        train(rows_of(3, 4), None, plan(), witness=witness)
    assert witness.signal == signal.SIGUSR1


def test_a_validation_loss_that_is_not_finite_ends_the_run() -> None:
    rows = rows_of(3, 4, 5, 6)
    fabric = Fabric(accelerator="cpu", devices=1)
    model = TinyModel()
    torch.nn.init.constant_(model.table.weight, float("nan"))
    module, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
    state = {"model": module, "optimizer": optimizer, "step": 0}
    with pytest.raises(NotFiniteError, match="the validation loss after step 0 is nan"):
        fit(
            fabric,
            module,
            optimizer,
            train_rows=rows,
            validation_rows=rows,
            plan=plan(),
            state=state,
        )


def test_evaluation_is_the_mean_over_all_tokens_and_leaves_the_mode_as_it_was() -> None:
    rows = rows_of(2, 9, 3, 7, 5)
    fabric = Fabric(accelerator="cpu", devices=1)
    model = TinyModel().train()
    put_loss_in(model, OBJECTIVE)
    modes: list[bool] = []
    model.register_forward_hook(lambda *_: modes.append(model.training))
    sharding = Sharding(global_batch_size=4, micro_batch_size=2)
    measured = evaluate(fabric, model, rows, objective=OBJECTIVE, sharding=sharding)
    assert measured is not None
    batch = rows.lay_out(range(len(rows)))
    logits = model.table(batch.input_ids).flatten(0, 1)
    expected = cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORED).detach()
    assert measured["val_loss"] == pytest.approx(float(expected), rel=1e-6)
    assert modes == [False, False, False]  # without dropout
    assert model.training
    two_rows = evaluate(fabric, model, rows, objective=OBJECTIVE, sharding=sharding, max_batches=1)
    assert two_rows != measured
