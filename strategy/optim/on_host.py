"""Lets an optimizer's states stay on the host: each step copies them in, updates, and copies them out, piece by piece.

In: an optimizer of PyTorch, or of ours, whose update of a parameter reads nothing of the others. Out: the same updates,
with the same bits. A piece is some parameters whose states take about `PIECE_BYTES` on the device, or one that takes
more. While a piece is updated, the states of the next one are copied in, and those of the one before are copied out: so
the device holds the states of at most three pieces, for the time of the update. Those of the first piece may come
before, beside the norm of all gradients (`begin_step`). Between steps it holds numbers alone,
such as the count of steps, and states of less than `LEAST_BYTES`; and those of all parameters of some shapes, if only
others are asked to go.

Rajbhandari et al. 2021, ZeRO-Infinity (arXiv 2104.07857), keeps states there and updates them on the CPU, which this
does not: the kernels are the device's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from thunder_memsave.ops.host_copies.buffers import bytes_of, is_dense
from thunder_memsave.ops.host_copies.engine import Host, host_of
from thunder_memsave.optim.by_rows import ByRows
from thunder_memsave.optim.changed_class import change_class
from thunder_memsave.optim.loading import Held
from thunder_memsave.optim.one_by_one import numbers_kept, only, refuse_updates_at_once

PIECE_BYTES = 128 * 2**20
"""Bytes of states that are on the device at once, in each of three pieces, unless a single parameter has more."""

LEAST_BYTES = 4 * 2**10
"""States of fewer bytes stay on the device: a copy takes longer to begin than to make."""

Kind = tuple[tuple[int, ...], str]
"""Shape and dtype of a parameter. Layers are alike, so a part of all kinds is a part of each layer."""


class StatesOnHost(Optimizer):
    """The part of an optimizer's class that copies its states; `states_on_host` makes such a class of another one."""

    kinds_on_host: frozenset[Kind] | None = None
    """The kinds of parameters whose states are on the host; None: all."""

    _updates: Callable[[Optimizer], Any]
    """The step of the other class, without its hooks."""

    @property
    def host_bytes(self) -> int:
        """Bytes of states on the host, also of an optimizer without data."""
        values = (value for state in self.state.values() for value in state.values())
        return sum(v.nbytes for v in values if isinstance(v, _Absent) or _lease_of(v) is not None)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has, which keeps the states of the same parameters on the host."""
        return {**super().__getstate__(), "kinds_on_host": self.kinds_on_host}

    def device_of_states(self, p: Tensor) -> torch.device:
        """Return where the states of a parameter are between steps."""
        return torch.device("cpu") if goes_out(self, p) else p.device

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states onto the host; otherwise as the other class does."""
        _forget(self)
        hooks = [self.register_load_state_dict_post_hook(_moved_out)]
        if not isinstance(self, ByRows):  # which keeps what it loads from being moved by itself
            hooks.append(self.register_load_state_dict_pre_hook(_held))
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict when all copies to the host have ended."""
        settle(self)
        return super().state_dict()

    @torch.no_grad()
    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with numbers_kept(self):
            self._update_pieces(_pieces(self))
        return loss

    def _update_pieces(self, pieces: Sequence[Sequence[Tensor]]) -> None:
        coming: list[Copy] = []
        ahead: list[Copy] = []
        leaving: list[Copy] = []
        try:
            first = pieces[0] if pieces else ()
            if not _take_begun(self, first, ahead):
                begin_in(self, first, ahead)
            for piece, following in zip_longest(pieces, pieces[1:], fillvalue=()):
                coming, ahead = ahead, coming
                begin_in(self, following, ahead)
                end(coming)
                with only(self, piece):
                    type(self)._updates(self)
                end(leaving)
                begin_out(self, piece, leaving)
        finally:  # also of a step that failed: memory is not to be freed while something copies
            for begun in (coming, ahead, leaving):
                end(begun)


def states_on_host(optimizer: Optimizer, kinds: Collection[Kind] | None = None) -> None:
    """Let an optimizer's states stay on the host from now on; it is changed in place, and states that it has move.

    Args:
        optimizer: Of any class.
        kinds: Those of the parameters whose states go there, beside those that are there; None: all.

    Raises:
        ConfigError: it is not known that it updates each parameter by itself.
    """
    if not isinstance(optimizer, StatesOnHost):
        refuse_updates_at_once(
            optimizer,
            does="keeps an optimizer's states on the host",
            key="memory.offload",
            instead="'none' or 'activations'",
        )
        change_class(optimizer, _class_on_host(type(optimizer)))
        assert isinstance(optimizer, StatesOnHost)
        optimizer.kinds_on_host = frozenset()
    before = optimizer.kinds_on_host
    optimizer.kinds_on_host = None if kinds is None or before is None else before | set(kinds)
    move_out(optimizer)


def begin_step(optimizer: Optimizer) -> None:
    """Begin to copy in the states that the next step of an optimizer reads first, beside what runs until then.

    They stay until that step, or until `forget_begun`. It has no effect where none are on the host, or they come
    already.
    """
    if isinstance(optimizer, StatesOnHost) and optimizer not in _begun:
        piece = next(iter(_pieces(optimizer)), [])
        _begun[optimizer] = piece, []
        begin_in(optimizer, piece, _begun[optimizer][1])


def forget_begun() -> None:
    """Free what `begin_step` copied in for steps that were not taken."""
    for optimizer in list(_begun):
        _forget(optimizer)


def kind_of(p: Tensor) -> Kind:
    """Return the kind of a parameter."""
    return tuple(p.shape), str(p.dtype)


def num_of_kinds(optimizers: Iterable[Optimizer]) -> dict[Kind, int]:
    """Return how many trained parameters of each kind have states that are not asked to go to the host yet.

    Those of fewer than `LEAST_BYTES` are left out, as their states stay.
    """
    found: dict[Kind, int] = {}
    for optimizer in optimizers:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            is_there = isinstance(optimizer, StatesOnHost) and goes_out(optimizer, p)
            if p.requires_grad and not is_there and p.nbytes >= LEAST_BYTES:
                found[kind_of(p)] = found.get(kind_of(p), 0) + 1
    return found


def goes_out(optimizer: StatesOnHost, p: Tensor) -> bool:
    """Tell whether the states of a parameter are on the host between steps."""
    return optimizer.kinds_on_host is None or kind_of(p) in optimizer.kinds_on_host


def move_out(optimizer: StatesOnHost) -> None:
    """Copy all states to the host that are not there, and wait for it."""
    leaving: list[Copy] = []
    begin_out(optimizer, [p for p in optimizer.state if isinstance(p, Tensor)], leaving)
    end(leaving)


def class_of(optimizer: Optimizer) -> type[Optimizer]:
    """Return an optimizer's class, as it is without states on the host."""
    kind = type(optimizer)
    return kind.__mro__[2] if issubclass(kind, StatesOnHost) else kind


