"""What a rank would hold with weights and optimizer states in other formats, or on other numbers of ranks.

Bytes of weights and of states are those that a plan of each would count. Its peak is estimated from the plan at hand:
activations stay, and gathered and dequantised weights follow the weights.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from thunder_memsave.aten.record import allocated_bytes
from thunder_memsave.budget.target.device import stand_in, without_memory
from thunder_memsave.config import Fp8Config
from thunder_memsave.finetune.model.build import describe_model
from thunder_memsave.finetune.plan.fp8_planned import planned_fp8
from thunder_memsave.finetune.plan.plan_run import RunPlan
from thunder_memsave.finetune.plan.planned_ranks import num_shards
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.training.optimizer import has_fewer_bits, make_optimizer
from thunder_memsave.measure.step_memory import step_memory
from thunder_memsave.optim.on_host import states_on_host
from thunder_memsave.planner.report.explain import in_units, table
from thunder_memsave.planner.reserved import ReservedMemory
from thunder_memsave.settings.problems import ConfigError
from thunder_memsave.stored_weights.formats import all_formats
from thunder_memsave.stored_weights.in_bytes import frozen_in_bytes

_STATES = ("float32", "bfloat16", "int8")
"""`fp8` has the bytes of `int8`."""
_SQUARE = torch.Size((1024, 1024))
_TIMES_AS_MANY = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How a run stores its weights and its optimizer's states."""

    weights: str
    states: str
    values: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the run file that make it so, with their values; empty for the run as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One form, on a number of ranks."""

    form: Form
    num_ranks: int
    weight_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    """An estimate."""

    @property
    def held_bytes(self) -> int:
        """Bytes of weights and optimizer states of each rank."""
        return self.weight_bytes + self.optimizer_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What is known of a plan."""

    num_ranks: int
    num_rows: int
    """Per micro-batch."""
    device_type: str
    budget_bytes: int | None
    peak_bytes: int
    """What it needs of the budget; that of the smallest plan, if the run does not fit."""
    by_kind: Mapping[str, int] = field(default_factory=dict)
    """The parts of the peak, as far as they are known."""

    @classmethod
    def of_plan(cls, made: RunPlan) -> Known:
        """Return what there is to know of a plan."""
        peak_bytes = made.call.profile.peak_bytes
        if made.refusal is not None:
            peak_bytes = made.smallest_bytes
        elif made.limits_reserved and isinstance(made.reserved, ReservedMemory):
            peak_bytes = made.reserved.reserved_bytes
        return cls(
            num_ranks=made.num_ranks,
            num_rows=made.num_rows,
            device_type="cpu" if made.device.name == "cpu" else "cuda",
            budget_bytes=made.budget_bytes,
            peak_bytes=peak_bytes,
            by_kind=made.call.profile.peak_bytes_by_kind,
        )

    def of(self, *kinds: str) -> int:
        """Return the bytes of these kinds at the peak."""
        return sum(self.by_kind.get(kind, 0) for kind in kinds)


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return the run with other values of keys, each `section.key`."""
    for key, value in values.items():
        section, _, name = key.partition(".")
        old: Any = getattr(config, section)
        if old is None and section == "fp8":
            old = Fp8Config()
        if isinstance(old, dict):
            new: Any = {**old, name: value}
        else:
            new = dataclasses.replace(old, **{name: value})
        changed: dict[str, Any] = {section: new}
        config = dataclasses.replace(config, **changed)
    return config


def forms_of(config: RunConfig) -> list[Form]:
    """Return the forms that a run can have, its own first: of frozen weights, or of trained ones if none are frozen."""
    weights: dict[str, dict[str, Any]] = {_weights_of(config): {}}
    if config.fp8 is not None:
        weights["fp8"] = {"fp8.frozen_weights": "fp8"}
    else:
        for each in sorted(all_formats(), key=lambda f: -f.num_bytes(_SQUARE)):
            weights.setdefault(each.setting, {"model.frozen_weights": each.setting})
    usable = {n: v for n, v in weights.items() if not v or _has_frozen(with_values(config, v))}
    if len(usable) == 1 and config.model.trainable_dtype == "float32" and has_fewer_bits(config):
        in_bfloat16 = {"model.trainable_dtype": "bfloat16", "optimizer.rounding": "stochastic"}
        usable["bfloat16"] = in_bfloat16
    return [
        Form(weights=w, states=states, values={**of_weights, **of_states})
        for w, of_weights in usable.items()
        for states, of_states in _states(with_values(config, of_weights))
    ]


def _states(config: RunConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield formats of states with what makes them so, the run's own first."""
    own = str(config.optimizer.get("states", config.model.trainable_dtype))
    yield own, {}
    for name in _STATES if has_fewer_bits(config) else ():
        if name != own:
            yield name, {"optimizer.states": name}


