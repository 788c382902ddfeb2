"""The fp8 linears of one module: chooses them, adds their state, and hands it to a trace."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thunder_memsave.config import Fp8Config
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.distributed.lost_ranks import collective
from thunder_memsave.fp8.compute.operators import Backend, quantize_frozen, transpose_frozen
from thunder_memsave.fp8.recipe import Recipe, recipe_of
from thunder_memsave.fp8.scaling import ScalingState, reduce_amax, update_scales
from thunder_memsave.fp8.weights.frozen import FrozenInFp8, scale_inv_of
from thunder_memsave.fp8.weights.layers import Choice, choose, feature_multiple, report
from thunder_memsave.fp8.weights.loaded import refuse_other_numbers
from thunder_memsave.ops.host_copies.weights import place_of
from thunder_memsave.settings.problems import ConfigError
from thunder_memsave.sharding.sharded_parameter import is_sharded, unquantized_dtype

STATE_NAME = "fp8_scaling"
"""Name of the submodule of each linear that holds its scaling state, so that checkpoints have it."""

StatePart = Literal[
    "forward_scale",
    "forward_amax_history",
    "backward_scale",
    "backward_amax_history",
    "weight",
    "weight_transposed",
    "weight_scale_inv",
    "weight_transposed_scale_inv",
    "weight_amax",
]


_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Frozen:
    """The cached fp8 numbers of a frozen weight."""

    weight: Tensor
    weight_scale_inv: Tensor
    weight_transposed: Tensor | None
    weight_transposed_scale_inv: Tensor | None
    """None: those of the weight."""
    weight_amax: Tensor | None
    """Of NVFP4; also the transpose's."""
    source: tuple[int, int, torch.dtype]
    """Address, version and dtype of the weight that was quantised, to notice changes."""


def is_scaling_state(name: str) -> bool:
    """Return whether an entry of a `state_dict` belongs to fp8's scaling state."""
    return STATE_NAME in name.split(".")


def set_up_fp8(module: nn.Module, config: Fp8Config, *, backend: Backend) -> Fp8Linears:
    """Choose the linears of `module` that compute in fp8, and add their scaling state.

    Args:
        module: The module, after sharding.
        config: The `fp8` section.
        backend: The backend that computes.

    Raises:
        ConfigError: Nothing would run in fp8.
    """
    choices = choose_linears(module, config)
    _log.info("fp8 by %s: %s", backend, report(choices))
    return Fp8Linears(module, choices, recipe=recipe_of(config), backend=backend)


def choose_linears(module: nn.Module, config: Fp8Config) -> tuple[Choice, ...]:
    """Decide for each linear of `module` whether it computes in fp8, without changing it.

    Raises:
        ConfigError: None would.
    """
    multiple = feature_multiple(config.recipe)
    choices = choose(module, skip_modules=config.skip_modules, multiple=multiple)
    if all(c.reason is not None for c in choices):
        raise ConfigError(
            f"fp8 is set, but {report(choices)} Leave fp8 out, or change what excludes the linears.",
            key="fp8",
        )
    return choices


def frozen_in_fp8(
    module: nn.Module,
    config: Fp8Config | None,
    *,
    data_parallel: DataParallel | None,
) -> FrozenInFp8 | None:
    """Choose the frozen weights of `module` to keep as fp8 numbers only; None: `config` asks for none.

    Args:
        module: The module, before it has values or is sharded.
        config: The `fp8` section.
        data_parallel: The ranks that will share its parameters.

    Raises:
        ConfigError: It is asked for, but no weight is frozen, or no linear runs in fp8.
    """
    if config is None or config.frozen_weights == "compute":
        return None
    choices = choose_linears(module, config)
    return FrozenInFp8(module, choices, recipe=recipe_of(config), data_parallel=data_parallel)


class Fp8Linear:
    """One linear that computes in fp8."""

    def __init__(self, name: str, linear: nn.Linear, recipe: Recipe, backend: Backend) -> None:
        self.name, self.linear = name, linear
        self._recipe, self._backend = recipe, backend
        self._frozen: _Frozen | None = None

    @property
    def state(self) -> ScalingState | None:
        """The linear's scaling state; None if the recipe has none."""
        state = getattr(self.linear, STATE_NAME, None)
        assert state is None or isinstance(state, ScalingState)
        return state

    @property
    def is_frozen(self) -> bool:
        """Whether the weight is not trained."""
        return not self.linear.weight.requires_grad

    @property
    def is_kept_in_fp8(self) -> bool:
        """Whether only fp8 numbers of the weight are kept."""
        return unquantized_dtype(self.linear.weight) is not None

    def parts(self, *, training: bool, transposed: bool) -> tuple[StatePart, ...]:
        """Return the parts of the state that a trace reads.

        Args:
            training: Whether there is a backward.
            transposed: Whether the input needs a gradient.
        """
        found: list[StatePart] = []
        weight = self.linear.weight
        if self.state is not None:
            found += ["forward_scale", "forward_amax_history"]
            if training:
                found += ["backward_scale", "backward_amax_history"]
        if self.is_kept_in_fp8:
            found.append("weight_scale_inv")
        # The trace gathers a sharded weight, or fetches one from the host, and quantises it there.
        elif self.is_frozen and not is_sharded(weight) and place_of(weight) is None:
            found += ["weight", "weight_scale_inv"]
            if self._recipe.scaling == "nvfp4":
                found.append("weight_amax")
            if transposed:
                found.append("weight_transposed")
                if self._recipe.casts_each_direction:
                    found.append("weight_transposed_scale_inv")
        return tuple(found)

    def read(self, part: StatePart) -> Tensor:
        """Return the current tensor of a part."""
        if self.is_kept_in_fp8 and part == "weight_scale_inv":
            tensor = scale_inv_of(self.linear)
        elif part.startswith("weight"):
            transposed = part.startswith("weight_transposed")
            tensor = getattr(self._quantized(transposed=transposed), part)
        else:
            tensor = getattr(self.state, part)
        assert isinstance(tensor, Tensor)
        return tensor

    def take_frozen(
        self,
        weight: Tensor,
        scale_inv: Tensor,
        transposed: Tensor,
        transposed_scale_inv: Tensor | None,
        amax: Tensor | None,
    ) -> None:
        """Set the frozen weight's fp8 numbers; for a plan, whose weight has no values to cast."""
        self._frozen = _Frozen(
            weight=weight,
            weight_scale_inv=scale_inv,
            weight_transposed=transposed,
            weight_transposed_scale_inv=transposed_scale_inv,
            weight_amax=amax,
            source=_source(self.linear.weight),
        )

    def _quantized(self, *, transposed: bool) -> _Frozen:
        weight = self.linear.weight
        source = _source(weight)
        # Even if the first call is an evaluation: tensors made in inference mode cannot be saved for a backward.
        with torch.inference_mode(mode=False), torch.no_grad():
            if self._frozen is None or self._frozen.source != source:
                numbers, scale_inv, *others = quantize_frozen(
                    self._backend, self._recipe, weight.detach()
                )
                amax = next(iter(others), None)
                self._frozen = _Frozen(numbers, scale_inv, None, None, amax, source)
            found = self._frozen
            if transposed and found.weight_transposed is None:
                found.weight_transposed, found.weight_transposed_scale_inv = transpose_frozen(
                    self._backend, self._recipe, weight.detach(), found.weight
                )
            return found


