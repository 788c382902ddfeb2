"""Finds the bytes that a training step holds besides forward and backward: the optimizer's state and its update.

Clipping runs once and the update twice on FakeTensors, which shows for any optimizer what state it keeps, and whether
it updates all parameters at once (`foreach`: a copy of them or more) or one by one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.optim.optimizer import _foreach_supported_types
from torch.utils import _foreach_utils

from thunder_memsave.aten.record import AtenRecord, allocated_bytes
from thunder_memsave.errors import ThunderMemsaveError
from thunder_memsave.measure.scratch import product_scratch
from thunder_memsave.planner.graph import Allocations, StepMemory, UpdateMemory

Clip = Callable[[Sequence[nn.Parameter]], object]
"""Clips the gradients of parameters, in place."""


class OneByOne(Protocol):
    """Updates parameters one by one (`optim/in_backward.py`)."""

    def add(self, optimizer: Optimizer) -> None:
        """Update the parameters of an optimizer too."""

    def owner(self, parameter: Tensor) -> Optimizer:
        """Return the optimizer of a parameter."""

    def update(self, parameter: Tensor, gradient: Tensor) -> None:
        """Update a parameter by its gradient."""

    def fetch_states(self, parameter: Tensor) -> None:
        """Bring the states of a parameter to the device, if they are on the host."""

    def store_states(self, parameter: Tensor) -> None:
        """Take them to the host."""

    def wait_states(self, parameter: Tensor) -> None:
        """Free their memory on the device."""

    def norm(self, optimizer: Optimizer, data_parallel: None) -> Tensor:
        """Return the norm of the gradients of an optimizer's parameters, after their updates."""


class StepMemoryError(ThunderMemsaveError, RuntimeError):
    """An optimizer's memory cannot be found."""


def step_memory(
    optimizers: Sequence[Optimizer],
    *,
    clip: Clip | None = None,
    before_clip: Callable[[Optimizer], object] | None = None,
    accumulates: bool = False,
    other_bytes: int = 0,
    between_bytes: int = 0,
    loss_allocations: Allocations = (),
    device_type: str = "",
    change: Callable[[Optimizer], object] | None = None,
    one_by_one: OneByOne | None = None,
) -> StepMemory:
    """Find the memory of an optimizer's update, and add the given bytes of the rest of a step.

    Args:
        optimizers: Each steps once per training step, one after the other. They are not changed.
        clip: Called before the update, with all parameters of the optimizers.
        before_clip: Called with each optimizer before that.
        accumulates: True if gradients of earlier micro-batches are live before backward.
        other_bytes: Bytes of anything else that stays.
        between_bytes: Peak of the caller's loss between forward and backward.
        loss_allocations: The allocations of that loss, if they are known.
        device_type: Type of the planned device, if parameters are on another one, such as meta.
        change: Called with a copy of each optimizer, which is then counted as it was changed; its errors are raised.

        one_by_one: Updates each parameter in backward, where nothing is clipped; None: all are updated at once.

    Raises:
        StepMemoryError: an optimizer does not run on tensors without data.
    """
    update = _Update(optimizers, clip, before_clip, device_type)
    if change is not None:
        update.change(change)
    if one_by_one is not None:
        return update.one_by_one(
            one_by_one,
            StepMemory(
                other_bytes=other_bytes,
                between_bytes=between_bytes,
                loss_allocations=loss_allocations,
            ),
        )
    update.run()
    state_bytes, first_peak_bytes = update.record.live_bytes, update.record.peak_bytes
    update.record.peak_bytes = update.record.live_bytes
    num_first = len(update.record.allocations)
    update.run()
    allocations = update.record.allocations
    return StepMemory(
        gradient_bytes=update.gradient_bytes if accumulates else 0,
        optimizer_bytes=state_bytes,
        host_bytes=update.host_bytes,
        other_bytes=other_bytes,
        between_bytes=between_bytes,
        update_peak_bytes=max(first_peak_bytes, update.record.peak_bytes) - state_bytes,
        loss_allocations=loss_allocations,
        update_allocations=(tuple(allocations[:num_first]), tuple(allocations[num_first:])),
    )


