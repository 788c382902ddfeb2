"""Steps with a bad loss or bad gradients are handled alike on all ranks, before any weight is updated."""

from __future__ import annotations

import math
import signal
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.language_model import sample_of
from thunder_memsave.callbacks import CallbackStates, ModelCheckpoint, TrainingControl
from thunder_memsave.callbacks.checkpoint import list_checkpoints, read_info
from thunder_memsave.callbacks.verified import load_checkpoint
from thunder_memsave.finetune.data.batches import Sharding
from thunder_memsave.finetune.data.packing import Rows, pad
from thunder_memsave.finetune.objectives.supervised import SupervisedFineTuning
from thunder_memsave.finetune.process import signals
from thunder_memsave.finetune.process.stop import BadStepError, LossSpikeError, NotFiniteError
from thunder_memsave.finetune.run_file.config import (
    EvalConfig,
    GuardsConfig,
    LRSchedulerConfig,
)
from thunder_memsave.finetune.training.guards import (
    BadStep,
    count_rollbacks,
    judge,
    spike_limit,
)
from thunder_memsave.finetune.training.loop import Ending, LoopPlan, fit
from thunder_memsave.finetune.training.loop_state import LoopState
from thunder_memsave.sharding.sharded_parameter import as_rows

NUM_TOKENS, NUM_ROWS, BATCH = 11, 40, 4


def seen(losses: list[float], **values: Any) -> LoopState:
    state = LoopState()
    state.load_state_dict({"losses": losses, **values})
    return state


def test_a_spike_is_measured_in_median_distances_from_the_median() -> None:
    guards = GuardsConfig(loss_spike="skip", spike_window=5, spike_threshold=3.0)
    assert spike_limit(guards, seen([1.0, 1.2, 0.8, 1.1])) is None
    # Distances from 1.0: 0, 0.2, 0.2, 0.1, 9; one earlier spike moves neither median.
    assert spike_limit(guards, seen([1.0, 1.2, 0.8, 1.1, 10.0])) == pytest.approx(1.1 + 3 * 0.1)
    assert spike_limit(guards, seen([2.0] * 5)) == pytest.approx(2.0 + 3 * 0.02)
    assert spike_limit(GuardsConfig(spike_window=5), seen([1.0] * 5)) is None


def verdict(guards: GuardsConfig, state: LoopState, loss: float) -> BadStep | None:
    return judge(guards, state, loss=loss, norm=1.0, is_finite=math.isfinite(loss))


def test_each_kind_of_bad_step_has_an_action_of_its_own() -> None:
    guards = GuardsConfig(nonfinite="rollback", loss_spike="skip", spike_window=2)
    state = seen([1.0, 1.0])
    assert verdict(guards, state, 1.05) is None
    spike, nan = verdict(guards, state, 5.0), verdict(guards, state, math.nan)
    assert spike is not None
    assert nan is not None
    assert (spike.action, nan.action) == ("skip", "rollback")
    with pytest.raises(NotFiniteError, match="its loss is nan and the norm of its gradients 1"):
        verdict(GuardsConfig(), state, math.nan)
    message = "its loss is 5, above 1.1, the median of the last 2 losses and 10 times"
    with pytest.raises(LossSpikeError, match=message):
        verdict(GuardsConfig(loss_spike="stop", spike_window=2), state, 5.0)


def test_more_skips_in_a_row_than_allowed_end_the_run() -> None:
    guards = GuardsConfig(nonfinite="skip", max_skips=2)
    assert verdict(guards, seen([], num_skips=1), math.inf) is not None
    with pytest.raises(NotFiniteError, match=r"as were those of the 2 steps before \(guards.max"):
        verdict(guards, seen([], num_skips=2), math.inf)


def test_skips_without_end_are_of_steps_that_are_not_finite_alone() -> None:
    guards = GuardsConfig(nonfinite="skip", loss_spike="skip", spike_window=1, max_skips=2)
    state = seen([1.0], num_skips=2)
    judged = partial(judge, guards, state, norm=1.0, max_nonfinite_skips=99)
    assert judged(loss=math.nan, is_finite=False) is not None
    with pytest.raises(LossSpikeError, match="as were those of the 2 steps before"):
        judged(loss=9.0, is_finite=True)


