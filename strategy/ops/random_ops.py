"""Random operations that draw once in forward and reproduce the same numbers in backward.

`<name>_drawing` replaces the operation in forward, and also returns the generator's state from before;
`<name>_replaying` reproduces the numbers from that state, and leaves the generator as it is:

    (t1, state) = uniform_cpu_drawing((2, 4), 0.0, 1.0, device=cpu, dtype=float32)
    ...
    bw_t1 = uniform_cpu_replaying(state, (2, 4), 0.0, 1.0, device=cpu, dtype=float32)

A state is a uint8 tensor on the CPU: 16 bytes (seed and offset) for CUDA, 5056 for the CPU's Mersenne twister. It is
read without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from thunder.core import devices, dtypes
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor
from torch._guards import detect_fake_mode

_NUM_STATE_BYTES = {devices.DeviceType.CPU: 5056, devices.DeviceType.CUDA: 16}

_executor = OperatorExecutor("thunder_memsave_random", version="0")
register_executor(_executor)


def draws_random_numbers(bsym: BoundSymbol) -> bool:
    """Whether running this symbol of an executed trace moves a generator on."""
    return OpTags.RANDOM_OP in bsym.tags


def is_replayable(bsym: BoundSymbol) -> bool:
    """Return whether this random symbol's function and generator are known, so that `replay` can pair it."""
    has_its_own = any(isinstance(a, torch.Generator) for a in bsym.flat_args)
    return not has_its_own and _function(bsym) is not None and _device(bsym) is not None


@dataclass(frozen=True, slots=True)
class Replay:
    """A random symbol as a pair of a drawing and a replaying one."""

    drawing: BoundSymbol
    """Replaces the symbol in forward: returns its results under the same names, and the generator's state."""
    state: TensorProxy

    def replaying(self, bsym: BoundSymbol) -> BoundSymbol:
        """Return the symbol that replays the numbers under the names of the results of `bsym`, a clone."""
        _, symbol = _pair(bsym)
        return symbol.bind(self.state, *bsym.args, output=bsym.output, **bsym.kwargs)


def replay(bsym: BoundSymbol) -> Replay:
    """Make the pair for a replayable random symbol, in the current trace."""
    symbol, _ = _pair(bsym)
    state = _state_proxy(_device(bsym))
    outputs = bsym.output if isinstance(bsym.output, tuple) else (bsym.output,)
    drawing = symbol.bind(*bsym.args, output=(*outputs, state), **bsym.kwargs)
    return Replay(drawing.from_bsym(tags=set(bsym.tags)), state)


_pairs: dict[tuple[str, torch.device, int, int], tuple[Symbol, Symbol]] = {}
"""Pairs by what they run; they keep the functions alive, so that no other function gets the same id."""


def _pair(bsym: BoundSymbol) -> tuple[Symbol, Symbol]:
    """Return the drawing and the replaying operator of this symbol; each is registered once."""
    function, device = _function(bsym), devices.to_torch_device(_device(bsym))
    assert function is not None
    key = (bsym.sym.name, device, id(function), id(bsym.sym.meta))
    if key not in _pairs:
        # No other function has this name in the same trace, and the same one has it in every process.
        name = f"{bsym.sym.name}_{str(device).replace(':', '_')}"
        _pairs[key] = (
            _executor.register_operator(
                f"{name}_drawing", meta=_drawing_meta(bsym.sym), fn=_drawing(function, device)
            ),
            _executor.register_operator(
                f"{name}_replaying", meta=_replaying_meta(bsym.sym), fn=_replaying(function, device)
            ),
        )
    return _pairs[key]


def _function(bsym: BoundSymbol) -> Callable[..., Any] | None:
    """Return the function that the symbol runs; None if its Python code is generated in another way."""
    return (bsym._call_ctx or {}).get(bsym.sym.name)


def _device(bsym: BoundSymbol) -> devices.Device | None:
    """Return the generator's device, which is that of the results; None if there is no single known one."""
    found = {o.device for o in bsym.flat_proxy_outs if isinstance(o, TensorProxy)}
    (device,) = found if len(found) == 1 else (None,)
    return device if device and device.devicetype in _NUM_STATE_BYTES else None


def _state_proxy(device: devices.Device | None) -> TensorProxy:
    assert device is not None
    num_bytes = _NUM_STATE_BYTES[device.devicetype]
    return TensorProxy(shape=(num_bytes,), device=devices.cpu, dtype=dtypes.uint8)


def _drawing_meta(symbol: Symbol) -> Callable[..., Any]:
    def meta(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        outputs = symbol.meta(*args, **kwargs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        device = next(o.device for o in outputs if isinstance(o, TensorProxy))
        return (*outputs, _state_proxy(device))

    return meta


def _replaying_meta(symbol: Symbol) -> Callable[..., Any]:
    return lambda _state, *args, **kwargs: symbol.meta(*args, **kwargs)


def _drawing(function: Callable[..., Any], device: torch.device) -> Callable[..., tuple[Any, ...]]:
    def draw(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        state = _state(device)
        outputs = function(*args, **kwargs)
        return (*(outputs if isinstance(outputs, tuple) else (outputs,)), state)

    return draw


def _replaying(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    def run(state: Tensor, *args: Any, **kwargs: Any) -> Any:
        with _generator_at(state, device):
            return function(*args, **kwargs)

    return run


def _state(device: torch.device) -> Tensor:
    if _computes_nothing(device):
        kind = devices.DeviceType.CUDA if device.type == "cuda" else devices.DeviceType.CPU
        return torch.empty(_NUM_STATE_BYTES[kind], dtype=torch.uint8)
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def _generator_at(state: Tensor, device: torch.device) -> Iterator[None]:
    """Set the device's default generator to `state` inside, and restore it afterwards."""
    before = _state(device)
    if _computes_nothing(device):
        yield
        return
    _set_state(state, device)
    try:
        yield
    finally:
        _set_state(before, device)


def _computes_nothing(device: torch.device) -> bool:
    """Return whether only shapes are computed, as for a plan; the device need not exist then."""
    return device.type == "meta" or detect_fake_mode() is not None


def _set_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