class _Update:
    """Runs copies of optimizers on parameters without data."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        clip: Clip | None,
        before_clip: Callable[[Optimizer], object] | None,
        device_type: str,
    ) -> None:
        self._clip, self._before_clip = clip, before_clip
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._device_type = device_type
        self._clipping: tuple[Sequence[int], int] | None = None
        self._parameters: dict[int, nn.Parameter] = {}
        self._num_runs: Counter[Hashable] = Counter()
        self._replayed: dict[Hashable, tuple[Sequence[int], int]] = {}
        """Allocations of updates, and their peak above their start, by the keys of equal ones."""
        with self._fake:
            self._optimizers = [self._copied(o) for o in optimizers]
        fakes = list(self._parameters.values())
        gradients = [p.grad for p in fakes if p.grad is not None]
        planned = device_type or (fakes[0].device.type if fakes else "cpu")
        self.gradient_bytes = sum(
            allocated_bytes(g.untyped_storage().nbytes(), planned) for g in gradients
        )
        self.record = _UpdateRecord((*fakes, *gradients), allocated=_only_on(planned))

    def run(self) -> None:
        """Clip gradients, and update once."""
        with self._fake, self.record:
            if self._before_clip is not None:
                for optimizer in self._optimizers:
                    self._before_clip(optimizer)
            self._clip_gradients()
            for optimizer in self._optimizers:
                self._step(optimizer)

    def one_by_one(self, updates: OneByOne, others: StepMemory) -> StepMemory:
        """Return the memory of a step that updates parameters one by one, beside others."""
        parameters = [p for p in self._parameters.values() if p.grad is not None]
        gradients = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        record = self.record
        found: dict[tuple[tuple[int, ...], str], UpdateMemory] = {}
        with self._fake, record:
            for optimizer in self._optimizers:
                updates.add(optimizer)
                updates.norm(optimizer, None)
            for p, gradient in (*zip(parameters, gradients, strict=True),) * 2:
                key = tuple(p.shape), str(p.dtype)
                before = found.get(key, UpdateMemory(shape=key[0], dtype=key[1]))
                found[key] = self._updated(updates, p, gradient, before)
            live_bytes = record.peak_bytes = record.live_bytes
            for optimizer in self._optimizers:
                updates.norm(optimizer, None)
        return replace(
            others,
            optimizer_bytes=live_bytes,
            host_bytes=self.host_bytes,
            update_peak_bytes=record.peak_bytes - live_bytes,
            updates=tuple(found.values()),
        )

    def _updated(
        self, updates: OneByOne, p: nn.Parameter, gradient: Any, before: UpdateMemory
    ) -> UpdateMemory:
        """Update a parameter, and return the most that this or an update before it took."""
        record = self.record
        live_bytes, moved_bytes = record.live_bytes, record.moved_bytes
        updates.fetch_states(p)
        record.peak_bytes = record.live_bytes
        self._named(updates.owner(p), lambda: updates.update(p, gradient))
        own_bytes = record.peak_bytes - record.live_bytes
        states_bytes = record.live_bytes - live_bytes  # of those that stay, none but in the first
        # Each kernel's own; where one does it all, of which no FakeTensor tells, what it must move.
        moved = max(
            record.moved_bytes - moved_bytes, gradient.nbytes + 2 * (p.nbytes + states_bytes)
        )
        updated_bytes = record.live_bytes
        updates.store_states(p)
        updates.wait_states(p)
        return replace(
            before,
            peak_bytes=max(before.peak_bytes, own_bytes),
            moved_bytes=max(before.moved_bytes, moved),
            states_bytes=max(before.states_bytes, updated_bytes - record.live_bytes),
        )

    def _clip_gradients(self) -> None:
        """Clip; from the second time on as the first time, which depended on nothing that a step changes."""
        if self._clip is None:
            return
        if self._clipping is not None:
            self.record.repeat(*self._clipping)
            return
        start, live_bytes = len(self.record.allocations), self.record.live_bytes
        self._clip([p for p in self._parameters.values() if p.grad is not None])
        more_bytes = self.record.peak_bytes - live_bytes
        self._clipping = self.record.allocations_from(start), more_bytes

    def _replay(self, key: Hashable, update: Callable[[], None]) -> None:
        """Update, or count what an update of this key allocates: as the second did, for the first fills tables."""
        record = self.record
        if (known := self._replayed.get(key)) is not None:
            record.repeat(*known)
            return
        start, live_bytes, peak_bytes = (
            len(record.allocations),
            record.live_bytes,
            record.peak_bytes,
        )
        record.peak_bytes = live_bytes
        update()
        self._num_runs[key] += 1
        if self._num_runs[key] > 1 and record.live_bytes == live_bytes:
            more_bytes = record.peak_bytes - live_bytes
            self._replayed[key] = record.allocations_from(start), more_bytes
        record.peak_bytes = max(record.peak_bytes, peak_bytes)

    def change(self, change: Callable[[Optimizer], object]) -> None:
        """Change the copies."""
        for optimizer in self._optimizers:
            change(optimizer)

    @property
    def host_bytes(self) -> int:
        """Bytes of states that stay on the host."""
        return sum(getattr(each, "host_bytes", 0) for each in self._optimizers)

    def _step(self, optimizer: Optimizer) -> None:
        self._named(optimizer, partial(type(optimizer).step, optimizer))

    def _named(self, optimizer: Optimizer, update: Callable[[], object]) -> None:
        """Update, and name the optimizer if that fails."""
        try:
            update()
        except Exception as error:
            raise StepMemoryError(
                f"the memory that {type(optimizer).__name__} needs is not known: its step does not run on tensors "
                f"without data ({error}). Use another optimizer, or count its bytes in your script: "
                "fabric.strategy.count_caller(other_bytes=...)."
            ) from error

    def _copied(self, optimizer: Optimizer) -> Optimizer:
        """Copy an optimizer's class and settings, without state and hooks, over fake parameters."""
        kind = type(optimizer)
        copied = kind.__new__(kind)
        # Not `step`: a learning rate schedule replaces it on the instance.
        own = {k: v for k, v in optimizer.__dict__.items() if k != "step"}
        copied.__dict__.update({k: OrderedDict() if "hooks" in k else v for k, v in own.items()})
        copied.state = defaultdict(dict)
        if hasattr(copied, "replay"):  # one of ours
            vars(copied)["replay"] = self._replay
        copied.param_groups = [
            {**group, **self._choice(group), "params": [*map(self._parameter, group["params"])]}
            for group in optimizer.param_groups
        ]
        return copied

    def _choice(self, group: Mapping[str, Any]) -> dict[str, bool]:
        """Return the `foreach` that torch's optimizers choose by default (`_default_to_fused_or_foreach`)."""
        if group.get("foreach", False) is not None or group.get("fused"):
            return {}
        if group.get("differentiable"):
            return {"foreach": False}
        devices = {self._device_type or p.device.type for p in group["params"]}
        types = {type(p) for p in group["params"]}
        supported = _foreach_utils._get_foreach_kernels_supported_devices()
        at_once = devices <= set(supported) and types <= set(_foreach_supported_types)
        return {"foreach": at_once}

    def _parameter(self, parameter: Tensor) -> nn.Parameter:
        if id(parameter) not in self._parameters:
            fake = nn.Parameter(self._like(parameter), requires_grad=parameter.requires_grad)
            fake.grad = self._like(parameter) if parameter.requires_grad else None
            vars(fake).update(vars(parameter))  # which rows of which whole it is
            self._parameters[id(parameter)] = fake
        return self._parameters[id(parameter)]

    def _like(self, tensor: Tensor) -> Tensor:
        # On the planned device: by its type optimizers choose whether they update all parameters at once.
        device = self._device_type or tensor.device
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _only_on(planned: str) -> Callable[[int, str], int]:
    """Return an `allocated` that counts only the planned device: an optimizer on CUDA has step counters on the CPU."""

    def allocated(nbytes: int, device_type: str) -> int:
        if device_type == "cpu" and planned != "cpu":
            return 0
        return allocated_bytes(nbytes, planned)

    return allocated


class _UpdateRecord(AtenRecord):
    """Lets an update run on tensors without data: numbers read from them are 1, and writes in place do nothing."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return _one(args[0].dtype)
        result = None
        # Such as `_foreach_add_`, and `_fused_adamw_`, which has no meta kernel.
        if func._schema.returns or not func._schema.is_mutable:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        inside = max(_number_bytes(func, args), product_scratch(func, args, kwargs or {}, result))
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + inside)
        return result


def _number_bytes(func: Any, args: Sequence[Any]) -> int:
    """Return the bytes of a number on the CPU: it becomes a tensor of 8 bytes, and one in the other tensor's dtype."""
    name = func._overloadpacket.__name__.removeprefix("_foreach_").rstrip("_")
    if name not in ("add", "sub", "mul", "div", "bitwise_and") or len(args) < 2:
        return 0
    tensors, numbers = (a if isinstance(a, (list, tuple)) else [a] for a in args[:2])
    if isinstance(numbers[0], Tensor) or tensors[0].device.type != "cpu":
        return 0
    return torch.float64.itemsize + int(tensors[0].element_size())


def _one(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1