def settle(optimizer: Optimizer) -> None:
    """Wait until the host has what the last step copied to it."""
    if isinstance(optimizer, StatesOnHost):
        for place in {p.device for p in optimizer.state if isinstance(p, Tensor)}:
            if place.type == "cuda":
                torch.cuda.synchronize(place)


_leases = WeakTensorKeyDictionary()
"""The bytes of the buffers that tensors are in; an attribute of theirs would be written to files, and copied."""

_begun = WeakKeyDictionary[Optimizer, tuple[list[Tensor], list["Copy"]]]()
"""The first piece of a step that is to come, with its copies."""

_classes: dict[type[Optimizer], type[Optimizer]] = {}


def _class_on_host(kind: type[Optimizer]) -> type[Optimizer]:
    """Return the class whose states are on the host, made once."""
    if kind not in _classes:
        _classes[kind] = _made_on_host(kind)
    return _classes[kind]


def _made_on_host(kind: type[Optimizer]) -> type[Optimizer]:
    # The class hooks its step when the first optimizer is made of it; hooks are for whole steps.
    updates = getattr(kind.step, "__wrapped__", kind.step)
    step = Optimizer.profile_hook_step(StatesOnHost._step)
    step.hooked = True  # type: ignore[attr-defined]
    body = {"step": step, "_updates": staticmethod(updates), "__module__": kind.__module__}
    return type(kind.__name__, (StatesOnHost, kind), body)


@dataclass(frozen=True, slots=True)
class _Absent:
    """Stands for a state on the host where tensors have no data."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy that has begun."""

    wait: Callable[[], None]
    state: dict[str, Any]
    key: str
    result: Any
    source: Any
    version: int
    """The number of writes to the source before the copy began."""

    @property
    def is_current(self) -> bool:
        """Whether what it copies has not changed, by hand, since it began."""
        return self.state.get(self.key) is self.source and _version_of(self.source) == self.version

    def end(self) -> None:
        """Wait for it, and put its result into the optimizer's state."""
        self.wait()
        self.state[self.key] = self.result


def _take_begun(optimizer: Optimizer, piece: Sequence[Tensor], begun: list[Copy]) -> bool:
    """Take the copies of a step's first piece, if they are those that have begun."""
    if optimizer not in _begun:
        return False
    parameters, copies = _begun[optimizer]
    is_same = list(map(id, parameters)) == list(map(id, piece))  # others may have gradients by now
    if not is_same or not all(copy.is_current for copy in copies):
        _forget(optimizer)
        return False
    begun += copies
    del _begun[optimizer]
    return True


