"""Traces a function and PyTorch's own vector-Jacobian product of it into one graph of ATen operators, without numbers.

The graph has what autograd runs in eager: composite functions are taken apart as autograd does, and no further.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress, takewhile
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from thunder_memsave.aten.autocast import cached_casts, no_autocast
from thunder_memsave.aten.equal_layers import EqualLayers
from thunder_memsave.aten.origin import BackwardKeepsPlace, KeepsOrigin, differentiable_nodes
from thunder_memsave.aten.placed_layers import NotEqualError, place_layers
from thunder_memsave.aten.record import draws
from thunder_memsave.aten.repeated_copies import skip_repeated_copies
from thunder_memsave.aten.round_trips import skip_round_trips
from thunder_memsave.aten.saved_tensors import no_saved_tensors_hooks
from thunder_memsave.aten.strided_writes import write_in_memory_order
from thunder_memsave.aten.whole_calls import Rule, whole_calls
from thunder_memsave.errors import ThunderMemsaveError

_READS_MEMORY = (
    torch.ops.aten.as_strided.default,
    torch.ops.aten.as_strided_scatter.default,
    torch.ops.aten.view.default,
    torch.ops.aten.view_as_complex.default,
    torch.ops.aten.native_group_norm.default,
    torch.ops.aten.native_group_norm_backward.default,
    torch.ops.aten._cdist_forward.default,
    torch.ops.aten._pdist_forward.default,
)
"""They read elements by their place in memory, or refuse strides that they cannot view.

Besides views, those with a tag of `_OF_NUMBERS_ALONE` before which PyTorch calls `contiguous()`
(torchgen/packaged/autograd/derivatives.yaml, and the composite functions around them)."""

_ALIAS = torch.ops.aten.alias.default
_OF_NUMBERS_ALONE = (torch.Tag.core, torch.Tag.pointwise)
"""Tags of operators that stand for a function of numbers alone. Kernels behind others may take strides for granted:
PyTorch's formulas call `contiguous()` before them, which leaves no trace on tensors that are contiguous already."""

_UNTAGGED_OF_NUMBERS_ALONE = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        *("_softmax_backward_data", "_log_softmax_backward_data", "slice_backward"),
        *("select_backward", "nll_loss_forward", "nll_loss_backward", "index_add", "index_copy"),
    )
)
"""Further ones, without a tag."""

_WRITES_STATISTICS = (
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten.cudnn_batch_norm.default,
    torch.ops.aten.miopen_batch_norm.default,
)
"""They change running statistics, which their schemas do not say."""

_NORM_BACKWARDS = (
    torch.ops.aten.native_batch_norm_backward.default,
    torch.ops.aten.batch_norm_backward.default,
)
"""Their seventh argument after the gradient says whether it is of training."""


