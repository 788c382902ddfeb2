"""Decides whether a compiled call gets graphs, and says so in one line of the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx

from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.cuda_graphs.graphed_call import GraphedCall
from thunder_memsave.compiler.cuda_graphs.refusals import reasons
from thunder_memsave.compiler.cuda_graphs.runtime import Runtime
from thunder_memsave.errors import CompileError
from thunder_memsave.ops.host_copies.weights import device_of
from thunder_memsave.planner.launches import Launches, launches_of
from thunder_memsave.planner.workspaces import MOST_BYTES

_OTHER_SHAPE = "another shape of its batch came, for which there is no memory of its own; pad or pack to one shape"

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class CudaGraphs:
    """The graphs of one module: at most one of its compiled calls has any."""

    setting: Literal["auto"] | bool
    runtime: Runtime | None
    """None: the device has no graphs."""
    planner: MemoryPlanner | None
    call: GraphedCall | None = None

    @property
    def is_required(self) -> bool:
        """Whether a call that can have no graphs is refused."""
        return self.setting is True

    def choose(
        self,
        forward: TraceCtx,
        backward: TraceCtx,
        *,
        keeps_gradients: bool,
        fixed: Iterable[str],
        name: str,
    ) -> GraphedCall | None:
        """Decide about a call that was just planned.

        Args:
            forward: The trace that runs.
            backward: Its backward.
            keeps_gradients: Whether there is another backward, that keeps whole gradients.
            fixed: Names of the arguments that stay where they are.
            name: Of the call, for messages.

        Raises:
            CompileError: graphs were asked for, and the call cannot have any.
        """
        if self.runtime is None or self.setting is False:
            return None
        if self.call is not None:
            self.call.drop(_OTHER_SHAPE)
            return None
        staying, launches = set(fixed), self._launches()
        found = reasons(
            forward,
            backward,
            fixed=staying,
            keeps_gradients=keeps_gradients,
            device_type=self.runtime.device_type,
        )
        why = "; ".join(found) or self._why_not_worth_it(launches)
        if why := why or self._why_no_room(forward, backward, staying):
            self._without(name, why)
            return None
        _log.info("CUDA graphs of %s: %s", name, launches or "asked for")
        is_fixed = [a.name in staying for a in forward.args]
        self.call = GraphedCall(
            self.runtime, name=name, is_fixed=is_fixed, is_required=self.is_required
        )
        return self.call

    def _without(self, name: str, why: str) -> None:
        if self.is_required:
            raise CompileError(
                f"strategy.cuda_graphs is true, but {name} can be no CUDA graph: {why}. Set it to auto or false."
            )
        _log.info("no CUDA graphs of %s: %s", name, why)

    def _launches(self) -> Launches | None:
        """Count the launches of the plan; None without one."""
        if self.planner is None or not self.planner.calls:
            return None
        ops = [step.op for step in self.planner.calls[-1].program.steps]
        return launches_of(ops, self.planner.device)

    def _why_not_worth_it(self, launches: Launches | None) -> str | None:
        """Return why `auto` makes none."""
        if self.is_required:
            return None
        if launches is None:
            return "nothing is planned, so nothing says whether the host is slower than the device"
        return None if launches.bound else str(launches)

    def _why_no_room(
        self, forward: TraceCtx, backward: TraceCtx, fixed: Collection[str]
    ) -> str | None:
        """Count the bytes of graphs in the plan, or return why there are too many."""
        if self.planner is None or not self.planner.calls:
            return None
        return self.planner.hold_pool(_bytes_of_graphs(forward, backward, fixed))


def _bytes_of_graphs(forward: TraceCtx, backward: TraceCtx, fixed: Collection[str]) -> int:
    """Return the bytes that are held besides what the plan counts: buffers, and what the pool holds all the time."""
    batch = sum(_nbytes(a) for a in forward.args if a.name not in fixed)
    # Outputs stay in the pool beside the caller's copies, and have a buffer for their gradients.
    outputs = 2 * sum(map(_nbytes, forward.output[0]["output"]))
    gradients = sum(map(_nbytes, backward.output))
    # cuBLAS has workspaces for each stream that it is called on, and captures have a stream of their own.
    return batch + outputs + gradients + MOST_BYTES


def _nbytes(value: Any) -> int:
    return value.numel * value.dtype.bytes if isinstance(value, TensorProxy) else 0


def graphs_of(
    setting: Literal["auto"] | bool,
    tensors: Sequence[torch.Tensor],
    planner: MemoryPlanner | None,
    *,
    runtime_of: Callable[[torch.device], Runtime | None],
) -> CudaGraphs:
    """Make the graphs of a module by the device of its tensors.

    Raises:
        CompileError: graphs were asked for, and the device has none.
    """
    device = device_of(tensors)
    runtime = None if setting is False else runtime_of(device)
    if setting is True and runtime is None:
        raise CompileError(
            f"strategy.cuda_graphs is true, but the model is on {device.type}, which has no CUDA graphs; set it to "
            "auto or false."
        )
    return CudaGraphs(setting, runtime, planner)