def _forget(optimizer: Optimizer) -> None:
    if optimizer in _begun:
        _, copies = _begun.pop(optimizer)
        drop(copies)


def _pieces(optimizer: Optimizer) -> list[list[Tensor]]:
    """Cut the parameters with gradients into pieces, in the optimizer's order."""
    pieces: list[list[Tensor]] = []
    room = 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is None:
                continue
            size = _state_bytes(optimizer, p)
            if size > room or not pieces:
                pieces.append([])
                room = PIECE_BYTES
            pieces[-1].append(p)
            room -= size
    return pieces


def _state_bytes(optimizer: Optimizer, p: Tensor) -> int:
    """Return the bytes of a parameter's states; before the first step, of two in its dtype."""
    state = optimizer.state.get(p)
    if not state:
        return 2 * p.numel() * p.element_size()
    return sum(v.nbytes for v in state.values() if isinstance(v, Tensor | _Absent))


def end(copies: list[Copy]) -> None:
    """Wait for copies, and forget them."""
    while copies:
        copies.pop().end()


def drop(copies: list[Copy]) -> None:
    """Wait for copies, and forget what they made."""
    for copy in copies:
        copy.wait()  # until then it holds the memory that is copied to
    copies.clear()


def begin_in(optimizer: Optimizer, piece: Sequence[Tensor], begun: list[Copy]) -> None:
    """Begin to copy the states of parameters to their device."""
    for p in piece:
        state = optimizer.state.get(p, {})
        for key, value in state.items():
            lease = _lease_of(value)
            if lease is None and not isinstance(value, _Absent):
                continue
            stride = value.stride if isinstance(value, _Absent) else value.stride()
            made = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=p.device)
            wait = _at_once
            if lease is not None:
                wait = host_of(p.device).engine.begin(lease, bytes_of(made), "in")
            begun.append(Copy(wait, state, key, made, value, _version_of(value)))


def begin_out(optimizer: StatesOnHost, piece: Sequence[Tensor], begun: list[Copy]) -> None:
    """Begin to copy the states of parameters to the host."""
    for p in filter(partial(goes_out, optimizer), piece):
        state = optimizer.state.get(p, {})
        for key, value in state.items():
            if not _is_to_go(value):
                continue
            if isinstance(value, FakeTensor):
                absent = _Absent(value.shape, value.stride(), value.dtype)
                begun.append(Copy(_at_once, state, key, absent, value, 0))
                continue
            host = host_of(p.device)
            kept = _in_buffer(value, host)
            wait = host.engine.begin(bytes_of(value), _leases[kept], "out")
            begun.append(Copy(wait, state, key, kept, value, 0))


def _is_to_go(value: Any) -> bool:
    """Tell whether a value of a state is one that stays on the host, and is not there yet."""
    if not isinstance(value, Tensor) or _lease_of(value) is not None:
        return False
    return value.nbytes >= LEAST_BYTES and is_dense(value)


def _in_buffer(value: Tensor, host: Host) -> Tensor:
    """Return a tensor like another one, in a buffer of the host."""
    lease = host.states.take(value.nbytes)
    made = lease.view(value.dtype).as_strided(value.shape, value.stride())
    _leases[made] = lease
    return made


def _lease_of(value: Any) -> Tensor | None:
    """Return the buffer's bytes of a state on the host; None: it is not there, or a copy of it."""
    return _leases.get(value) if isinstance(value, Tensor) else None


def _version_of(value: Any) -> int:
    """Return a number that grows with each write to a tensor; 0 of what has none."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _at_once() -> None:
    """Wait for nothing."""


def _held(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Keep PyTorch from moving states to the device of their parameter, where they are to be on the host."""
    assert isinstance(optimizer, StatesOnHost)
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    pairs = zip(numbers, parameters, strict=False)  # PyTorch compares their lengths
    out = {number for number, p in pairs if goes_out(optimizer, p)}
    state = {
        number: {k: Held(v) if k != "step" and _is_to_go(v) else v for k, v in values.items()}
        if isinstance(values, Mapping) and number in out
        else values
        for number, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _moved_out(optimizer: Optimizer) -> None:
    """Put what was loaded into buffers of the host."""
    assert isinstance(optimizer, StatesOnHost)
    for p, state in optimizer.state.items():
        if not isinstance(p, Tensor) or not goes_out(optimizer, p):
            continue
        for key, value in state.items():
            value = value.value if isinstance(value, Held) else value
            if key != "step" and _is_to_go(value):
                kept = _in_buffer(value, host_of(p.device))
                kept.copy_(value)
                value = kept
            state[key] = value