def test_more_rollbacks_to_one_checkpoint_than_allowed_end_the_run() -> None:
    guards, bad = GuardsConfig(max_skips=2), BadStep(action="rollback", reason="its loss is nan")
    state = seen([], rolled_back_to=4, num_rollbacks=1)
    assert count_rollbacks(guards, state, bad, to_step=4) == 2
    assert count_rollbacks(guards, state, bad, to_step=8) == 1
    state.num_rollbacks = 2
    message = (
        r"its loss is nan, and the run went back to step 4 2 times already \(guards.max_skips\)"
    )
    with pytest.raises(BadStepError, match=message):
        count_rollbacks(guards, state, bad, to_step=4)


def test_steps_train_on_the_data_behind_what_is_skipped() -> None:
    state = seen([], skipped=[[2, 4]])
    assert [state.data_position(step) for step in range(6)] == [0, 1, 5, 6, 7, 8]
    state.note_rollback(step=3, bad_position=9, num_rollbacks=1)
    assert [state.data_position(step) for step in range(6)] == [0, 1, 5, 10, 11, 12]


class TinyModel(nn.Module):
    """Predicts the next token from the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_TOKENS, 16)
        self.lm_head = nn.Linear(16, NUM_TOKENS)

    def forward(self, *, input_ids: Tensor, use_cache: bool) -> CausalLMOutput:
        return CausalLMOutput(logits=self.lm_head(self.table(input_ids)))


def make_rows() -> Rows:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(NUM_TOKENS, (4,), generator=generator).tolist() for _ in range(NUM_ROWS)]
    return pad([sample_of(each) for each in ids], length=4, pad_id=0)


class Poisoner:
    """Puts a number into one gradient of one rank in each step on the data at a given position."""

    def __init__(self, number: float, *, positions: tuple[int, ...], rank: int = 0) -> None:
        self.number, self.positions, self.rank = number, positions, rank
        self.loop_state = LoopState()
        self.seen: list[int] = []
        self.before: list[Tensor] = []

    def on_before_optimizer_step(self, *, fabric: Fabric, step: int, model: Any) -> None:
        position = self.loop_state.data_position(step)
        self.seen.append(position)
        if position in self.positions:
            self.before = [p.data.clone() for p in model.parameters()]
            if fabric.global_rank == self.rank:
                grad = next(p for p in model.parameters() if p.grad is not None).grad
                as_rows(grad).view(-1)[0] = self.number


class Run:
    """A few steps of a tiny model, with a checkpoint every two."""

    def __init__(
        self,
        directory: Path,
        poisoner: Poisoner,
        *,
        num_steps: int,
        sharding: Literal["none", "zero3"] = "none",
        devices: int = 1,
        **guards: Any,
    ) -> None:
        self.fabric = make_fabric(sharding=sharding, devices=devices, timeout="60s")
        self.saves = ModelCheckpoint(directory, every_n_steps=2, keep_last=9)
        self.fabric._callbacks += [poisoner, self.saves]
        torch.manual_seed(0)
        model = TinyModel()
        self.model, self.optimizer = self.fabric.setup(
            model, torch.optim.AdamW(model.parameters(), lr=0.1)
        )
        self.loop_state = poisoner.loop_state
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "callbacks": CallbackStates([self.loop_state]),
            "step": 0,
        }
        self.plan = LoopPlan(
            num_steps=num_steps,
            sharding=Sharding(
                global_batch_size=BATCH,
                micro_batch_size=2,
                rank=self.fabric.global_rank,
                world_size=devices,
            ),
            seed=0,
            objective=SupervisedFineTuning(mask="none", length=4),
            max_grad_norm=None,
            lr_scheduler=LRSchedulerConfig(name="constant", warmup_steps=0),
            eval=EvalConfig(every_n_steps=None),
            guards=GuardsConfig(**guards),
        )

    def roll_back(self) -> None:
        self.fabric.call("on_rollback_start", fabric=self.fabric)
        self.load()

    def load(self) -> None:
        last = list_checkpoints(self.saves.directory)[-1]
        load_checkpoint(self.fabric, read_info(last), self.state)

    def fit(self, *, has_checkpoints: bool = True) -> Ending:
        return fit(
            self.fabric,
            self.model,
            self.optimizer,
            train_rows=make_rows(),
            validation_rows=None,
            plan=self.plan,
            state=self.state,
            loop_state=self.loop_state,
            roll_back=self.roll_back if has_checkpoints else None,
        )

    def weights(self) -> list[Tensor]:
        return [p.data.clone() for p in self.model.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_rollback_goes_on_from_the_checkpoint_without_the_data_since(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    poisoner = Poisoner(math.nan, positions=(3,))
    run = Run(tmp_path / "bad", poisoner, num_steps=5, nonfinite="rollback")
    run.fit()
    assert poisoner.seen == [0, 1, 2, 3, 4, 5, 6]
    assert run.loop_state.skipped == [[2, 3]]
    text = "went back from step 4 to step 2, and the data of 2 steps (3 to 4) are skipped"
    assert text in caplog.text
    # As a run that never saw that data; a resumed run skips it too.
    clean = Run(tmp_path / "clean", Poisoner(0.0, positions=()), num_steps=5)
    clean.loop_state.skipped = [[2, 3]]
    clean.fit()
    assert same(run.weights(), clean.weights())
    resumed = LoopState()
    run.state["callbacks"] = CallbackStates([resumed])
    run.load()
    assert resumed.skipped == [[2, 3]]


class EndsAfterRollback:
    """Asks for the end, or gets a signal, when the run is back at a step."""

    def __init__(self, number: signal.Signals | None) -> None:
        self.number, self.is_back = number, False

    def on_rollback_start(self) -> None:
        self.is_back = True

    def on_train_start(self, *, control: TrainingControl) -> None:
        if self.is_back and self.number is None:
            control.stop("enough")
        elif self.is_back and self.number is not None:
            signal.raise_signal(self.number)


@pytest.mark.parametrize("number", [None, signal.SIGTERM])
def test_a_run_that_ends_back_where_it_began_saves_which_data_it_skips(
    number: signal.Signals | None, tmp_path: Path
) -> None:
    Run(tmp_path, Poisoner(0.0, positions=()), num_steps=2).fit()
    poisoner = Poisoner(math.nan, positions=(2,))
    run = Run(tmp_path, poisoner, num_steps=9, nonfinite="rollback")
    run.fabric._callbacks.append(EndsAfterRollback(number))
    run.load()
    signals.watch_signals()
    try:
        ending = run.fit()
    finally:
        signals.stop_watching()
    assert (ending.signal, run.state["step"], poisoner.seen) == (number, 2, [2])
    run.state["callbacks"] = CallbackStates([resumed := LoopState()])
    run.load()
    assert resumed.skipped == [[2, 2]]


def test_rollbacks_that_do_not_help_end_the_run(tmp_path: Path) -> None:
    poisoner = Poisoner(math.inf, positions=tuple(range(2, 99)))
    run = Run(tmp_path, poisoner, num_steps=9, nonfinite="rollback", max_skips=2)
    with pytest.raises(
        BadStepError, match=r"step 3 was not taken.* back to step 2 2 times already"
    ):
        run.fit()
    assert poisoner.seen == [0, 1, 2, 3, 4]


def test_without_a_checkpoint_a_rollback_ends_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, Poisoner(math.nan, positions=(1,)), num_steps=3, nonfinite="rollback")
    with pytest.raises(BadStepError, match=r"step 2 .* and there is no checkpoint to go back to"):
        run.fit(has_checkpoints=False)


def test_a_loss_spike_is_left_out(tmp_path: Path) -> None:
    """The reported loss is from before the update, so a limit below all losses makes every step a spike."""
    poisoner = Poisoner(0.0, positions=(2, 3))
    guards: dict[str, Any] = {"loss_spike": "skip", "spike_window": 1, "spike_threshold": 1e-6}
    run = Run(tmp_path, poisoner, num_steps=4, **guards)
    run.loop_state.load_state_dict({"losses": [0.1]})
    run.fit()
    assert run.loop_state.num_skips == 4
    assert same(poisoner.before, run.weights())


@on_fabric_rank
def check_two_ranks(directory: Path) -> None:
    """The number is on rank 1 only, after the gradients were reduced."""
    for sharding in ("none", "zero3"):
        for number in (math.nan, math.inf):
            poisoner = Poisoner(number, positions=(1,), rank=1)
            name = f"{sharding}-{number}"
            run = Run(
                directory / name,
                poisoner,
                num_steps=2,
                sharding=sharding,
                devices=2,
                nonfinite="skip",
            )
            run.fit()
            assert run.state["step"] == 2
            assert run.loop_state.num_skips == 1
            assert same(poisoner.before, run.weights())
            assert not any(w.isnan().any() for w in run.weights())


@pytest.mark.line("nan")
def test_what_is_not_finite_on_one_rank_is_applied_on_none(tmp_path: Path) -> None:
    run_on_fabric_ranks(check_two_ranks, 2, tmp_path)
