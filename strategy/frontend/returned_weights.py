"""Makes Dynamo return weights from the graph instead of reading them from the module.

If a method returns an input (`return self.weight`, also in a dataclass, or stored on an object), Dynamo reads it from
its source after the graph has run: from the module, which holds only this rank's rows. For an output of the graph, the
trace gathers the whole weight and reduces its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest import mock

from torch import fx
from torch._dynamo.codegen import PyCodegen
from torch._dynamo.variables import TensorVariable


@contextmanager
def returned_from_graph(stand_ins: Collection[int]) -> Iterator[None]:
    """Make these tensors, and attributes of them (`weight.data`), outputs of the graph during capture.

    Args:
        stand_ins: The `id` of each tensor.
    """
    if not stand_ins:
        yield
        return
    with mock.patch.object(PyCodegen, "__call__", _from_graph(PyCodegen.__call__, stand_ins)):
        yield


def _from_graph(generate: Callable[..., None], stand_ins: Collection[int]) -> Callable[..., None]:
    @wraps(generate)
    def call(codegen: Any, value: Any, allow_cache: bool = True) -> None:
        if not _is_read_off(value, stand_ins):
            generate(codegen, value, allow_cache)
            return
        before, codegen.value_from_source = codegen.value_from_source, False
        try:
            generate(codegen, value, allow_cache)
        finally:
            codegen.value_from_source = before

    return call


def _is_read_off(value: Any, stand_ins: Collection[int]) -> bool:
    if not isinstance(value, TensorVariable) or value.source is None:
        return False
    node = value.as_proxy().node
    return any(_is_stand_in(n, stand_ins) for n in (node, *node.all_input_nodes))


def _is_stand_in(node: fx.Node, stand_ins: Collection[int]) -> bool:
    argument = node.meta.get("grapharg")
    return argument is not None and id(argument.example) in stand_ins
