"""A region: a run of operators as one symbol of a trace, whose function is compiled when it is cut.

    t330 = aten_mul_Tensor(t328, t279)
    t331 = aten_mul_Tensor(t328, t283)
->
    (t330, t331) = fused_5c1f0a9d2b7e(t328, t279, t283)

Equal structures are one function.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from thunder.core import prims
from thunder.core.codeutils import SigInfo
from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from thunder_memsave.aten.record import as_one_kernel
from thunder_memsave.fusion import inductor
from thunder_memsave.fusion.functions import formulas
from thunder_memsave.fusion.same_bits import num_different
from thunder_memsave.fusion.slices import in_slices
from thunder_memsave.measure.layouts import Layout, Value, make_arguments
from thunder_memsave.measure.op_profile import text_of
from thunder_memsave.ops.location import location

PREFIX = "fused_"
_NUM_COMPARED = 2**16
"""Numbers by which kernels are compared, at least."""
_MOST_ROUNDS = 8
_NUM_FROM_ZERO = 13
"""From one zero among those numbers to the next; before a negative one."""

_log = logging.getLogger(__name__)

_executor = OperatorExecutor("thunder_memsave_fusion", version="0")
register_executor(_executor)


class Region:
    """The function of a structure: operators one by one on FakeTensors and strange layouts, else compiled."""

    def __init__(
        self,
        name: str,
        eager: Callable[..., Any],
        inputs: Sequence[Layout],
        *,
        num_operators: int = 0,
    ) -> None:
        """Store the function.

        Args:
            name: Of the symbol.
            eager: Runs the operators one by one.
            inputs: The layouts to compile for.
            num_operators: Number of operators, views left out.
        """
        self.__name__ = self.name = name
        self.compile_s = 0.0
        """Seconds that compiling it took in this process."""
        self._eager = eager
        self._inputs = inputs
        self._kernel: inductor.Generated | None = None
        self._laid_out: Sequence[tuple[int, ...] | None] = ()
        """The strides of each result, if inductor gives dims of one element others; None: not of this one."""
        self.is_refused = False
        """Whether it could not be compiled, or inductor lays its results out otherwise."""
        self.has_failed = False
        """Whether inductor raised an error; parts of the region are not tried then."""
        self.num_operators = num_operators

    def __call__(self, *args: Tensor) -> Sequence[Tensor]:
        """Return the results, one for each output of the region, in new memory."""
        if type(args[0]) is FakeTensor:
            is_traced = get_proxy_mode() is not None
            return self._eager(*args) if is_traced else as_one_kernel(self._eager, *args)
        if self._kernel is None:
            return self._eager(*args)  # type: ignore[no-any-return]
        try:
            results = self._kernel([*args])
        except AssertionError:
            if self._is_laid_out(args):
                raise
            return self._eager(*args)  # type: ignore[no-any-return]
        if not self._laid_out:
            return results
        return [
            made if stride is None else made.as_strided(made.shape, stride)
            for made, stride in zip(results, self._laid_out, strict=True)
        ]

    def _is_laid_out(self, args: Sequence[Tensor]) -> bool:
        """Return whether tensors have the layouts for which it is compiled."""
        found = [(a.shape, a.stride()) for a in args]
        return found == [(layout.shape, layout.stride) for layout in self._inputs]

    def is_compiled(self) -> bool:
        """Compile it, once, and return whether it can run: what cannot is logged, and must stay single operators."""
        if self._kernel is None and not self.is_refused:
            self._compile()
        return self._kernel is not None

    def _compile(self) -> None:
        start = time.perf_counter()
        reason = self._reason_against_all()
        if self._kernel is None:
            self._refuse(reason)
        self.compile_s = time.perf_counter() - start

    def _reason_against_all(self) -> str:
        """Compile the first graph that can be; else return why the last one is none for this region."""
        try:
            graphs, fakes = self._graphs()
        # Of any type: a compiler's, the disk's, inductor's own assertions.
        except Exception as error:
            return self._failed(error)
        reason = ""
        for graph in graphs:
            if not (reason := self._reason_against(graph, fakes)):
                break
        return reason

    def _failed(self, error: Exception) -> str:
        self.has_failed = True
        return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]

    def _reason_against(self, graph: fx.GraphModule, fakes: Sequence[Tensor]) -> str:
        args = make_arguments([Value(e, i) for i, e in enumerate(self._inputs)], zeros=True)
        try:
            with torch.no_grad():
                compiled = inductor.compile_graph(graph, fakes)
                compiled(*args)  # the first call ends what inductor began for it
                kernel = inductor.direct(compiled)
                expected, found = self._eager(*args), kernel([*args])
        except Exception as error:
            return self._failed(error)
        self.has_failed = False
        if list(map(_described, found)) != list(map(_described, expected)):
            return "inductor lays its results out otherwise"
        if _num_storages(found, args) != len(found) + _num_storages(args):
            return "its results share memory"
        if not self._has_same_bits(kernel, args):
            return "inductor's code has other bits"
        self._kernel = kernel
        strides = [(a.stride(), b.stride()) for a, b in zip(found, expected, strict=True)]
        if any(ours != theirs for ours, theirs in strides):
            self._laid_out = [None if a == b else b for a, b in strides]
        return ""

    def _has_same_bits(self, kernel: inductor.Generated, args: Sequence[Tensor]) -> bool:
        """Compare on a CPU, where the kernel that PyTorch or inductor takes depends on layouts, for numbers at random.

        On CUDA it would take a device's memory.
        """
        if any(not a.is_cpu for a in args):
            return True
        generator = torch.Generator().manual_seed(0)
        for _ in range(max(1, min(_MOST_ROUNDS, _NUM_COMPARED // max(1, args[0].numel())))):
            _fill(args, generator)
            with torch.no_grad():
                pairs = zip(kernel([*args]), self._eager(*args), strict=True)
            if any(num_different(ours, theirs) for ours, theirs in pairs):
                return False
        return True

    def _refuse(self, reason: str) -> None:
        self.is_refused = True
        _log.warning("%s is not fused: %s; its operators stay as they are.", self.name, reason)

    def _graphs(self) -> tuple[list[fx.GraphModule], Sequence[Tensor]]:
        """Return graphs of the operators, the fastest one first, and their inputs."""
        with inductor.options():
            mode = FakeTensorMode()
            with mode:
                fakes = [_fake(layout) for layout in self._inputs]
            table = formulas("cuda" if any(f.is_cuda for f in fakes) else "cpu")
            with mode, torch._C.DisableTorchFunctionSubclass():
                graph = make_fx(lambda *a: list(self._eager(*a)), decomposition_table=table)(*fakes)
        graphs = [graph] if any(f.is_cuda for f in fakes) else [*in_slices(graph, fakes), graph]
        for each in graphs:
            _keep_order(each)
        return graphs, fakes


def _fake(layout: Layout) -> Tensor:
    return torch.empty_strided(
        layout.shape, layout.stride, dtype=layout.dtype, device=layout.device
    )


def _keep_order(graph: fx.GraphModule) -> None:
    """Lay concatenations that are results out as PyTorch does: inductor leaves the one operand that has numbers.

    Phi 3 joins what its rotary embedding turns of transposed heads with the rest, which is nothing.
    """
    output = graph.graph.output_node()
    results: Any = output.args[0]
    found = [node if _follows_order(node) else _in_order(graph.graph, node) for node in results]
    if found != list(results):
        output.args = (found,)
        graph.recompile()


def _in_order(graph: fx.Graph, node: fx.Node) -> fx.Node:
    kept: dict[str, Any] = {"memory_format": torch.contiguous_format}
    with graph.inserting_before(graph.output_node()):
        copied = graph.call_function(torch.ops.aten.clone.default, (node,), kept)
    copied.meta = dict(node.meta)
    return copied


def _follows_order(node: fx.Node) -> bool:
    """Return whether it is no concatenation, or one of operands in the order of their dims."""
    operands: Any = node.args[0] if node.target is torch.ops.aten.cat.default else ()
    return all(_is_in_order(operand.meta["val"]) for operand in operands)


def _is_in_order(tensor: Tensor) -> bool:
    """Return whether no dim has a larger stride than one before it, among those of several elements."""
    strides = [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    return strides == sorted(strides, reverse=True)


def _fill(args: Sequence[Tensor], generator: torch.Generator) -> None:
    """Write numbers at random into the memory of tensors; integers stay."""
    for tensor in args:
        flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        if tensor.is_floating_point():
            flat.normal_(generator=generator)
            flat[::_NUM_FROM_ZERO], flat[1::_NUM_FROM_ZERO] = 0.0, -0.0
        elif tensor.dtype is torch.bool:
            flat.random_(generator=generator)


def _described(tensor: Tensor) -> tuple[Any, ...]:
    """Describe a layout; strides of dims of one element say nothing."""
    nbytes = tensor.untyped_storage().nbytes()
    strides = [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1]
    return (tensor.shape, strides, tensor.storage_offset(), tensor.dtype, nbytes)


def _num_storages(*tensors: Sequence[Tensor]) -> int:
    return len({t.untyped_storage()._cdata for each in tensors for t in each})


_regions: dict[str, Region] = {}
"""The regions of all models of this process, by structure."""


def known(name: str) -> Region | None:
    """Return the region of a symbol's name; None: it is no region."""
    return _regions.get(name)


