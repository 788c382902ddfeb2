"""Runs a module's methods as compiled graphs; each call that no earlier capture fits is compiled (`compile_call.py`).

Thunder's own driver (`thunder.jit`) interprets the Python code of the model, checks every parameter in a prologue on
each call and keeps parameters of its own. None of that is needed when the graph comes from Dynamo with its guards, so
Thunder's passes are called directly (docs/decisions/0003).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import nn

from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compile_call import CallCompiler, Compiled
from thunder_memsave.compiler.cuda_graphs import torch_runtime
from thunder_memsave.compiler.cuda_graphs.choose import CudaGraphs, graphs_of
from thunder_memsave.config import CompileConfig
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.fp8.compute.linears import Fp8Linears
from thunder_memsave.frontend.calls import Call
from thunder_memsave.ops.accumulation import UnreducedGradients
from thunder_memsave.optim.in_backward import UpdatesInBackward

_MANY_CAPTURES = 8

_log = logging.getLogger(__name__)


class CompiledModule(nn.Module):
    """Runs the methods of a module as compiled graphs; the parameters stay where they are.

    The first call of a method captures it; so does every call that no earlier capture is valid for (another shape,
    `train`/`eval`, a changed attribute, ...). Padding or packing batches to one shape keeps it at one capture.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        config: CompileConfig | None = None,
        data_parallel: DataParallel | None = None,
        planner: MemoryPlanner | None = None,
        fp8: Fp8Linears | None = None,
        updates: UpdatesInBackward | None = None,
    ) -> None:
        """Compile nothing yet.

        Args:
            module: Whose methods are compiled when they are called.
            config: How.
            data_parallel: The ranks that share the parameters; None on one device.
            planner: Decides what backward keeps; None: all that it reads.
            fp8: The linears of `module` that compute in fp8.
            updates: Updates parameters in backward; None: nothing does.
        """
        super().__init__()
        self.module = module
        self._config = config if config is not None else CompileConfig()
        self._data_parallel = data_parallel
        self.planner = planner
        self.fp8 = fp8
        self._updates = updates
        self._compiled: dict[str, list[Compiled]] = {}
        self._also: dict[str, list[Compiled]] = {}
        """The same graphs, for calls after one that changed what its own guards read."""
        self.unreduced = UnreducedGradients(data_parallel)
        self.graphs: CudaGraphs | None = None
        """Known from the first call on, when the module is where it stays."""

    @property
    def captures(self) -> Sequence[Compiled]:
        """Everything compiled so far, in order, with the reason of each."""
        return tuple(c for compiled in self._compiled.values() for c in compiled)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.call_method("forward", *args, **kwargs)

    def call_method(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the bound method `name` of the module through a capture of its own.

        Raises:
            CaptureError: it cannot be captured as one graph.
            CompileError: it cannot be compiled to what eager PyTorch computes.
        """
        call = Call.of(self._target(name), args, kwargs)
        known = self._find(name, call)
        if known is not None:
            return known.run(*args, **kwargs)
        compiled = self._compile(name, call)
        result = compiled.run(*args, **kwargs)
        changed = compiled.after_its_call(self.module, call, is_of_mode=self.fp8 is not None)
        if changed is not None:
            run = changed.callable(compiled.run_graph)
            self._also.setdefault(name, []).insert(0, replace(compiled, capture=changed, run=run))
        return result

    def _target(self, name: str) -> Any:
        """Return what is called: with the module's hooks for `forward`."""
        return self.module if name == "forward" else getattr(self.module, name)

    def _graphs(self) -> CudaGraphs:
        if self.graphs is None:
            self.graphs = graphs_of(
                self._config.cuda_graphs,
                list(self.module.parameters()),
                self.planner,
                runtime_of=torch_runtime.runtime_of,
            )
        return self.graphs

    def _find(self, name: str, call: Call) -> Compiled | None:
        known = chain(self._compiled.get(name, ()), self._also.get(name, ()))
        return next((c for c in known if c.capture.matches(call)), None)

    def _compile(self, name: str, call: Call) -> Compiled:
        known = self._compiled.setdefault(name, [])
        reason = known[0].capture.why_not(call) if known else "first call"
        start = time.perf_counter()
        compiler = CallCompiler(
            config=self._config,
            data_parallel=self._data_parallel,
            unreduced=self.unreduced,
            planner=self.planner,
            fp8=self.fp8,
            graphs=self._graphs(),
            updates=self._updates,
        )
        compiled = compiler.compile(self.module, call, name=name, reason=reason)
        known.insert(0, compiled)
        _log.info(
            "capture %d of %s.%s: %s (%.1f s)",
            len(known),
            type(self.module).__name__,
            name,
            reason,
            time.perf_counter() - start,
        )
        if len(known) == _MANY_CAPTURES:
            _log.warning(
                "%s.%s was captured %d times; each takes seconds. The last reason: %s. Pad or pack batches to one "
                "shape, and keep values that change every step in tensors.",
                type(self.module).__name__,
                name,
                len(known),
                reason,
            )
        return compiled
