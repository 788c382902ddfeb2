"""Lists the settings of a run that a search tries, those that keep its numbers first."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from thunder_memsave.config import Fp8Config, ShardingConfig
from thunder_memsave.finetune.model.build import positions_of
from thunder_memsave.finetune.plan.other_formats import Form, forms_of
from thunder_memsave.finetune.run_file.batch_sizes import batch_sizes
from thunder_memsave.finetune.run_file.config import RunConfig, TrainConfig
from thunder_memsave.planner.graph import Device

_SHARDINGS = ("none", "zero2", "zero3")
"""From the least communication to the most."""
_OFFLOADS: Mapping[str, frozenset[str]] = {
    "none": frozenset(),
    "auto": frozenset(),  # unless nothing fits without
    "activations": frozenset({"activations"}),
    "optimizer": frozenset({"optimizer"}),
    "all": frozenset({"activations", "optimizer"}),
    "fastest": frozenset({"activations"}),  # and states where that is faster
}
"""What each value of memory.offload copies."""
_SEARCHED = [name for name in _OFFLOADS if name not in ("auto", "fastest")]
_LARGEST_MICRO_BATCH = 64
_SHORTEST = 128
"""Tokens of a row below which no shorter one is planned."""
LENGTH = "data.max_seq_length"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A run but for the rows of its micro-batch."""

    device: Device
    num_ranks: int
    sharding: str
    offload: str
    form: Form
    number_of_form: int
    """In the order of `forms_of`: of its formats of weights, then of states, those with more bits come first."""
    work: Mapping[str, Any] = field(default_factory=dict)
    """Those of `values` that change what is computed: times and bytes of others are no bound of this one's."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the run file with their new values."""

    @property
    def as_plain(self) -> Setting:
        """The same as other processes can be sent: read-only mappings cannot."""
        return replace(self, device=self.device.as_plain)

    @property
    def keeps_numbers(self) -> bool:
        """Whether it computes the numbers of the run as it is."""
        return not self.form.values and not self.work

    def costs_no_less(self, other: Setting) -> bool:
        """Return whether this one does all that another does on as many equal devices, or more.

        It does with fewer bits, which are turned into more before they are used; with shards, which are gathered; and
        with copies to the host.
        """
        mine, others = ((each.device.name, each.num_ranks, each.work) for each in (self, other))
        if mine != others:
            return False
        shardings = [_place(_SHARDINGS, each.sharding) for each in (self, other)]
        if None in shardings and self.sharding != other.sharding:
            return False
        has_no_more_bits = self.number_of_form >= other.number_of_form
        is_sharded_more = None in shardings or shardings[0] >= shardings[1]  # type: ignore[operator]  # of both
        return has_no_more_bits and is_sharded_more and self.copies_no_less(other)

    def works_as(self, other: Setting) -> bool:
        """Return whether this one differs in what it stores alone, and does all that the other one does for that."""
        copies = [_OFFLOADS[each.offload] - {"optimizer"} for each in (self, other)]
        is_equal = self.sharding == other.sharding and copies[0] == copies[1]
        return is_equal and self.costs_no_less(other)

    def is_as_fast_as(self, other: Setting) -> bool:
        """Tell whether both would take the same time but for what they recompute, gather and copy."""
        mine, others = (
            (each.device.name, each.num_ranks, each.number_of_form, each.work)
            for each in (self, other)
        )
        return mine == others

    def copies_no_less(self, other: Setting) -> bool:
        """Tell whether this one copies to the host all that another does."""
        return _OFFLOADS[self.offload] >= _OFFLOADS[other.offload]


def settings_of(
    config: RunConfig,
    *,
    axes: Collection[str],
    num_ranks: Sequence[int],
    devices: Sequence[Device],
) -> list[Setting]:
    """Return the settings: formats as they are first, and of each the least communication first.

    Args:
        config: The run.
        axes: What may change.
        num_ranks: Numbers of ranks.
        devices: Devices.
    """
    forms = list(enumerate(_forms(config, axes)))
    return [
        Setting(
            device=device,
            num_ranks=ranks,
            sharding=sharding,
            offload=offload,
            form=form,
            number_of_form=number,
            work=work,
            values={**_values(config, sharding, offload, form), **work},
        )
        for work in _works(config, axes)
        for number, form in forms
        for device in devices
        for ranks in num_ranks
        for sharding in _shardings(config, axes, ranks)
        for offload in _offloads(config, axes, device)
    ]


