"""Plans a model with few of its equal layers, and tells from that about the whole: an estimate, in a tenth of the time.

What a rank holds is a constant, such as the embedding and what one operation works with, and a part that grows with
the number of layers: their weights, states, gradients and kept activations. A plan of few layers gets what a budget
leaves beside the constant in proportion to their number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from typing_extensions import override

from thunder_memsave.budget.plan_request import Question
from thunder_memsave.budget.planned_call import Attempt, PlannedCall
from thunder_memsave.budget.way_search import Run
from thunder_memsave.finetune.plan.run_planner import RunPlanner
from thunder_memsave.frontend.few_layers.equal_modules import differences
from thunder_memsave.frontend.few_layers.plain_loops import LayerList, longest_list
from thunder_memsave.passes.overlap.room import NO_ROOM
from thunder_memsave.planner.cost import roofline_us
from thunder_memsave.planner.graph import Device, Plan, Program
from thunder_memsave.planner.order import generator_state_bytes, order
from thunder_memsave.planner.simulate import Profile, simulate

NUM = 8
_FEWEST = 3 * NUM
"""Fewest layers of a model for which an estimate is made."""
_FEW_S = 1.0
"""CPU seconds for a plan."""
_OF_TENSORS = 0.97
"""Part of a budget of reserved bytes that tensors usually take."""
_NEAR = 0.02
"""Part of a peak by which a plan may exceed its budget, as later passes move the peak."""
_HELD = ("accumulated", "optimizer")
_OF_TRAINED = (*_HELD, "gradient", "update")
_OTHERS = ("buffer", "other", "batch")


def has_many_layers(model: nn.Module) -> bool:
    """Tell whether a model has so many equal layers that few of them tell about all."""
    return _layers(model) is not None


def _layers(model: nn.Module) -> LayerList | None:
    found = longest_list(model)
    if found is None or len(found.layers) < _FEWEST or differences(list(found.layers)) is None:
        return None
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class FewLayers:
    """A model with `NUM` of its equal layers."""

    path: str
    """Name of the list of layers."""
    num_all: int
    """Layers of the whole model."""
    of_weights: float = 1.0
    """Part of this model's weights that is in layers, in bytes."""
    of_trained: float = 1.0
    """The same of trained weights."""
    constant_bytes: int = 0
    """What does not grow with the number of layers, as far as it is known."""

    @classmethod
    def left_of(cls, model: nn.Module) -> FewLayers | None:
        """Take all layers but the first ones out of a model; None: it stays, it has too few or different ones."""
        found = _layers(model)
        if found is None:
            return None
        num_all = len(found.layers)
        found.layers._modules = {str(i): found.layers[i] for i in range(NUM)}
        return cls(path=found.path, num_all=num_all)

    def weighing(self, model: nn.Module) -> FewLayers:
        """Return the same, knowing where this model's weights are, in the formats that they have by now."""
        weights = list(model.named_parameters())
        trained = [(name, p) for name, p in weights if p.requires_grad]
        return replace(
            self,
            of_weights=_part_in(self.path, weights),
            of_trained=_part_in(self.path, trained),
        )

    @property
    def times_as_many(self) -> float:
        """How many times as many layers the whole model has."""
        return self.num_all / NUM

    def knowing(self, profile: Profile, num_forward: int) -> FewLayers:
        """Return the same, with the constant bytes that a profile of a plan without a budget shows.

        Args:
            profile: Of a plan of this model.
            num_forward: Its steps before backward.
        """
        kinds = profile.peak_bytes_by_kind
        weights = kinds.get("parameter", 0)
        trained = sum(kinds.get(kind, 0) for kind in _OF_TRAINED)
        growing = self.of_weights * weights + self.of_trained * trained
        if profile.peak_step < len(profile.step_peak_bytes):  # in the update no activation is left
            held = weights + sum(kinds.get(k, 0) for k in (*_HELD, *_OTHERS))
            growing += max(profile.live_bytes[num_forward] - held, 0)
        return replace(self, constant_bytes=max(profile.peak_bytes - round(growing), 0))

    def host_of(self, device: Device) -> Device:
        """Return the device with this model's part of the host's memory."""
        if device.host_memory_bytes is None:
            return device
        return replace(
            device, host_memory_bytes=round(device.host_memory_bytes / self.times_as_many)
        )

    def budget_bytes(self, of_all: int) -> int:
        """Return the budget of few layers for that of all."""
        left = max(of_all - self.constant_bytes, 0)
        return self.constant_bytes + round(left / self.times_as_many)

    def of_all(self, nbytes: int) -> int:
        """Return about the bytes of all layers for those of few."""
        return self.constant_bytes + round((nbytes - self.constant_bytes) * self.times_as_many)

    def computing_us(self, program: Program, device: Device) -> float:
        """Return the time of all layers' operations, those that are recomputed left out, at sustained rates.

        The layers at both ends can lack operations, such as the gradient of an input that needs none.
        """
        outside: dict[str, list[float]] = {}
        layers = [0.0] * NUM
        for step in program.steps:
            if step.op.repeat == "free" or step.is_repeated:
                continue
            us = roofline_us(step.op, device)
            match = self._in_layer.match(step.op.module)
            if match is None:
                outside.setdefault(step.op.symbol, []).append(us)
            else:
                layers[int(match[1])] += us
        first, *inner, last = layers
        usual = sum(inner) / len(inner)
        # What is more than usual is done for all layers at once, such as sums of gradients in buckets.
        ends = (min(us, usual) + self.times_as_many * max(us - usual, 0.0) for us in (first, last))
        others = (
            sum(each) * (self.times_as_many if len(each) >= NUM else 1.0)
            for each in outside.values()
        )
        return sum(others) + sum(ends) + (self.num_all - 2) * usual

    @property
    def _in_layer(self) -> re.Pattern[str]:
        return re.compile(rf"(?:.*\.)?{re.escape(self.path)}\.(\d+)(?:\.|$)")