def choices(config: RunConfig, other: RunConfig, known: Known) -> list[Choice]:
    """Return the forms of a run, each on its number of ranks and on 2, 4 and 8 times as many; its own form first.

    Args:
        config: The run that was planned.
        other: The same, or sharded otherwise.
        known: What is known of the plan of `config`.
    """
    own = _Held(config, known.device_type)
    states = _States(known.device_type)
    before = _Bytes.of(own, states, config, known.num_ranks)
    held: dict[str, _Held] = {}
    found = []
    for form in forms_of(other):
        run = with_values(other, form.values)
        if form.weights not in held:  # forms that differ in their states alone share it
            held[form.weights] = _Held(run, known.device_type)
        of_form = held[form.weights]
        for times in _TIMES_AS_MANY:
            num_ranks = known.num_ranks * times
            with suppress(ConfigError):  # groups that this number of ranks cannot be divided into
                after = _Bytes.of(of_form, states, run, num_ranks)
                found.append(
                    Choice(
                        form=form,
                        num_ranks=num_ranks,
                        weight_bytes=after.weights,
                        optimizer_bytes=after.optimizer,
                        peak_bytes=_peak_bytes(known, (own, before), (of_form, after)),
                    )
                )
    return found


def held_bytes(config: RunConfig, known: Known) -> int:
    """Return the bytes of weights and optimizer states of each rank of a run, as it is."""
    held = HeldBytes(known.device_type)
    return held.of(config, _weights_of(config), num_ranks=known.num_ranks)


