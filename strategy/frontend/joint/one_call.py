"""Records a function that Thunder does not know as torch's own operators, with torch's own derivative.

Each ATen operator of it is one operation of the trace, so a plan sees every value that it saves, and may free it and
compute it again:

    (y, indices) = max_pool2d_of_torch_nn_functional_0(x)

is differentiated to

    (y, indices) = aten_max_pool2d_with_indices(x, [2, 2], [2, 2])
    ...
    t7 = aten_max_pool2d_with_indices_backward(t6, x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from thunder.core import devices, dtypes
from thunder.core.proxies import TensorProxy
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten

from thunder_memsave.aten.joint_graph import Operand, joint_graph
from thunder_memsave.frontend.fx_nodes import UNREACHED, node_needs_grad
from thunder_memsave.frontend.joint.recorded import RecordedJoint, joint_symbol
from thunder_memsave.frontend.opaque import OpaqueExecutor

_CONJUGATES = (torch.ops.aten._conj.default, torch.ops.aten.conj_physical.default)


def call_with_derivative(
    node: fx.Node,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    opaque: OpaqueExecutor,
    device: torch.device | None,
    as_eager: Callable[[], AbstractContextManager[Any]],
) -> Any:
    """Record `function(*args, **kwargs)`.

    Args:
        node: The node that it is from: tells what eager made, and which results are read.
        function: What the node calls.
        args: With proxies for tensors, as are `kwargs`.
        kwargs: By name.
        opaque: Gets the operation.
        device: Where every tensor is taken to be, for a plan; None: where it is.
        as_eager: Enters the autocast that eager runs it in.

    Raises:
        UntraceableError: PyTorch cannot trace it without numbers.
    """
    leaves, structure = tree_flatten((list(args), dict(kwargs)))
    pairs = list(_pairs((node.args, node.kwargs), (args, kwargs)))
    examples = _examples(pairs)
    tensors = list({v.name: v for v in leaves if isinstance(v, TensorProxy)}.values())
    is_trained = node_needs_grad(node)
    operands = [_operand(t, examples.get(t.name), is_trained=is_trained) for t in tensors]

    def run(*given: Tensor) -> Any:
        values = dict(zip((t.name for t in tensors), given, strict=True))
        filled = [_filled(v, values) for v in leaves]
        run_args, run_kwargs = tree_unflatten(filled, structure)
        with as_eager():
            return function(*run_args, **run_kwargs)

    joint = joint_graph(run, operands, is_used=_is_used(node))
    reached = {t.name for t, g in zip(tensors, joint.gradients, strict=True) if g is not None}
    node.meta[UNREACHED] = _unreached(pairs, reached)
    results = iter(joint_symbol(RecordedJoint(joint, opaque, device), function)(*tensors))
    filled = [next(results) if isinstance(o, fx.Node) else o for o in joint.outputs]
    result = tree_unflatten(filled, joint.structure)
    return tuple(result) if isinstance(result, tuple) else result


def _filled(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the tensor of a proxy; and of a device, which may be one that is planned for, where the tensors are."""
    if isinstance(value, torch.device):
        return next((t.device for t in tensors.values()), value)
    return tensors[value.name] if isinstance(value, TensorProxy) else value


def _examples(pairs: Sequence[tuple[fx.Node, Any]]) -> dict[str, Tensor]:
    """Map names of proxies to eager's tensors, without their numbers."""
    found: dict[str, Tensor] = {}
    for argument, value in pairs:
        proxies = [v for v in tree_iter(value) if isinstance(v, TensorProxy)]
        example = argument.meta.get("example_value")
        tensors = [v for v in tree_iter(example) if isinstance(v, Tensor)]
        if len(proxies) == len(tensors):
            found.update((p.name, t) for p, t in zip(proxies, tensors, strict=True))
    return found


def _pairs(argument: Any, value: Any) -> Iterator[tuple[fx.Node, Any]]:
    """Yield the nodes in a node's argument, each with its value."""
    if isinstance(argument, fx.Node):
        yield argument, value
    elif isinstance(argument, (tuple, list)):
        for a, v in zip(argument, value, strict=True):
            yield from _pairs(a, v)
    elif isinstance(argument, dict):
        for key, a in argument.items():
            yield from _pairs(a, value[key])


def _operand(proxy: TensorProxy, example: Tensor | None, *, is_trained: bool) -> Operand:
    """Describe an operand: with the dtype that it has here, which a cast of autocast may have changed."""
    shape = tuple(proxy.shape)
    is_alike = example is not None and tuple(example.shape) == shape
    like = example if is_alike else torch.empty(shape, device="meta")
    assert like is not None
    return Operand(
        shape=shape,
        stride=tuple(like.stride()),
        dtype=dtypes.to_torch_dtype(proxy.dtype),
        device=devices.to_torch_device(proxy.device) if example is None else example.device,
        requires_grad=is_trained and example is not None and example.requires_grad,
    )


def _is_used(node: fx.Node) -> Callable[[int], bool]:
    """Return whether a result can get a cotangent: eager gives none to one that nothing differentiable reads."""
    expected = node.meta.get("example_value")
    if not isinstance(expected, (tuple, list)):
        return lambda index: True
    if not all(isinstance(v, Tensor) for v in expected):
        return lambda index: True
    picks = [u for u in node.users if u.target is operator.getitem and u.args[0] is node]
    if len(picks) < len(node.users):
        return lambda index: True
    read: list[Any] = [u.args[1] for u in picks if _is_differentiated(u)]
    return {index % len(expected) for index in read}.__contains__


def _is_differentiated(node: fx.Node) -> bool:
    """Whether a gradient can reach the node: from a result of the graph, over nodes that need one."""
    seen, stack = {node}, [node]
    while stack:
        for user in stack.pop().users:
            if user.op == "output":
                return True
            if user not in seen and node_needs_grad(user):
                seen.add(user)
                stack.append(user)
    return False


def _unreached(pairs: Sequence[tuple[fx.Node, Any]], reached: set[str]) -> frozenset[fx.Node]:
    """Return the operands none of whose tensors gets a gradient."""
    found = {argument for argument, _ in pairs}
    for argument, value in pairs:
        if any(v.name in reached for v in tree_iter(value) if isinstance(v, TensorProxy)):
            found.discard(argument)
    return frozenset(found)
