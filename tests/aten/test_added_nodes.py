"""An added node is as one that `Graph.create_node` makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from thunder_memsave.aten.added_nodes import add_node


@pytest.mark.parametrize("kwargs", [{}, {"alpha": 2}])
def test_it_calls_what_the_model_calls_with_other_arguments(kwargs: dict[str, Any]) -> None:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    model = graph.call_function(torch.add, (a, a))
    last = graph.call_function(torch.stack, ([model],))
    graph.output((last, model))
    with graph.inserting_before(last):
        node = add_node(graph, model, (b, model), kwargs, {"val": 3})
    last.args = ([model, node],)
    assert (node.op, node.target, node.args, node.kwargs) == (
        model.op,
        torch.add,
        (b, model),
        kwargs,
    )
    assert node.meta == {"val": 3}
    assert node.name != model.name
    assert node in model.users
    assert list(b.users) == [node]
    assert list(graph.find_nodes(op="call_function", target=torch.add)) == [model, node]
    graph.lint()
    ones = torch.ones(2)
    stacked, _ = fx.GraphModule({}, graph)(ones, 2 * ones)
    assert torch.equal(
        stacked, torch.stack([2 * ones, 2 * ones + kwargs.get("alpha", 1) * 2 * ones])
    )
