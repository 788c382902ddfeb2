"""The base of these optimizers: updates weights some rows at a time, with states in a format of fewer bits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from typing_extensions import override

from thunder_memsave.aten.random_bits import key_of
from thunder_memsave.optim import noise
from thunder_memsave.optim.formats import (
    FORMATS,
    Format,
    Place,
    State,
    copy,
    layout,
    read,
    write,
)
from thunder_memsave.optim.loading import (
    Held,
    StateError,
    layout_problem,
    refuse_other_states,
    state_device,
    value_problem,
)
from thunder_memsave.settings.problems import ConfigError
from thunder_memsave.sharding.sharded_parameter import as_rows

Rounding = Literal["nearest", "stochastic"]

ELEMENTS_AT_ONCE = 4 * 2**20
"""Elements of a weight that are updated at once, unless a single row has more."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of trained weights."""


class ByRows(Optimizer):
    """An elementwise optimizer whose update of an element depends on nothing but its block of 256.

    Everything that is added or multiplied is rounded once, by an operation of its own, so that results are the same
    wherever a tensor is cut.
    """

    kept: ClassVar[tuple[State, ...]]
    """The states of each parameter."""

    numbers: dict[int, int] | None = None
    """What `numbered` returns of all parameters, while groups have only some of them."""

    replay: Callable[[Hashable, Callable[[], None]], None] | None = None
    """Of an optimizer without data: runs the update of a tile, or counts what it allocates like one of an equal key."""

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        states: Format,
        rounding: Rounding,
        seed: int,
    ) -> None:
        super().__init__(params, {**defaults, "states": states, "rounding": rounding, "seed": seed})
        dtypes = {p.dtype for group in self.param_groups for p in group["params"]}
        if rounding == "stochastic" and torch.bfloat16 not in dtypes:
            raise ConfigError(
                "rounding is 'stochastic', but no trained weight is bfloat16, and others are not rounded so; train in "
                "bfloat16 (model.trainable_dtype), or leave rounding out.",
                key="optimizer.rounding",
            )

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which may have its own `states`, `rounding` and `seed`."""
        super().add_param_group(param_group)
        _check_choice("states", self.param_groups[-1]["states"], FORMATS)
        _check_choice("rounding", self.param_groups[-1]["rounding"], get_args(Rounding))

    @property
    def row_states(self) -> frozenset[str]:
        """Keys of states that have a row for each row of the parameter, but not its shape."""
        return frozenset(state.scales for state in self.kept)

    def expected_state(
        self, p: Tensor, shape: torch.Size
    ) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Return shape and dtype of the state tensors of `p`, as if it had this shape."""
        (group,) = (g for g in self.param_groups if any(p is each for each in g["params"]))
        return self._layout(shape, group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update each parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        numbers = self.numbers or self.numbered()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self._update_parameter(p, group, numbers[id(p)])
        return loss

    def numbered(self) -> dict[int, int]:
        """Return the number of each parameter, which seeds what is drawn for it, by its `id`."""
        parameters = (p for group in self.param_groups for p in group["params"])
        return {id(p): number for number, p in enumerate(parameters)}

    @abstractmethod
    def update(
        self,
        weight: Tensor,
        gradient: Tensor,
        states: tuple[Tensor, ...],
        group: Mapping[str, Any],
        step: int,
    ) -> None:
        """Update rows of a weight and their states in place: all float32; the gradient is not to be changed."""

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load, with the dtypes as they are: PyTorch would convert them to the parameter's.

        Raises:
            StateError: A value is none that a step writes; nothing was changed.
        """
        # Registered now, so that the first runs after all others, which may cut rows out of whole states.
        hooks = (
            self.register_load_state_dict_pre_hook(_checked_and_held),
            self.register_load_state_dict_post_hook(_released, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _update_parameter(self, p: Tensor, group: Mapping[str, Any], number: int) -> None:
        stored = self._state_of(p, group)
        stored["step"] += 1
        step = int(stored["step"].item())
        by_rows = {key: _with_rows(value) for key, value in stored.items() if key != "step"}
        weight, gradient = _with_rows(as_rows(p)), _with_rows(as_rows(cast(Tensor, p.grad)))
        keys = [key_of(group["seed"], step, number, i) for i in range(len(self.kept) + 1)]
        tiles = _tiles(weight.shape)
        if isinstance(weight, FakeTensor):
            # A plan, which needs no tile that is like another one of this parameter.
            tiles = list({len(rows): rows for rows in tiles}.values())
        for rows in tiles:
            tile = _Tile(
                # Not `weight[rows]`: PyTorch looks for the device, which a plan may do without.
                weight=weight.narrow(0, rows.start, len(rows)),
                gradient=gradient.narrow(0, rows.start, len(rows)),
                stored={k: value.narrow(0, rows.start, len(rows)) for k, value in by_rows.items()},
                first_row=vars(p).get("_first_row", 0) + rows.start,
            )
            update = partial(self._update_tile, tile, group, step, keys)
            if self.replay is None:
                update()
            else:
                self.replay((tile.layout, step == 1, _settings(group)), update)

    def _update_tile(
        self, tile: _Tile, group: Mapping[str, Any], step: int, keys: Sequence[int]
    ) -> None:
        states = tuple(read(state, tile.stored, group["states"]) for state in self.kept)
        values, weight = tile.weight.float(), tile.weight
        self.update(values, tile.gradient.float(), states, group, step)
        for state, updated, key in zip(self.kept, states, keys[1:], strict=True):
            place = Place(first_row=tile.first_row, key=key)
            write(state, updated, tile.stored, group["states"], place)
        if weight.dtype == torch.bfloat16 and group["rounding"] == "stochastic":
            values = values.contiguous()
            values = noise.rounded_to_bfloat16(values, key=keys[0], first_row=tile.first_row)
        if values is not weight:
            copy(weight, values)

    def _state_of(self, p: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        stored: dict[str, Tensor] = self.state[p]
        if not stored:
            _refuse_unsuitable(p, type(self).__name__)
            for key, (shape, dtype) in self._layout(p.shape, group).items():
                device = "cpu" if key == "step" else p.device
                stored[key] = torch.zeros(shape, dtype=dtype, device=device)
        return stored

    def _layout(
        self, shape: torch.Size, group: Mapping[str, Any]
    ) -> dict[str, tuple[torch.Size, torch.dtype]]:
        found: dict[str, tuple[torch.Size, torch.dtype]] = {"step": (torch.Size(), torch.float32)}
        for state in self.kept:
            found |= layout(state, group["states"], shape)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tile:
    """Rows that are updated at once: views."""

    weight: Tensor
    gradient: Tensor
    stored: dict[str, Tensor]
    first_row: int
    """In the whole, unsharded parameter."""

    @property
    def layout(self) -> Hashable:
        """All that decides what its update allocates, beside the settings."""
        tensors = self.weight, self.gradient, *self.stored.values()
        return tuple((t.shape, t.stride(), t.dtype) for t in tensors), tuple(self.stored)


def _settings(group: Mapping[str, Any]) -> Hashable:
    return tuple((name, repr(value)) for name, value in group.items() if name != "params")


def _with_rows(t: Tensor) -> Tensor:
    return t if t.dim() else t.view(1)


def _tiles(shape: torch.Size) -> list[range]:
    num_rows = max(1, ELEMENTS_AT_ONCE // shape[1:].numel())
    starts = range(0, shape[0], num_rows)
    return [range(start, min(start + num_rows, shape[0])) for start in starts]


def _refuse_unsuitable(p: Tensor, name: str) -> None:
    layout_of_gradient = torch.strided if p.grad is None else p.grad.layout
    if p.dtype not in DTYPES or layout_of_gradient != torch.strided:
        raise ConfigError(
            f"{name} of thunder_memsave.optim got a weight in {p.dtype} with a gradient in {layout_of_gradient}; it "
            f"trains {', '.join(map(str, DTYPES))} with dense gradients: use torch.optim.{name} for others.",
            key="optimizer.states",
        )


def refuse_out_of_range(arguments: Mapping[str, tuple[object, bool]]) -> None:
    """Refuse arguments by name.

    Args:
        arguments: Each value, and whether it is in range.

    Raises:
        ConfigError: One is not.
    """
    for name, (value, is_in_range) in arguments.items():
        if not is_in_range:
            raise ConfigError(
                f"{name} is {value}, which is out of range.", key=f"optimizer.init_args.{name}"
            )


def _check_choice(name: str, given: object, choices: Sequence[str]) -> None:
    if given not in choices:
        raise ConfigError(
            f"{name} is {given!r}, but must be one of {', '.join(map(repr, choices))}.",
            key=f"optimizer.{name}",
        )


def _checked_and_held(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Check states that are loaded, and keep PyTorch from converting them."""
    assert isinstance(optimizer, ByRows)
    # PyTorch's own have no such settings. The order stays: files of equal states have equal bytes.
    groups = [
        {**theirs, **{k: v for k, v in _own_settings(mine).items() if k not in theirs}}
        for mine, theirs in zip(optimizer.param_groups, state_dict["param_groups"], strict=False)
    ]
    refuse_other_states(optimizer.param_groups, groups)
    current = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    saved = [number for group in groups for number in group["params"]]
    state = dict(state_dict["state"])
    for i, (number, (p, group)) in enumerate(zip(saved, current, strict=False)):
        if number in state:
            values = state[number]
            problem = layout_problem(values, optimizer.expected_state(p, p.shape))
            problem = problem or value_problem(values, optimizer.kept, group["states"], p.shape)
            if problem is not None:
                raise StateError.of(problem, number=i)
            state[number] = {k: v if k == "step" else Held(v) for k, v in values.items()}
    num_missing = len(state_dict["param_groups"]) - len(groups)
    rest = state_dict["param_groups"][-num_missing:] if num_missing else []
    return {**state_dict, "state": state, "param_groups": [*groups, *rest]}


def _own_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {"states": "float32", "rounding": group["rounding"], "seed": group["seed"]}


def _released(optimizer: Optimizer) -> None:
    for p, values in optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, Held):
                values[key] = value.value.to(state_device(optimizer, p))
