"""Makes proxies of what a graph reads beside its own values: inputs, and tensors that it holds itself."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from thunder.common import CompileData
from thunder.core import devices, dtypes
from thunder.core.proxies import DistParallelType, TensorProxy
from torch import Tensor, fx

from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.frontend.capture import Capture, GraphInput
from thunder_memsave.frontend.fp8_linears import LinearNodes
from thunder_memsave.frontend.modes import differentiated
from thunder_memsave.ops.unshard import unshard
from thunder_memsave.sharding.sharded_parameter import is_sharded, unquantized_dtype


@dataclass(slots=True)
class LazyInput:
    """A parameter whose full value is asked for at its first use, not at the start of the forward."""

    proxy: TensorProxy
    graph_input: GraphInput
    value: TensorProxy | None = field(default=None)
    weight_itself: TensorProxy | None = field(default=None)
    """The dequantised weight, if an operation other than an fp8 linear reads it."""


class GraphInputs:
    """Those of one capture."""

    def __init__(
        self,
        capture: Capture,
        compile_data: CompileData,
        data_parallel: DataParallel | None,
        target: torch.device | None,
        fp8: LinearNodes | None,
    ) -> None:
        """Make no proxy yet; the arguments are those of `lowering.lower`."""
        self._capture, self._compile_data = capture, compile_data
        self._data_parallel, self._target, self._fp8 = data_parallel, target, fp8
        self._constants: dict[int, tuple[Tensor, TensorProxy]] = {}

    def proxies(self) -> list[LazyInput]:
        """Make those of the inputs, in their order."""
        return [self._proxy_of(i) for i in self._capture.inputs]

    def constants(self) -> list[tuple[Tensor, TensorProxy]]:
        """Make those of the tensors that the graph holds itself, in the order of the graph."""
        for graph in _graphs(self._capture.graph):
            for node in graph.graph.find_nodes(op="get_attr"):
                value = _getattr_path(graph, node.target)
                if isinstance(value, Tensor) and id(value) not in self._constants:
                    name = f"c{len(self._constants)}"
                    proxy = _proxy(value, name, None, self._target)
                    self._constants[id(value)] = (value, proxy)
        return list(self._constants.values())

    def force(self, value: Any, *, as_kept: bool = False) -> Any:
        """Return the value of what may be an input, gathered if nothing asked for it before.

        Args:
            value: Of a node.
            as_kept: Whether a weight of which fp8 numbers are kept is to be these.
        """
        if not isinstance(value, LazyInput):
            return value
        if value.value is None:
            value.value = self._full_value(value)
        if as_kept or unquantized_dtype(value.graph_input.tensor) is None:
            return value.value
        if value.weight_itself is None:
            assert self._fp8 is not None, "only linears in fp8 keep weights so"
            tensor = value.graph_input.tensor
            value.weight_itself = self._fp8.weight_itself(tensor, value.value)
        return value.weight_itself

    def _full_value(self, lazy: LazyInput) -> TensorProxy:
        if self._data_parallel is None or lazy.graph_input.kind != "parameter":
            return lazy.proxy
        parameter = lazy.graph_input.tensor
        sharded = is_sharded(parameter)
        if not sharded and not parameter.requires_grad:
            return lazy.proxy
        kind = DistParallelType.FULLY_SHARDED if sharded else DistParallelType.REPLICATED
        training = self._capture.training
        with differentiated(self._compile_data, enabled=parameter.requires_grad):
            full = unshard(lazy.proxy, self._data_parallel, kind, training=training)
            num_rows = parameter.unsharded_shape[0] if sharded else None  # type: ignore[attr-defined]
            if sharded and full.shape[0] != num_rows:
                full = full[:num_rows]
        return full

    def _proxy_of(self, graph_input: GraphInput) -> LazyInput:
        tensor = graph_input.tensor
        name = "t_" + "".join(c if c.isalnum() else "_" for c in graph_input.name)
        kind = None
        if graph_input.kind == "parameter" and self._data_parallel is not None:
            kind = (
                DistParallelType.FULLY_SHARDED
                if is_sharded(tensor)
                else DistParallelType.REPLICATED
            )
        return LazyInput(_proxy(tensor, name, kind, self._target), graph_input)


def _proxy(
    tensor: Tensor, name: str, kind: DistParallelType | None, target: torch.device | None
) -> TensorProxy:
    return TensorProxy(
        name,
        shape=tuple(tensor.shape),
        device=devices.to_device(target or tensor.device),
        dtype=dtypes.to_dtype(tensor.dtype),
        requires_grad=tensor.requires_grad,
        distparallel_type=kind,
    )


def _graphs(graph: fx.GraphModule) -> Iterator[fx.GraphModule]:
    yield from (m for m in graph.modules() if isinstance(m, fx.GraphModule))


def _getattr_path(owner: Any, path: str) -> Any:
    return operator.attrgetter(path)(owner)
