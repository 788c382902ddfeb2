"""Reports the scaling of linears in fp8: amax, scale and saturation of each of their tensors."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric import Fabric
from lightning.fabric.wrappers import is_wrapped
from torch import Tensor, nn

from thunder_memsave.callbacks.metrics_csv import read_metrics
from thunder_memsave.fp8.recipe import Role
from thunder_memsave.fp8.scaling import GRAD, INPUT, WEIGHT, ScalingState
from thunder_memsave.settings.problems import ConfigError

_COLUMNS = ("step", "layer", "tensor", "amax", "scale", "num_saturated_steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Tensor:
    """The scaling of one tensor in one step."""

    layer: str
    """Dotted name of the linear."""
    tensor: Literal["input", "weight", "grad"]
    """`grad` is the gradient of the linear's output."""
    amax: float
    """Largest magnitude on any rank, over all micro-batches of the step."""
    scale: float
    """Factor before the cast."""
    num_saturated_steps: int
    """Steps of the run, up to this one, in which `amax * scale` exceeded the fp8 type, so elements were clipped."""


class Fp8Monitor:
    """Metric `fp8_num_saturated`: tensors with clipped elements in a step.

    For recipe `delayed`, whose scales come from earlier steps. Other recipes scale by the tensor itself, so
    nothing is clipped.

    The loop calls `on_before_optimizer_step(fabric, model)` on all ranks, after the last backward of the step.
    `tensors` has every tensor of every layer.

    Args:
        every_n_steps: Steps between two rows per tensor in `path`.
        path: A CSV file with a row per tensor, written by rank 0; None writes none.

    Raises:
        ConfigError: `every_n_steps` is below 1.
    """

    metric_names = ("fp8_num_saturated",)

    def __init__(self, *, every_n_steps: int = 100, path: str | Path | None = None) -> None:
        if every_n_steps < 1:
            raise ConfigError(f"every_n_steps is {every_n_steps}, but must be at least 1.")
        self.every_n_steps = every_n_steps
        self.path = None if path is None else Path(path)
        self._num_before: dict[str, int] = {}
        self._seen: _Seen | None = None

    @property
    def tensors(self) -> tuple[Fp8Tensor, ...]:
        """The tensors of the last step, by layer; empty before the first. Reads the device."""
        return () if self._seen is None else tuple(self._seen.tensors())

    def on_train_start(self, *, fabric: Fabric, step: int) -> None:
        """Start the file, or truncate it to the step that the run resumes from."""
        if self.path is not None and fabric.is_global_zero:
            rows = read_metrics(self.path) if step else []
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write([row for row in rows if int(row["step"]) <= step], mode="w")

    def on_before_optimizer_step(self, *, fabric: Fabric, model: nn.Module) -> None:
        """Read the scales of the step that ends, before they are updated. A collective."""
        if self._seen is None:
            self._seen = _Seen(_tensors_of(model), self._num_before)
        self._seen.look(fabric)

    def on_train_batch_end(self, *, fabric: Fabric, step: int, metrics: dict[str, Any]) -> None:
        """Add the metric of the step, and write the tensors if this step is due."""
        if self._seen is None:
            return
        metrics["fp8_num_saturated"] = self._seen.num_saturated()
        if self.path is not None and fabric.is_global_zero and step % self.every_n_steps == 0:
            self._write([{"step": step, **asdict(t)} for t in self.tensors], mode="a")

    def state_dict(self) -> dict[str, Any]:
        """Return the number of saturated steps of each tensor."""
        counts = {f"{t.layer}.{t.tensor}": t.num_saturated_steps for t in self.tensors}
        return {"num_saturated_steps": counts or self._num_before}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from these counts."""
        self._num_before = dict(state_dict["num_saturated_steps"])
        self._seen = None

    def _write(self, rows: Sequence[Mapping[str, Any]], *, mode: Literal["w", "a"]) -> None:
        assert self.path is not None
        with self.path.open(mode, newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
            if mode == "w":
                writer.writeheader()
            writer.writerows(rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """The scaling state of one tensor."""

    layer: str
    tensor: Role
    state: ScalingState

    @property
    def amax(self) -> Tensor:
        """The current step's amax, of shape [1]."""
        if self.tensor == "grad":
            return self.state.backward_amax_history[0, GRAD : GRAD + 1]
        column = INPUT if self.tensor == "input" else WEIGHT
        return self.state.forward_amax_history[0, column : column + 1]

    @property
    def scale(self) -> Tensor:
        """The current scale, of shape [1]."""
        if self.tensor == "grad":
            return self.state.backward_scale[GRAD : GRAD + 1]
        column = INPUT if self.tensor == "input" else WEIGHT
        return self.state.forward_scale[column : column + 1]

    @property
    def fp8_max(self) -> float:
        """Largest value of the fp8 type that the tensor is cast to."""
        return torch.finfo(self.state.recipe.dtype(self.tensor)).max


class _Seen:
    """Amaxes and saturation counts of all tensors, updated in a few kernels per step without a device sync."""

    def __init__(self, places: Sequence[_Place], num_before: Mapping[str, int]) -> None:
        device = places[0].amax.device
        self._places = places
        counts = [num_before.get(f"{p.layer}.{p.tensor}", 0) for p in places]
        self._num_steps = torch.tensor(counts, dtype=torch.int64, device=device)
        self._max = torch.tensor([p.fp8_max for p in places], device=device)
        self._amax, self._scale = torch.zeros_like(self._max), torch.ones_like(self._max)
        self._is_beyond = torch.zeros_like(self._num_steps)

    @torch.no_grad()
    def look(self, fabric: Fabric) -> None:
        amax = fabric.all_reduce(torch.cat([p.amax for p in self._places]), reduce_op="max")
        assert isinstance(amax, Tensor)
        self._amax, self._scale = amax, torch.cat([p.scale for p in self._places])
        # By more than rounding: a kernel may add up clipped elements to a little more than their sum.
        self._is_beyond = (self._amax * self._scale > self._max * (1 + 2**-16)).long()
        self._num_steps += self._is_beyond

    def num_saturated(self) -> int:
        return int(self._is_beyond.sum())

    def tensors(self) -> Iterator[Fp8Tensor]:
        values = (each.tolist() for each in (self._amax, self._scale, self._num_steps))
        for place, amax, scale, num_steps in zip(self._places, *values, strict=True):
            yield Fp8Tensor(
                layer=place.layer,
                tensor=place.tensor,
                amax=amax,
                scale=scale,
                num_saturated_steps=num_steps,
            )


def _tensors_of(model: nn.Module) -> list[_Place]:
    """List every tensor whose scale changes from step to step; a frozen weight is cast once."""
    module = getattr(model, "module", model) if is_wrapped(model) else model
    found: list[_Place] = []
    for name, state in module.named_modules():
        if isinstance(state, ScalingState):
            layer = name.rpartition(".")[0]
            is_trained = module.get_submodule(layer).weight.requires_grad
            roles: tuple[Role, ...] = (
                ("input", "weight", "grad") if is_trained else ("input", "grad")
            )
            found += [_Place(layer=layer, tensor=role, state=state) for role in roles]
    if not found:
        raise ConfigError(
            "Fp8Monitor is a callback, but no linear of the model keeps fp8 scales from step to step; set fp8 with "
            "recipe 'delayed', or leave Fp8Monitor out.",
            key="callbacks",
        )
    return found