def has_failed(symbol: BoundSymbol) -> bool:
    """Return whether inductor raised an error for the region of a symbol."""
    region = known(symbol.sym.name)
    return region is not None and region.has_failed


def bind(
    body: Sequence[BoundSymbol],
    inputs: Sequence[Proxy],
    outputs: Sequence[Proxy],
    values: Mapping[str, Value],
    *,
    num_operators: int = 0,
) -> BoundSymbol:
    """Return the symbol that computes `outputs` from `inputs` as `body` does.

    Args:
        body: Operators and views, each after what it reads.
        inputs: All tensors that they read and do not make, each once.
        outputs: Tensors that they make, none a view of another.
        values: Layouts of the inputs.
        num_operators: Number of the operators of `body`, views left out.
    """
    layouts = [values[p.name].layout for p in inputs]
    name = f"{PREFIX}{_structure(body, inputs, outputs, layouts)}"
    if name not in _regions:
        _regions[name] = Region(
            name,
            _function(body, inputs, outputs),
            layouts,
            num_operators=num_operators,
        )
    symbol = Symbol(name, is_prim=True, is_fusion=True, executor=_executor)
    place = location(body[0])
    return BoundSymbol(
        symbol,
        tuple(inputs),
        {},
        tuple(outputs),
        tags=set() if place is None else {place},
        _call_ctx={name: _regions[name]},
    )


