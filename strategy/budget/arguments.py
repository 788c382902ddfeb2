"""Knows the arguments of a call, and which of their gradients backward uses where it makes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx
from torch import Tensor

from thunder_memsave.measure.layouts import contiguous, layout_of
from thunder_memsave.ops.added_gradients import is_watched
from thunder_memsave.ops.updated_parameters import Update
from thunder_memsave.planner.graph import StepMemory, StorageKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """The known facts about the arguments of a trace, by their names in it."""

    kinds: Mapping[str, StorageKind] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Parameters and buffers, and fake tensors in place of a batch."""
    unread_bytes: int = 0
    """Bytes of parameters and buffers of the module that the trace does not read."""
    not_updated: frozenset[str] = frozenset()
    """Names of the parameters that no optimizer updates in backward, where one does."""
    leaves_sums: bool = False
    """Whether autograd adds gradients to those of earlier micro-batches: a CUDA graph cannot, whose addresses stay."""

    @property
    def on_host(self) -> frozenset[str]:
        """Names of the weights that are on the host."""
        return frozenset(name for name, kind in self.kinds.items() if kind == "host")


def adding(memory: StepMemory, arguments: Arguments) -> frozenset[str]:
    """Return the names of the parameters whose gradients a backward of this step can add to earlier ones."""
    if not memory.gradient_bytes or arguments.leaves_sums:
        return frozenset()
    parameters = {name for name, kind in arguments.kinds.items() if kind == "parameter"}
    watched = {name for name, tensor in arguments.tensors.items() if is_watched(tensor)}
    return frozenset(parameters - watched)


def updating(memory: StepMemory, trace: TraceCtx, arguments: Arguments) -> Mapping[str, Update]:
    """Return what each update takes that a backward of this step can make itself, by the parameter's name."""
    known = {(u.shape, u.dtype): u for u in memory.updates}
    # What backward reads of a tensor in the same memory is no reader of the parameter to the trace.
    memories = Counter(t.untyped_storage()._cdata for t in arguments.tensors.values())
    found: dict[str, Update] = {}
    for proxy in trace.args if known and not arguments.leaves_sums else ():
        if not isinstance(proxy, TensorProxy) or arguments.kinds.get(proxy.name) != "parameter":
            continue
        tensor = arguments.tensors.get(proxy.name)
        if proxy.name in arguments.not_updated:
            continue
        if tensor is not None and (
            not tensor.requires_grad
            or is_watched(tensor)
            or memories[tensor.untyped_storage()._cdata] > 1
        ):
            continue
        layout = contiguous(proxy) if tensor is None else layout_of(tensor)
        update = known.get((layout.shape, str(layout.dtype)))
        if update is not None:
            found[proxy.name] = Update(
                update.peak_bytes, update.moved_bytes, layout.stride, update.states_bytes
            )
    return found
