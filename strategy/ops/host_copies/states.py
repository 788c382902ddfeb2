"""The operations of a backward that copy an optimizer's states to the device for the update of a weight, and back.

    s = fetch_states("t_weight", 8192, "cuda:0")        # begins the copies to the device, in memory of their own
    ...
    update_parameter(t8, "t_weight", ..., s)            # waits for them
    o = store_states(s, "t_weight")                     # begins the copies back to the host
    ...
    wait_states(o, "t_weight")                          # they have ended: the memory is freed

The states themselves are the optimizer's; `s` stands for their memory. Where it turns out that backward does not update
the weight, nothing is written, and the memory is freed at once.
"""

from __future__ import annotations

from thunder.core import prims
from thunder.core.symbol import BoundSymbol
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor

from thunder_memsave.ops.running_backward import Updates, running_backward
from thunder_memsave.planner.offload.copies import FETCH_STATES, STORE_STATES, WAIT_STATES

_executor = OperatorExecutor("thunder_memsave_host_states", version="0")
register_executor(_executor)


def _fetch(name: str, nbytes: int, place: str) -> None:
    if (found := _updated(name)) is not None:
        updates, parameter = found
        updates.fetch_states(parameter)


def _store(states: None, name: str) -> None:
    if (found := _updated(name)) is not None:
        updates, parameter = found
        updates.store_states(parameter)


def _wait(stored: None, name: str) -> None:
    if (found := _updated(name)) is not None:
        updates, parameter = found
        updates.wait_states(parameter)


def _updated(name: str) -> tuple[Updates, Tensor] | None:
    """Return what updates a parameter in the backward that runs, and the parameter; None: nothing does."""
    backward = running_backward()
    parameter = backward.parameters.get(name)
    if backward.updates is None or parameter is None:
        return None
    return backward.updates, parameter


def _refuse(*_: object) -> None:
    raise AssertionError("copies are bound with the proxies that they make")


_KEPT = [prims.OpTags.DONT_DCE]
fetch_states = _executor.register_operator(FETCH_STATES, meta=_refuse, fn=_fetch, tags=_KEPT)
store_states = _executor.register_operator(STORE_STATES, meta=_refuse, fn=_store, tags=_KEPT)
wait_states = _executor.register_operator(WAIT_STATES, meta=_refuse, fn=_wait, tags=_KEPT)


def copies_states(bsym: BoundSymbol) -> bool:
    """Return whether a symbol begins copies of states, or waits for them."""
    return bsym.sym.id in (fetch_states.id, store_states.id, wait_states.id)


def waits_for_states(bsym: BoundSymbol) -> bool:
    """Return whether a symbol waits for the copies of states to the host."""
    return bool(bsym.sym.id == wait_states.id)