def _part_in(path: str, weights: Sequence[tuple[str, nn.Parameter]]) -> float:
    of_each = [(name, p.numel() * p.element_size()) for name, p in weights]
    inside = sum(n for name, n in of_each if name.startswith(f"{path}."))
    return inside / max(sum(n for _, n in of_each), 1)


class FewLayersPlanner(RunPlanner):
    """Plans few layers within their part of a budget, and tries no plan again."""

    def __init__(self, few_layers: FewLayers, *about: Any) -> None:
        """Store the layers, and what a `RunPlanner` wants."""
        super().__init__(*about)
        self.few_layers = few_layers

    @override
    def _planned(self, attempt: Attempt) -> PlannedCall:
        """Give few layers their part of the budget, and plan."""
        free = replace(self._question(attempt, None), policy="keep_all").solved(None)
        generator_bytes = generator_state_bytes(self.device)
        program = order(attempt.graph, free.actions, generator_state_bytes=generator_bytes)
        self.few_layers = self.few_layers.knowing(
            simulate(program, attempt.memory), program.num_forward
        )
        if self._budget_bytes is not None:
            share = _OF_TENSORS if self._limit.is_reserved else 1.0
            self._limit_to(self.few_layers.budget_bytes(int(share * self._budget_bytes)))
        return super()._planned(attempt)

    @property
    @override
    def _smallest_s(self) -> float:
        return _FEW_S

    @override
    def _within(
        self,
        attempt: Attempt,
        plan: Plan | None,
        budget_bytes: int | None,
        *,
        target_bytes: int | None = None,
    ) -> Run:
        if budget_bytes is None:
            return Run(attempt.run(plan), None)
        room = NO_ROOM if self._is_near(attempt, plan, budget_bytes) else None
        call = attempt.run(plan, room, joins=self._policy == "plan")
        more_bytes = call.profile.peak_bytes - budget_bytes
        return Run(call, room, 0 if more_bytes < _NEAR * budget_bytes else more_bytes)

    @override
    def _question(self, attempt: Attempt, target_bytes: int | None) -> Question:
        question = super()._question(attempt, target_bytes)
        narrowed = question.narrowed and replace(question.narrowed, time_limit_s=_FEW_S)
        return replace(question, time_limit_s=_FEW_S, narrowed=narrowed)