def _source(weight: Tensor) -> tuple[int, int, torch.dtype]:
    return (weight.data_ptr(), weight._version, weight.dtype)


class Fp8Linears:
    """The fp8 linears of one module, by name."""

    def __init__(
        self, module: nn.Module, choices: Sequence[Choice], *, recipe: Recipe, backend: Backend
    ) -> None:
        """Add the state to each chosen linear that has none; those of a copied module have one.

        Raises:
            ConfigError: A linear has another attribute of the state's name.
        """
        self.choices, self.recipe, self.backend = tuple(choices), recipe, backend
        self.owner = type(module).__name__
        self.by_name: dict[str, Fp8Linear] = {}
        self._was_recorded = False
        self.on_copy: Callable[[nn.Module, Fp8Linears], None] | None = None
        """Called with each copy of the module, which other optimizers train."""
        for choice in choices:
            if choice.reason is None:
                linear = module.get_submodule(choice.name)
                assert isinstance(linear, nn.Linear)
                _add_state(choice.name, linear, recipe)
                refuse_other_numbers(linear)
                self.by_name[choice.name] = Fp8Linear(choice.name, linear, recipe, backend)
        self._of_name = _of_name(module, self.by_name)

    def find(self, name: str, weight: Tensor) -> Fp8Linear | None:
        """Return the linear that computes with this weight in the module of this name; None: it is not in fp8.

        Inside a linear (or its hooks) that is the linear itself, for its own weight; elsewhere the first one with the
        weight.
        """
        own = [self._of_name[name]] if name in self._of_name else self.by_name.values()
        return next((f for f in own if f is not None and f.linear.weight is weight), None)

    def note_recorded(self) -> None:
        """Note that a forward that records amax has begun."""
        self._was_recorded = True

    def update(self, group: dist.ProcessGroup | None) -> None:
        """Update the scales, once for all forwards since the last update. A collective if amax is reduced.

        Args:
            group: All ranks, which see different data; None: there are no others.
        """
        states = [f.state for f in self.by_name.values() if f.state is not None]
        if not self._was_recorded or not states:
            return
        self._was_recorded = False
        if group is not None:
            reduce_amax(states, partial(_all_reduce_max, group=group))
        update_scales(states)

    def for_copy(self, module: nn.Module) -> Fp8Linears:
        """Return the fp8 linears of a copy of the module, whose state was copied with it."""
        copied = Fp8Linears(module, self.choices, recipe=self.recipe, backend=self.backend)
        if self.on_copy is not None:
            self.on_copy(module, copied)
        return copied


def _add_state(name: str, linear: nn.Linear, recipe: Recipe) -> None:
    if recipe.name != "delayed" or isinstance(getattr(linear, STATE_NAME, None), ScalingState):
        return
    if hasattr(linear, STATE_NAME):
        found = type(getattr(linear, STATE_NAME)).__name__
        raise ConfigError(
            f"fp8 keeps the scaling state of {name!r} in its attribute {STATE_NAME!r}, but has a {found} there; "
            f"rename it, or add {name!r} to fp8.skip_modules.",
            key="fp8.skip_modules",
        )
    linear.add_module(STATE_NAME, ScalingState(recipe, device=linear.weight.device))


def _of_name(module: nn.Module, by_name: Mapping[str, Fp8Linear]) -> dict[str, Fp8Linear | None]:
    """Return all linears by each of their names in the module (a shared one has several); None: not in fp8."""
    chosen = {id(found.linear): found for found in by_name.values()}
    names = module.named_modules(remove_duplicate=False)
    return {name: chosen.get(id(m)) for name, m in names if isinstance(m, nn.Linear)}


def _all_reduce_max(tensor: Tensor, *, group: dist.ProcessGroup) -> None:
    with collective("the largest amax of all ranks", group):
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
