"""A mask that allows each query one interval of keys is known without being made; of any other, nothing is said."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from thunder_memsave.frontend.fx_nodes import node_callable
from thunder_memsave.frontend.rewrites.mask_intervals import Intervals, intervals

LENGTH = 9
Mask = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of queries (length, 1), keys (1, length), and the number of each one's document in two rows (2, 1, length)."""

OPERANDS = (
    torch.arange(LENGTH)[:, None],
    torch.arange(LENGTH)[None],
    torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 3, 3, 3]])[:, None],
)


def found_in(mask: Mask, *, methods: bool = False) -> tuple[Tensor, Intervals | None]:
    """Return the mask, and its intervals if they are known; `methods`: operators are captured as methods."""
    graph = fx.symbolic_trace(mask)
    for node in graph.graph.nodes if methods else ():
        if getattr(node.target, "__module__", "") == "_operator" and node.target is not getitem:
            node.op, node.target = "call_method", f"__{node.target.__name__.strip('_')}__"
    values: dict[fx.Node, Tensor] = {}
    operands = iter(OPERANDS)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(operands)
        elif node.op == "output":
            (made,) = node.args
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node_callable(node)(*args, **kwargs)
        node.meta["example_value"] = values.get(node)

    def value(node: fx.Node) -> Any:
        assert values[node].shape[-2:] != (LENGTH, LENGTH), "the mask was made"
        return values[node]

    return values[made], intervals(made, LENGTH, is_known=lambda node: True, value=value)


def shown(found: Intervals) -> Tensor:
    """Return the mask that intervals mean."""
    keys = torch.arange(LENGTH)
    return (keys >= found.first[..., None]) & (keys < found.end[..., None])


def documents(q: Tensor, k: Tensor, d: Tensor) -> Tensor:
    return (d[:, :, :, None] == d[:, :, None]) & (k <= q)


IN_INTERVALS: dict[str, Mask] = {
    "past": lambda q, k, d: k <= q,
    "past, written the other way": lambda q, k, d: q >= k,
    "strict": lambda q, k, d: k < q,
    "future": lambda q, k, d: q <= k,
    "window": lambda q, k, d: (q - 3 < k) & (k <= q).to(torch.bool),
    "itself": lambda q, k, d: torch.eq(k, q),
    "documents": documents,
    "one vector of keys": lambda q, k, d: q.ge(k[0]),
    "for each row": lambda q, k, d: (k <= q).expand(2, 1, LENGTH, LENGTH),
    "and true": lambda q, k, d: q.new_ones((), dtype=torch.bool) & (k <= q),
    "and false": lambda q, k, d: (k <= q).logical_and(q.new_zeros((), dtype=torch.bool)),
}


@pytest.mark.parametrize("methods", [False, True], ids=["functions", "methods"])
@pytest.mark.parametrize("name", IN_INTERVALS)
def test_intervals_mean_the_same_mask(name: str, methods: bool) -> None:
    mask, found = found_in(IN_INTERVALS[name], methods=methods)
    assert found is not None
    assert torch.equal(shown(found).expand(mask.shape), mask)


@pytest.mark.parametrize(
    "mask",
    [
        lambda q, k, d: k <= 4 - (4 - q).abs(),  # known, but not as a window
        lambda q, k, d: (k <= q) | (k < 2),
        lambda q, k, d: (4 - k).abs() <= q,  # keys are not sorted
        lambda q, k, d: k != q,
        lambda q, k, d: k.double() <= q,
        lambda q, k, d: (k - q) <= 0,
        lambda q, k, d: ~(k > q),
        documents,
    ],
)
def test_any_other_mask_is_no_window(mask: Mask) -> None:
    made, found = found_in(mask)
    assert found is None or (torch.equal(shown(found).expand(made.shape), made))
    assert found is None or found.window() is None


@pytest.mark.parametrize(
    ("mask", "window"),
    [
        (lambda q, k, d: k <= q, LENGTH),
        (lambda q, k, d: (k <= q) & (k > q - 3), 3),
        (lambda q, k, d: k == q, 1),
        (lambda q, k, d: (k <= q) & (k >= q - 20), LENGTH),
        (lambda q, k, d: ((k <= q) & (k > q - 4)).expand(3, 1, LENGTH, LENGTH), 4),
    ],
)
def test_a_window_is_the_keys_up_to_the_query(mask: Mask, window: int) -> None:
    _, found = found_in(mask)
    assert found is not None
    assert found.window() == window
