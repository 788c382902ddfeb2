"""Takes back what the first run of a module in pieces has changed, before it runs otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_NOT_ATTRIBUTES = ("_buffers", "_parameters", "_modules")
_CONTAINERS = (list, dict, set)


@dataclass(frozen=True)
class FirstState:
    """A copy of what a run changes besides results: generators of random numbers, buffers, attributes of modules."""

    generators: tuple[Tensor, Sequence[Tensor]]
    buffers: Sequence[tuple[nn.Module, Mapping[str, tuple[Tensor | None, Tensor | None]]]]
    """For each module, its buffers by their names: the tensors, and copies."""
    attributes: Sequence[tuple[nn.Module, Mapping[str, tuple[Any, Any]]]]
    """For each module, what it holds by name: the object, and a copy if it is a list, a dictionary or a set."""

    @classmethod
    def of(cls, module: nn.Module) -> FirstState:
        """Copy the state."""
        on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        modules = list(module.modules())
        buffers = [
            (m, {n: (b, None if b is None else b.detach().clone()) for n, b in m._buffers.items()})
            for m in modules
        ]
        attributes = [(m, {n: (v, _copied(v)) for n, v in _own(m).items()}) for m in modules]
        return cls((torch.get_rng_state(), on_cuda), buffers, attributes)

    def restore(self) -> None:
        """Give it back."""
        on_cpu, on_cuda = self.generators
        torch.set_rng_state(on_cpu)
        if on_cuda:
            torch.cuda.set_rng_state_all(on_cuda)
        with torch.no_grad():
            for owner, buffers in self.buffers:
                owner._buffers.update({name: buffer for name, (buffer, _) in buffers.items()})
                for buffer, copied in buffers.values():
                    if buffer is not None and copied is not None:
                        buffer.copy_(copied)
        for owner, attributes in self.attributes:
            _restore(owner, attributes)


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _NOT_ATTRIBUTES}


def _copied(value: Any) -> Any:
    return value.copy() if type(value) in _CONTAINERS else None


def _restore(module: nn.Module, attributes: Mapping[str, tuple[Any, Any]]) -> None:
    for name in _own(module).keys() - attributes.keys():
        del vars(module)[name]
    for name, (value, copied) in attributes.items():
        vars(module)[name] = value
        if copied is not None:
            value.clear()
            value.extend(copied) if isinstance(value, list) else value.update(copied)
