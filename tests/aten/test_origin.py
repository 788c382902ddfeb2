"""Operators that are traced keep where the node that ran them is from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from thunder_memsave.aten.origin import (
    IS_BACKWARD,
    REGION,
    BackwardKeepsPlace,
    KeepsOrigin,
    differentiable_nodes,
    origin,
)


def graph_of_two() -> fx.GraphModule:
    def function(x: Tensor) -> Tensor:
        return torch.softmax(torch.nn.functional.silu(x), -1)

    graph = fx.symbolic_trace(function)
    first, second = [n for n in graph.graph.nodes if n.op == "call_function"]
    first.meta.update({"stack_trace": "line 1", REGION: 3, "example_value": x_of()})
    second.meta["stack_trace"] = "line 2"
    return graph


def x_of() -> Tensor:
    return torch.ones(2, 3)


def test_each_operator_has_the_origin_of_its_node() -> None:
    traced = make_fx(KeepsOrigin(graph_of_two()).run)(x_of())
    found = [origin(n) for n in traced.graph.nodes if n.op == "call_function"]
    assert found[0] == {"stack_trace": "line 1", REGION: 3}
    assert found[-1] == {"stack_trace": "line 2"}


def test_operators_of_backward_have_the_place_of_what_they_differentiate() -> None:
    def joint(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        with differentiable_nodes() as nodes:
            y = KeepsOrigin(graph_of_two()).run(leaf)
        with BackwardKeepsPlace(nodes):
            return torch.autograd.grad(y, leaf, torch.ones_like(y))[0]

    traced = make_fx(joint)(x_of())
    found = {str(n.target): origin(n) for n in traced.graph.nodes if "backward" in str(n.target)}
    assert found == {
        "aten._softmax_backward_data.default": {"stack_trace": "line 2", IS_BACKWARD: True},
        "aten.silu_backward.default": {"stack_trace": "line 1", IS_BACKWARD: True},
    }


def test_it_runs_where_nothing_is_traced_too_and_tells_which_node_failed() -> None:
    run = KeepsOrigin(graph_of_two())
    assert run.run(x_of()).shape == (2, 3)
    assert run.failed is None
    with pytest.raises(TypeError):
        run.run("no tensor")
    assert run.failed is not None
    assert origin(run.failed)["stack_trace"] == "line 1"