def micro_batch_sizes(
    config: RunConfig, *, axes: Collection[str], num_ranks: int, in_all: int
) -> list[int]:
    """Return the rows per micro-batch that divide the global batch, rising; with the axis fixed, the run's own.

    Args:
        config: The run.
        axes: What may change.
        num_ranks: Number of ranks.
        in_all: Rows of an optimizer step.

    Raises:
        ConfigError: the global batch cannot be divided evenly over the ranks.
    """
    own = config.train.micro_batch_size or 1
    if "micro_batch_size" not in axes or in_all % num_ranks:
        sizes = batch_sizes(_train(config, own, in_all), world_size=num_ranks)
        return [sizes.micro_batch_size]
    powers = (1 << power for power in range(_LARGEST_MICRO_BATCH.bit_length()))
    return sorted({n for n in (*powers, own) if in_all // num_ranks % n == 0})


def values_with_rows(
    config: RunConfig, setting: Setting, *, num_rows: int, in_all: int
) -> dict[str, Any]:
    """Return the keys that a setting changes, with those for a micro-batch of so many rows."""
    train, values = config.train, dict(setting.values)
    if num_rows != (train.micro_batch_size or 1):
        values["train.micro_batch_size"] = num_rows
    steps = in_all // (num_rows * setting.num_ranks)
    if train.gradient_accumulation_steps not in (None, steps):
        values["train.gradient_accumulation_steps"] = steps
    return values


def _train(config: RunConfig, num_rows: int, in_all: int) -> TrainConfig:
    return replace(
        config.train,
        global_batch_size=in_all,
        micro_batch_size=num_rows,
        gradient_accumulation_steps=None,
    )


def lengths(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield rows of half and twice the tokens, as far as the model has positions."""
    own, most = config.data.max_seq_length, positions_of(config)
    if own // 2 >= _SHORTEST:
        yield {LENGTH: own // 2}
    if most is None or 2 * own <= most:
        yield {LENGTH: 2 * own}


def _works(config: RunConfig, axes: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield keys that change what is computed, none first."""
    of_length = [{}, *(lengths(config) if "max_seq_length" in axes else ())]
    of_products: list[dict[str, Any]] = [{}]
    if "fp8" in axes and config.fp8 is None:
        of_products.append({"fp8.recipe": Fp8Config().recipe})
    for products in of_products:
        for length in of_length:
            yield {**products, **length}


def _forms(config: RunConfig, axes: Collection[str]) -> Iterator[Form]:
    own, *others = forms_of(config)
    yield own
    for form in others:
        changes = {
            "frozen_weights": form.weights != own.weights,
            "states": "optimizer.states" in form.values,
        }
        if all(axis in axes for axis, is_changed in changes.items() if is_changed):
            yield form


def _shardings(config: RunConfig, axes: Collection[str], num_ranks: int) -> list[str]:
    own = config.strategy.sharding.mode
    if num_ranks == 1 or "sharding" not in axes:
        return [own]
    return list(dict.fromkeys((*_SHARDINGS, own)))


def _offloads(config: RunConfig, axes: Collection[str], device: Device) -> list[str]:
    """Copies need a host whose memory is known."""
    own = config.memory.offload
    if "offload" not in axes or device.host_memory_bytes is None or config.memory.policy != "plan":
        return [own]
    return list(dict.fromkeys(("none", own, *_SEARCHED)))


def _values(config: RunConfig, sharding: str, offload: str, form: Form) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if sharding != config.strategy.sharding.mode:
        values["strategy.sharding"] = ShardingConfig(mode=sharding)  # type: ignore[arg-type]  # one of its names
    if offload != config.memory.offload:
        values["memory.offload"] = offload
    return {**values, **form.values}


def _place(names: Sequence[str], name: str) -> int | None:
    return names.index(name) if name in names else None