class HeldBytes:
    """Finds bytes of weights and optimizer states of one run in several forms, whose model is described once each."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._held: dict[str, _Held] = {}
        self._states = _States(device_type)

    def of(self, config: RunConfig, weights: str, *, num_ranks: int) -> int:
        """Return the bytes of each rank at least; zero2 holds the whole weights from forward to backward.

        Args:
            config: The run in a form.
            weights: The form's name of the format of weights.
            num_ranks: Number of ranks.
        """
        if weights not in self._held:
            self._held[weights] = _Held(config, self._device_type)
        held = self._held[weights]
        found = _Bytes.of(held, self._states, config, num_ranks)
        if config.of_strategy.sharding.mode != "zero2":
            return found.weights + found.optimizer
        # But for an embedding, which backward does not read.
        gathered = held.weight_bytes(1) - held.largest_bytes
        return max(found.weights, gathered) + found.optimizer


def formats_table(found: Sequence[Choice], *, budget_bytes: int | None) -> str:
    """Show a row for each form and a column for each number of ranks: bytes held, and about the peak."""
    ranks = sorted({c.num_ranks for c in found})
    head = ["weights", "optimizer.states", *(f"{n} rank{'s' if n > 1 else ''}" for n in ranks)]
    rows = [head]
    for form in dict.fromkeys((c.form.weights, c.form.states) for c in found):
        of_form = [c for c in found if (c.form.weights, c.form.states) == form]
        rows.append([*form, *(_cell(c, budget_bytes) for c in of_form)])
    fits = "" if budget_bytes is None else f"; * exceeds {in_units(budget_bytes)}"
    title = f"weights and optimizer states on each rank in other formats, and about the peak{fits}:"
    return "\n".join([title, *table(rows)])


def _cell(choice: Choice, budget_bytes: int | None) -> str:
    exceeds = budget_bytes is not None and choice.peak_bytes > budget_bytes
    mark = "*" if exceeds else ""
    return f"{in_units(choice.held_bytes)}, {in_units(choice.peak_bytes)}{mark}"


class _Held:
    """The weights of a run in one form, without values."""

    def __init__(self, config: RunConfig, device_type: str) -> None:
        self._device_type, strategy = device_type, config.of_strategy
        model = describe_model(config).train()
        self._trained = [(p.shape, p.dtype) for p in model.parameters() if p.requires_grad]
        self.largest_bytes = max(p.numel() * p.element_size() for p in model.parameters())
        stand_in(model, None)
        kept = frozen_in_bytes(model, strategy.frozen_weights, data_parallel=None)
        if kept is not None:
            kept.stand_in()
        planned_fp8(model, strategy)
        self.is_dequantised = kept is not None
        self._weights = [(p.shape, p.dtype) for p in model.parameters()]

    def weight_bytes(self, num_shards: int) -> int:
        return self._bytes(self._weights, num_shards)

    def gradient_bytes(self, num_shards: int) -> int:
        return self._bytes(self._trained, num_shards)

    def trained_rows(self, num_shards: int) -> list[_Rows]:
        """Return shapes and dtypes of a shard of each trained weight."""
        return [(_shard_of(shape, num_shards), dtype) for shape, dtype in self._trained]

    def _bytes(self, tensors: Sequence[_Rows], num_shards: int) -> int:
        sizes = (_shard_of(shape, num_shards).numel() * dtype.itemsize for shape, dtype in tensors)
        return sum(allocated_bytes(size, self._device_type) for size in sizes)


_Rows = tuple[torch.Size, torch.dtype]


def _shard_of(shape: torch.Size, num_shards: int) -> torch.Size:
    if not shape or not shape.numel():
        return shape
    return torch.Size([-(-shape[0] // num_shards), *shape[1:]])


class _States:
    """Finds the bytes of the states of parameters, each kind once: that takes milliseconds."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._known: dict[tuple[str, _Rows], int] = {}

    def num_bytes(self, config: RunConfig, trained: Sequence[_Rows]) -> int:
        """Return the bytes of all states of these rows."""
        return sum(n * self._of_one(config, rows) for rows, n in Counter(trained).items())

    def _of_one(self, config: RunConfig, rows: _Rows) -> int:
        key = (f"{config.optimizer!r} {config.memory.offloads_optimizer}", rows)
        if key not in self._known:
            parameter = nn.Parameter(without_memory(*rows))
            optimizer = make_optimizer(config, [parameter], device_type=self._device_type)
            found = step_memory(
                [optimizer],
                device_type="" if self._device_type == "cpu" else "cuda",
                change=states_on_host if config.memory.offloads_optimizer else None,
            )
            self._known[key] = found.optimizer_bytes
        return self._known[key]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bytes:
    """Bytes of each rank."""

    weights: int
    optimizer: int
    gradients: int
    num_shards: int

    @classmethod
    def of(cls, held: _Held, states: _States, config: RunConfig, num_ranks: int) -> _Bytes:
        shards = num_shards(config.of_strategy, num_ranks)
        return cls(
            weights=held.weight_bytes(shards),
            optimizer=states.num_bytes(config, held.trained_rows(shards)),
            gradients=held.gradient_bytes(shards),
            num_shards=shards,
        )


def _peak_bytes(known: Known, own: tuple[_Held, _Bytes], other: tuple[_Held, _Bytes]) -> int:
    """Estimate the peak of another form from that of the plan, whose run has the form `own`."""
    (held, before), (other_held, after) = own, other
    peak = known.peak_bytes + after.weights - before.weights + after.optimizer - before.optimizer
    if before.gradients:
        gradients = known.of("gradient", "accumulated")
        peak += int(gradients * (after.gradients / before.gradients - 1))
    if gathered := known.of("gathered"):
        peak += int(gathered * (other_held.weight_bytes(1) / held.weight_bytes(1) - 1))
    elif after.num_shards > before.num_shards:
        peak += 2 * other_held.largest_bytes
    if other_held.is_dequantised and not held.is_dequantised:
        peak += other_held.largest_bytes
    return peak


def _weights_of(config: RunConfig) -> str:
    model = config.model
    if config.fp8 is not None and config.fp8.frozen_weights == "fp8":
        return "fp8"
    return model.frozen_weights or (
        model.dtype if config.lora is not None else model.trainable_dtype
    )


def _has_frozen(config: RunConfig) -> bool:
    """Tell whether a run has weights for which its format is a choice.

    One for experts is none where there are none: nf4 is nearer to the weights of linears, in fewer bytes.
    """
    with suppress(ConfigError):
        model = describe_model(config).train()
        strategy = config.of_strategy
        kept = frozen_in_bytes(model, strategy.frozen_weights, data_parallel=None)
        if kept is not None:
            return kept.has_stacks or not kept.kept_in.takes_stacks
        stand_in(model, None)
        return planned_fp8(model, strategy) is not None
    return False
