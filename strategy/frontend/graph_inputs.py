"""Makes proxies of what a graph reads beside its own values: inputs, and tensors that it holds itself."""

from __future__ import annotations

import operator
from collections.abc import Iterator
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
from thunder_memsave.ops.host_copies.weights import place_of
from thunder_memsave.ops.unshard import unshard
from thunder_memsave.sharding.sharded_parameter import is_sharded, stored_weight
from thunder_memsave.stored_weights.formats import format_named
from thunder_memsave.stored_weights.in_bytes import refuse_other_storage
from thunder_memsave.stored_weights.symbols import dequantized


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
        self._whole: dict[int, TensorProxy] = {}

    def proxies(self) -> list[TensorProxy]:
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

    def value(self, index: int, proxy: TensorProxy, *, as_kept: bool) -> TensorProxy:
        """Return the value of an input, which is gathered once.

        Args:
            index: Of the input.
            proxy: The one that `proxies` made for it.
            as_kept: Whether a weight of which fp8 numbers are kept is to be these.
        """
        if index not in self._whole:
            self._whole[index] = self._gathered(self._capture.inputs[index], proxy)
        whole, tensor = self._whole[index], self._capture.inputs[index].tensor
        stored = stored_weight(tensor)
        if as_kept or stored is None:
            return whole
        if stored.format != "fp8":
            kept_in = format_named(stored.format)
            refuse_other_storage(self._capture.inputs[index].name, tensor, kept_in)
            return dequantized(whole, kept_in, tuple(stored.shape), stored.dtype)
        assert self._fp8 is not None, "only linears in fp8 keep weights so"
        return self._fp8.weight_itself(tensor, whole)

    def _gathered(self, graph_input: GraphInput, proxy: TensorProxy) -> TensorProxy:
        kind, parameter = self._kind(graph_input), graph_input.tensor
        if self._data_parallel is None or kind is None:
            return proxy
        with differentiated(self._compile_data, enabled=parameter.requires_grad):
            full = unshard(proxy, self._data_parallel, kind, training=self._capture.training)
            if kind is DistParallelType.FULLY_SHARDED:
                num_rows = parameter.unsharded_shape[0]  # type: ignore[attr-defined]
                full = full if full.shape[0] == num_rows else full[:num_rows]
        return full

    def _proxy_of(self, graph_input: GraphInput) -> TensorProxy:
        name = "t_" + "".join(c if c.isalnum() else "_" for c in graph_input.name)
        return _proxy(graph_input.tensor, name, self._kind(graph_input), self._target)

    def _kind(self, graph_input: GraphInput) -> DistParallelType | None:
        """Return how the ranks share a parameter; None for what they do not."""
        if graph_input.kind != "parameter" or self._data_parallel is None:
            return None
        is_rows = is_sharded(graph_input.tensor)
        return DistParallelType.FULLY_SHARDED if is_rows else DistParallelType.REPLICATED


def _proxy(
    tensor: Tensor, name: str, kind: DistParallelType | None, target: torch.device | None
) -> TensorProxy:
    return TensorProxy(
        name,
        shape=tuple(tensor.shape),
        device=devices.to_device(target or place_of(tensor) or tensor.device),
        dtype=dtypes.to_dtype(tensor.dtype),
        requires_grad=tensor.requires_grad,
        distparallel_type=kind,
    )


def _graphs(graph: fx.GraphModule) -> Iterator[fx.GraphModule]:
    yield from (m for m in graph.modules() if isinstance(m, fx.GraphModule))


def _getattr_path(owner: Any, path: str) -> Any:
    return operator.attrgetter(path)(owner)