def _function(
    body: Sequence[BoundSymbol], inputs: Sequence[Proxy], outputs: Sequence[Proxy]
) -> Callable[..., Any]:
    """Return the operators one by one, as a function."""
    trace = TraceCtx()
    trace.args, trace.kwargs = tuple(inputs), {}
    trace._siginfo = SigInfo.from_name_and_args("region", trace.args)
    with tracectx(trace):
        for proxy in inputs:
            prims.unpack_trivial(proxy, name=proxy.name)
        trace.bound_symbols += body
        prims.python_return(tuple(outputs))
    return trace.python_callable(include_decorators=False)  # type: ignore[no-any-return]


def _structure(
    body: Sequence[BoundSymbol],
    inputs: Sequence[Proxy],
    outputs: Sequence[Proxy],
    layouts: Sequence[Layout],
) -> str:
    """Return a digest of the operators on numbered values, and of the layouts of what is read."""
    numbers = {proxy.name: number for number, proxy in enumerate(inputs)}
    parts = [inductor.describe()]
    parts += [f"{e.dtype} {e.shape} {e.stride} {e.device}" for e in layouts]
    for bsym in body:
        leaves, tree = tree_flatten((bsym.args, bsym.kwargs))
        read = [
            f"#{numbers[leaf.name]}" if isinstance(leaf, Proxy) else text_of(leaf)
            for leaf in leaves
        ]
        for output in bsym.flat_proxy_outs:
            numbers[output.name] = len(numbers)
        parts.append(f"{bsym.sym.name} {tree} {read} {len(bsym.flat_proxy_outs)}")
    parts.append(str([numbers[o.name] for o in outputs]))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
