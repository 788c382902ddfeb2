"""Inlines the checkpointed regions of a captured graph, so that the plan sees what is in them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import fx

from thunder_memsave.aten.origin import REGION
from thunder_memsave.errors import CompileError
from thunder_memsave.frontend.aliasing import refuse_changed_inputs
from thunder_memsave.frontend.fx_nodes import where

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint

_ids = count()


def inline_checkpoints(graph: fx.GraphModule) -> None:
    """Replace each checkpointed region by its nodes, marked with the number of the outermost one.

    Thunder's own rule redraws the region's dropout when it recomputes, which gives wrong gradients. Here, random
    numbers are drawn once, whatever `preserve_rng_state` says.

    Raises:
        CompileError: A region has its own policy (`context_fn`) on what it keeps.
    """
    for node in graph.graph.find_nodes(op="call_function", target=_CHECKPOINT):
        region, *arguments = node.args
        body = getattr(graph, region.target)
        _refuse_policy(node, body)
        refuse_changed_inputs(body, what="A checkpointed region")
        inline_checkpoints(body)
        with graph.graph.inserting_before(node):
            results = _copy_nodes(body, graph, region.target, arguments)
        for user in list(node.users):
            assert user.target is operator.getitem, "the region returns a tuple"
            user.replace_all_uses_with(results[user.args[1]])
            graph.graph.erase_node(user)
        graph.graph.erase_node(node)
        if not region.users:
            graph.graph.erase_node(region)


def _refuse_policy(node: fx.Node, body: fx.GraphModule) -> None:
    if body.meta.get("_checkpoint_context_fn") is not None:
        raise CompileError(
            f"torch.utils.checkpoint was called with context_fn (at {where(node)}), a policy that the memory planner "
            "does not know. Leave context_fn out: the whole region is then recomputed; or leave the checkpoint out, "
            "and name the modules under memory.keep and memory.recompute."
        )


def _copy_nodes(
    body: fx.GraphModule, graph: fx.GraphModule, name: str, arguments: Sequence[Any]
) -> Sequence[Any]:
    values: dict[fx.Node, Any] = {}
    remaining, number = iter(arguments), next(_ids)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(remaining)
        elif node.op == "output":
            return fx.node.map_arg(node.args[0], values.__getitem__)
        else:
            values[node] = graph.graph.node_copy(node, values.__getitem__)
            values[node].meta[REGION] = number
            if node.op == "get_attr":
                values[node].target = f"{name}.{node.target}"
    raise AssertionError("a graph has an output")