class UntraceableError(ThunderMemsaveError, ValueError):
    """A function cannot be traced without numbers; the text says why."""

    code = None
    node: fx.Node | None = None
    """The operator that cannot be; it may know the user's line."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a function reads, without its numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


@dataclass(frozen=True)
class JointGraph:
    """A function of tensors and its vector-Jacobian product. Nodes are ATen operators; nothing writes in place."""

    graph: fx.Graph
    module: fx.GraphModule
    """Has the tensors that the graph holds itself."""
    operands: tuple[fx.Node, ...]
    cotangents: tuple[fx.Node, ...]
    """Gradients of the outputs that `differentiable` names, in their order."""
    outputs: tuple[Any, ...]
    """Leaves of what the function returns: nodes for tensors."""
    differentiable: tuple[int, ...]
    """Indices of the outputs that need a gradient."""
    gradients: tuple[fx.Node | None, ...]
    """One for each operand; None if autograd gives none."""
    reached: tuple[frozenset[int], ...]
    """For each output, the indices of the operands that it gives a gradient to."""
    writes: tuple[tuple[int, fx.Node], ...]
    """Indices of operands that the function changes in place, each with the new value."""
    reads_memory: bool
    """Whether results may depend on the strides of what it reads."""
    rules: Sequence[Rule]
    """Those of the calls that are kept whole, by their numbers in the graph."""

    @property
    def results(self) -> tuple[Any, ...]:
        """The outputs, and the new values of what the function changes."""
        return (*self.outputs, *(node for _, node in self.writes))

    @cached_property
    def unread_draws(self) -> tuple[fx.Node, ...]:
        """Draws of the function that no result needs, in order: what is drawn after them depends on them."""
        needed = set(self.nodes_for((*self.results, *self.gradients), known=set()))
        of_function = takewhile(
            lambda node: not any(n in self.cotangents for n in node.all_input_nodes),
            self.graph.nodes,
        )
        return tuple(
            node
            for node in of_function
            if node not in needed
            and isinstance(node.target, OpOverload)
            and draws(node.target, node.args, node.kwargs)
        )

    def nodes_for(self, results: Sequence[Any], *, known: set[fx.Node]) -> Iterator[fx.Node]:
        """Yield the nodes that results need beside `known`, in the order of the graph."""
        needed = {r for r in results if isinstance(r, fx.Node)} - known
        stack = list(needed)
        while stack:
            for node in stack.pop().all_input_nodes:
                if node not in needed and node not in known:
                    needed.add(node)
                    stack.append(node)
        yield from (n for n in self.graph.nodes if n in needed)


@dataclass(frozen=True, slots=True)
class Shortened:
    """A function that has fewer layers than another: of a row of equal ones, those at its ends."""

    function: Callable[..., Any]
    layers: EqualLayers


def joint_graph(
    function: Callable[..., Any], operands: Sequence[Operand], short: Shortened | None = None
) -> JointGraph:
    """Trace `function(*tensors)`.

    Args:
        function: Returns a tree of tensors and other values.
        operands: The tensors that it reads; it may change those that require no gradient.
        short: What may be traced in its place, and completed to the same graph; None: nothing.

    Raises:
        UntraceableError: its operators, or the shapes of its results, depend on numbers; it has no derivative; or it
            changes an operand that requires a gradient.
    """
    traced = (short and _completed(short, operands)) or _traced(function, operands)
    module, rules, leaves = traced.module, traced.rules, traced.leaves
    writes = _taken_writes(module.graph, operands)
    _refuse_writes(module.graph)
    _read_no_statistics(module.graph)
    skip_round_trips(module.graph)
    skip_repeated_copies(module.graph)
    results: Any = module.graph.output_node().args[0]
    placeholders = module.graph.find_nodes(op="placeholder")
    pairs = zip(leaves, results[: len(leaves)], strict=True)
    found = JointGraph(
        graph=module.graph,
        module=module,
        operands=tuple(placeholders[: len(operands)]),
        cotangents=tuple(placeholders[len(operands) :]),
        outputs=tuple(r if isinstance(leaf, Tensor) else leaf for leaf, r in pairs),
        differentiable=tuple(traced.wanted),
        gradients=tuple(results[len(leaves) :]),
        reached=traced.reached,
        writes=writes,
        reads_memory=any(map(_may_depend_on_strides, module.graph.nodes)),
        rules=rules,
    )
    _refuse_draws_of_backward(found)
    return found


@dataclass(frozen=True, slots=True)
class _Traced:
    module: fx.GraphModule
    rules: list[Rule]
    leaves: Sequence[Any]
    """The leaves of what the function returns, with their autograd graph."""
    wanted: Sequence[int]
    """Indices of the leaves that need a gradient."""
    reached: tuple[frozenset[int], ...]
    """As of a `JointGraph`."""


def _traced(function: Callable[..., Any], operands: Sequence[Operand]) -> _Traced:
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with fakes, torch.enable_grad(), no_saved_tensors_hooks(), whole_calls() as rules:
        tensors = [_fake(o) for o in operands]
        try:
            given = _as_leaves(tensors, operands)
            with cached_casts():
                leaves = tree_leaves(function(*given))
            wanted = [i for i, o in enumerate(leaves) if _needs_grad(o)]
            cotangents = [torch.empty_like(leaves[i]) for i in wanted]
            module = _functional(_Joint(function, operands, wanted), [*tensors, *cotangents])
        except Exception as error:  # torch raises many types for what fake tensors cannot do
            raise UntraceableError(_first_line(error)) from error
    reached = tuple(_reached(leaf, given) for leaf in leaves)
    return _Traced(module, rules, leaves, wanted, reached)


def _completed(short: Shortened, operands: Sequence[Operand]) -> _Traced | None:
    """Trace the shorter function, and add its missing layers; None: only the whole function gives the whole graph."""
    layers = short.layers
    try:
        traced = _traced(short.function, operands)
        if any(map(_writes, traced.module.graph.nodes)):
            return None
        place_layers(traced.module.graph, layers, num_operands=len(operands), rules=traced.rules)
    except (UntraceableError, NotEqualError):  # the whole function says what cannot be traced
        return None
    same = [dict(zip(layers.operands[1], layers.operands[i], strict=True)) for i in layers.cut]
    reached = (r.union(of[i] for of in same for i in r if i in of) for r in traced.reached)
    return replace(traced, reached=tuple(reached))


def _functional(joint: Callable[..., Any], tensors: Sequence[Tensor]) -> fx.GraphModule:
    """Return a graph of operators, functional where they were in place."""
    module = make_fx(joint)(*tensors)
    if any(map(_writes, module.graph.nodes)):
        write_in_memory_order(module.graph)
        run = KeepsOrigin(module).run
        with no_autocast():
            module = make_fx(torch.func.functionalize(run, remove="mutations"))(*tensors)
    return module


@dataclass(frozen=True, slots=True)
class _Joint:
    """`(*operands, *cotangents) -> [*outputs, *gradients]`."""

    function: Callable[..., Any]
    operands: Sequence[Operand]
    wanted: Sequence[int]

    def __call__(self, *tensors: Tensor) -> list[Any]:
        given, cotangents = tensors[: len(self.operands)], tensors[len(self.operands) :]
        leaves = _as_leaves(given, self.operands)
        with cached_casts(), differentiable_nodes() as nodes:
            outputs = tree_leaves(self.function(*leaves))
        trained = [o.requires_grad for o in self.operands]
        found: Iterator[Tensor | None] = iter(())
        if self.wanted:
            roots = [outputs[i] for i in self.wanted]
            inputs = list(compress(leaves, trained))
            with no_autocast(), BackwardKeepsPlace(nodes):
                found = iter(torch.autograd.grad(roots, inputs, cotangents, allow_unused=True))
        gradients = [next(found, None) if is_trained else None for is_trained in trained]
        return [*(o if isinstance(o, Tensor) else None for o in outputs), *gradients]


def _fake(operand: Operand) -> Tensor:
    return torch.empty_strided(
        operand.shape, operand.stride, dtype=operand.dtype, device=operand.device
    )


def _as_leaves(tensors: Sequence[Tensor], operands: Sequence[Operand]) -> list[Tensor]:
    pairs = zip(tensors, operands, strict=True)
    return [t.detach().requires_grad_(o.requires_grad) for t, o in pairs]


def _needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _reached(output: Any, leaves: Sequence[Tensor]) -> frozenset[int]:
    """Return the indices of the leaves that autograd would reach from an output."""
    if not _needs_grad(output):
        return frozenset()
    index_of = {id(leaf): i for i, leaf in enumerate(leaves)}
    if output.grad_fn is None:
        return frozenset({index_of[id(output)]})
    stack, seen, found = [output.grad_fn], {output.grad_fn}, set()
    while stack:
        node = stack.pop()
        if (index := index_of.get(id(getattr(node, "variable", None)))) is not None:
            found.add(index)
        new = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= new
        stack.extend(new)
    return frozenset(found)


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _may_depend_on_strides(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    if target in _READS_MEMORY:
        return True
    is_free = target.is_view or target in _UNTAGGED_OF_NUMBERS_ALONE
    return not (is_free or any(tag in target.tags for tag in _OF_NUMBERS_ALONE))


def _taken_writes(graph: fx.Graph, operands: Sequence[Operand]) -> tuple[tuple[int, fx.Node], ...]:
    """Take out of a functional graph the copies to operands, which are its last nodes, and return them."""
    placeholders: Sequence[Any] = graph.find_nodes(op="placeholder")
    index_of = {node: i for i, node in enumerate(placeholders)}
    found: list[tuple[int, fx.Node]] = []
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target, value = node.args[:2]
        index = index_of.get(target, len(operands))
        if index < len(operands) and not operands[index].requires_grad:
            node.replace_all_uses_with(value)
            graph.erase_node(node)
            found.append((index, _copied(value)))
    return tuple(found)


def _copied(value: fx.Node) -> fx.Node:
    """Return what was copied to make a value that nothing else reads, if the write that copies it again gives the same.

    It does of a value that the graph makes: of what it is given, another write may come first.
    """
    copy: Any = value
    while copy.target is _ALIAS:  # torch 2.15 makes one of each copy
        copy = copy.args[0]
    if copy.target is not torch.ops.aten.copy.default or _is_read(copy):
        return value
    source: Any = copy.args[1]
    made, copied = (_metadata(node) for node in (source, copy))
    return source if made == copied and not _may_be_given(source) else value


def _is_read(value: fx.Node) -> bool:
    """Return whether something reads a value, be it through an alias; what nothing reads is left out later."""
    return any(
        user.op == "output" or (user.users and (user.target is not _ALIAS or _is_read(user)))
        for user in value.users
    )


def _metadata(node: Any) -> Any:
    found = node.meta.get("val") if isinstance(node, fx.Node) else None
    return (found.shape, found.dtype, found.device) if isinstance(found, Tensor) else None


def _may_be_given(node: fx.Node) -> bool:
    """Return whether a value may share memory with what the graph is given or holds."""
    while isinstance(node.target, OpOverload) and node.target.is_view:
        node = node.args[0]  # type: ignore[assignment]
    if node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    target = node.target
    returns = target._schema.returns if isinstance(target, OpOverload) else ()
    return not returns or any(r.alias_info is not None for r in returns)


def _refuse_writes(graph: fx.Graph) -> None:
    for node in graph.nodes:
        is_known = node.target is operator.getitem or isinstance(node.target, OpOverload)
        if node.op == "call_function" and not is_known:
            raise UntraceableError(f"it runs {node.target}, which is no operator with a schema")
        if _writes(node) or _updates_statistics(node):
            error = UntraceableError(f"{node.target} changes a tensor in place that it is given")
            error.node = node
            raise error


def _read_no_statistics(graph: fx.Graph) -> None:
    """Let the backward of BatchNorm in training not read running statistics: no kernel does, and they are overwritten.

    The schema, and cuDNN's call, of PyTorch (aten/src/ATen/native/Normalization.cpp) take none instead.
    """
    for node in graph.nodes:
        if node.target in _NORM_BACKWARDS and node.args[7] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])


def _updates_statistics(node: fx.Node) -> bool:
    if node.target not in _WRITES_STATISTICS:
        return False
    _, _, _, running_mean, _, is_training, *_ = node.args
    return running_mean is not None and bool(is_training)


def _refuse_draws_of_backward(joint: JointGraph) -> None:
    """Refuse functions that draw what only backward reads: the generator would move on at another moment."""
    forward = set(joint.nodes_for(joint.outputs, known=set()))
    for node in joint.nodes_for(joint.gradients, known=forward):
        if isinstance(node.target, OpOverload) and draws(node.target, node.args, node.kwargs):
            raise UntraceableError(f"{node.target} draws random numbers that only backward reads")
