"""Objectives of other kinds train with the loop as it is, to the bits of a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from thunder_memsave.finetune.data.batches import Sharding, make_batch, step_rows
from thunder_memsave.finetune.objectives.loss_in_model import call_inputs
from thunder_memsave.finetune.objectives.objective import Objective
from thunder_memsave.finetune.plan.plan_run import _inputs
from thunder_memsave.finetune.run_file.batch_sizes import BatchSizes
from thunder_memsave.finetune.run_file.config import EvalConfig, LRSchedulerConfig
from thunder_memsave.finetune.training.caller_memory import caller_memory
from thunder_memsave.finetune.training.loop import LoopPlan, fit

NUM_STEPS, NUM_FEATURES, NUM_TOKENS, LENGTH = 30, 5, 13, 6
SHARDING = Sharding(global_batch_size=4, micro_batch_size=2)

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Table:
    """Rows of named columns; no row is all zeros."""

    columns: Tensors

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def lay_out(self, chosen: Sequence[int | None]) -> Tensors:
        return {
            name: torch.stack([torch.zeros_like(x[0]) if row is None else x[row] for row in chosen])
            for name, x in self.columns.items()
        }


class WeightedRegression(Objective[Tensors]):
    """Weighted squared errors: the model returns a tensor, and weights are not counts."""

    evaluation_metrics: ClassVar[tuple[str, ...]] = ("val_loss", "val_root")

    @override
    def model_inputs(self, batch: Tensors) -> dict[str, Any]:
        return {"x": batch["x"]}

    @override
    def loss_inputs(self, batch: Tensors) -> dict[str, Any]:
        return {"weight": batch["weight"], "y": batch["y"]}

    @override
    def loss(self, output: Any, **inputs: Any) -> Tensor:
        return (inputs["weight"] * (output - inputs["y"]) ** 2).sum()

    @override
    def weight(self, batch: Tensors) -> Tensor:
        return batch["weight"].sum()

    @override
    def blank(self, num_rows: int) -> Tensors:
        column = torch.zeros(num_rows)
        return {"x": torch.zeros(num_rows, NUM_FEATURES), "y": column, "weight": column.clone()}

    @override
    def evaluation(self, sums: Tensor, weight: Tensor) -> dict[str, float]:
        return {**super().evaluation(sums, weight), "val_root": float((sums[0] / weight).sqrt())}


class Preference(Objective[Tensors]):
    """Two sequences per row in one call, of which the first should score higher; reports how often it does."""

    evaluation_metrics: ClassVar[tuple[str, ...]] = ("val_loss", "val_accuracy")

    @override
    def model_inputs(self, batch: Tensors) -> dict[str, Any]:
        return {"x": torch.cat([batch["chosen"], batch["rejected"]])}

    @override
    def loss_inputs(self, batch: Tensors) -> dict[str, Any]:
        return {"counts": batch["counts"]}

    @override
    def loss(self, output: Any, **inputs: Any) -> Tensor:
        return -(logsigmoid(_margin(output)) * inputs["counts"]).sum()

    @override
    def weight(self, batch: Tensors) -> Tensor:
        return batch["counts"].sum()

    @override
    def blank(self, num_rows: int) -> Tensors:
        tokens = torch.zeros(num_rows, LENGTH, dtype=torch.int64)
        counts = torch.zeros(num_rows, dtype=torch.int64)
        return {"chosen": tokens, "rejected": tokens.clone(), "counts": counts}

    @override
    def step_metrics(
        self, batches: Sequence[Tensors], *, weight: float, num_ranks: int
    ) -> dict[str, float]:
        return {"num_pairs": weight}

    @override
    def evaluated(self, output: Any, **inputs: Any) -> Tensor:
        right = ((_margin(output) > 0) * inputs["counts"]).sum()
        return torch.cat([super().evaluated(output, **inputs), right.double()[None]])

    @override
    def evaluation(self, sums: Tensor, weight: Tensor) -> dict[str, float]:
        return {**super().evaluation(sums, weight), "val_accuracy": float(sums[1] / weight)}


def _margin(scores: Tensor) -> Tensor:
    chosen, rejected = scores.chunk(2)
    return chosen - rejected


class Predictor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, *, x: Tensor) -> Tensor:
        return self.layers(x)[:, 0]


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_TOKENS, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, *, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(x)).mean(1))[:, 0]


@dataclass(frozen=True)
class Case:
    objective: Objective[Tensors]
    model: type[nn.Module]
    rows: Table
    lr: float

    def made_model(self) -> nn.Module:
        torch.manual_seed(1)
        return self.model()


def regression() -> Case:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(10, NUM_FEATURES, generator=draw)
    columns = {"x": x, "y": x.sum(1), "weight": torch.rand(10, generator=draw) + 0.1}
    return Case(WeightedRegression(), Predictor, Table(columns), lr=0.1)


def preference() -> Case:
    draw = torch.Generator().manual_seed(0)
    pairs = torch.randint(NUM_TOKENS, (2, 10, LENGTH), generator=draw)
    columns = {"chosen": pairs[0], "rejected": pairs[1], "counts": torch.ones(10).long()}
    return Case(Preference(), Scorer, Table(columns), lr=2.0)


CASES = [pytest.param(regression(), id="regression"), pytest.param(preference(), id="preference")]


class Witness:
    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.evaluations: list[dict[str, float]] = []

    def on_train_batch_end(self, *, metrics: dict[str, float]) -> None:
        self.steps.append(metrics)

    def on_validation_end(self, *, metrics: dict[str, float]) -> None:
        self.evaluations.append(metrics)


def trained(case: Case) -> tuple[Witness, nn.Module]:
    witness, model = Witness(), case.made_model()
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=[witness])
    module, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=case.lr))
    plan = LoopPlan(
        num_steps=NUM_STEPS,
        sharding=SHARDING,
        seed=3,
        objective=case.objective,
        max_grad_norm=None,
        lr_scheduler=LRSchedulerConfig(name="constant", warmup_steps=0),
        eval=EvalConfig(every_n_steps=None, max_batches=None),
    )
    fit(
        fabric,
        module,
        optimizer,
        train_rows=case.rows,
        validation_rows=case.rows,
        plan=plan,
        state={"model": module, "optimizer": optimizer, "step": 0},
    )
    return witness, model


def plain_batches(case: Case, step: int) -> list[Tensors]:
    """The last global batch of an epoch is padded."""
    numbers = step_rows(len(case.rows), SHARDING, seed=3, step=step)
    return [make_batch(case.rows, chosen) for chosen in numbers]


@pytest.mark.parametrize("case", CASES)
def test_another_objective_trains_to_the_bits_of_a_plain_loop(case: Case) -> None:
    witness, model = trained(case)
    plain, objective = case.made_model(), case.objective
    optimizer = torch.optim.SGD(plain.parameters(), lr=case.lr)
    for step, measured in enumerate(witness.steps):
        batches = plain_batches(case, step)
        weight = torch.stack([objective.weight(batch) for batch in batches]).sum()
        total = torch.zeros(())
        for batch in batches:
            loss = objective.loss(
                plain(**objective.model_inputs(batch)), **objective.loss_inputs(batch)
            )
            (loss * (1 / weight)).backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        assert measured["loss"] == float(total / weight)
        assert measured.get("num_pairs", float(weight)) == float(weight)
    assert len(witness.steps) == NUM_STEPS
    first, last = witness.evaluations
    assert last["val_loss"] < first["val_loss"]
    for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, expected)


@pytest.mark.parametrize("case", CASES)
def test_an_evaluation_reports_what_the_objective_does(case: Case) -> None:
    witness, model = trained(case)
    last, objective = witness.evaluations[-1], case.objective
    assert last.keys() == set(objective.evaluation_metrics)
    batch = make_batch(case.rows, range(len(case.rows)))
    output = model(**objective.model_inputs(batch)).detach()
    expected = float(
        objective.loss(output, **objective.loss_inputs(batch)) / objective.weight(batch)
    )
    assert last["val_loss"] == pytest.approx(expected, rel=1e-6)  # sums in another order
    if "val_accuracy" in last:
        assert last["val_accuracy"] == float((_margin(output) > 0).double().mean())
        assert 0.5 < last["val_accuracy"] <= 1.0


@pytest.mark.parametrize("case", CASES)
def test_planning_knows_the_call_and_the_loss_of_another_objective(case: Case) -> None:
    objective = case.objective
    batch = make_batch(case.rows, [0, 1])
    given, planned = call_inputs(objective, batch), _inputs(objective, num_rows=2)
    assert tree_map(_kind, planned) == tree_map(_kind, given)
    sizes = BatchSizes(global_batch_size=6, micro_batch_size=2, gradient_accumulation_steps=3)
    held = caller_memory(objective, sizes, device_type="cpu")
    num_bytes = sum(x.nbytes for x in batch.values())
    mine = {x.data_ptr() for x in batch.values()}
    num_given = sum(x.nbytes for x in tree_leaves(given) if x.data_ptr() in mine)
    assert held.other_bytes == 3 * num_bytes - num_given


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
